"""Optimizers that step where the masters are, and the names old scripts use."""

from nnx_colossalai.optimizers.hybrid_adam import CPUAdam, FusedAdam, HybridAdam

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam"]

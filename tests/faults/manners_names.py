"""Registers the faults that need a name: one that knows one copy of Lightning only, one that declares."""

import lightning_fabric.strategies

import nnx

nnx.StrategyRegistry.register(
    "computes_in_half",
    "faults.manners:ComputesInHalf",
    override=True,
    capabilities=nnx.Capabilities(precisions=("32-true", "bf16-mixed")),
)

# Last, because each registration brings all registries up to date.
nnx.StrategyRegistry.register("one_copy", "nnx_tiny.backend:TinyBackend", override=True)
lightning_fabric.strategies.STRATEGY_REGISTRY.remove("one_copy")

"""The strategy class for Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import ParallelStrategy

from nnx_core.lightning.trainer import TrainerAdapter


class NnxStrategy(TrainerAdapter, ParallelStrategy):  # type: ignore[misc]
    """A `Backend` as a strategy of ``lightning.pytorch``'s Trainer; its arguments are `TrainerAdapter`'s."""

    root = "lightning.pytorch"

"""The strategy class for Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import ParallelStrategy

from nnx_core.lightning.trainer import TrainerAdapter


class NnxStrategy(TrainerAdapter, ParallelStrategy):  # type: ignore[misc]
    """A `Backend` as a strategy of ``pytorch_lightning``'s Trainer; its arguments are `TrainerAdapter`'s."""

    root = "pytorch_lightning"

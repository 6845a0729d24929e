"""The strategy class for Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy

from nnx.backend import Backend
from nnx.lightning.trainer import TrainerAdapter
from nnx.options import CommonOptions

__all__ = ["NnxStrategy"]


class NnxStrategy(TrainerAdapter, ParallelStrategy):  # type: ignore[misc]
    """A `Backend` as a strategy of ``lightning.pytorch``'s Trainer.

    Args:
        backend: The engine.
        name: Name it was registered under, for messages and provenance.
        common: Options that every nnx strategy takes.
        **lightning: Arguments of Lightning's own ``ParallelStrategy``.
    """

    root = "lightning.pytorch"

    def __init__(
        self, backend: Backend[Any], *, name: str, common: CommonOptions | None = None, **lightning: Any
    ) -> None:
        self._init_adapter(backend, name, common or CommonOptions())
        ParallelStrategy.__init__(self, **lightning)

    def _default_precision(self) -> Precision:
        return Precision()

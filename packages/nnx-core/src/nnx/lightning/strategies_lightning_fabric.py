"""The strategy class for Fabric of ``lightning.fabric``."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _Sharded

from nnx.backend import Backend
from nnx.lightning.fabric import FabricAdapter
from nnx.options import CommonOptions

__all__ = ["NnxStrategy"]


class NnxStrategy(FabricAdapter, ParallelStrategy, _Sharded):  # type: ignore[misc]
    """A `Backend` as a strategy of ``lightning.fabric``'s Fabric.

    Args:
        backend: The engine.
        name: Name it was registered under, for messages and provenance.
        common: Options that every nnx strategy takes.
        **lightning: Arguments of Lightning's own ``ParallelStrategy``.
    """

    root = "lightning.fabric"

    def __init__(
        self, backend: Backend[Any], *, name: str, common: CommonOptions | None = None, **lightning: Any
    ) -> None:
        self._init_adapter(backend, name, common or CommonOptions())
        ParallelStrategy.__init__(self, **lightning)

    def _default_precision(self) -> Precision:
        return Precision()

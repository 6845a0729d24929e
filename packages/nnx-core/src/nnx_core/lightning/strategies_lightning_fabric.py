"""The strategy class for Fabric of ``lightning.fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _Sharded

from nnx_core.lightning.fabric import FabricAdapter


class NnxStrategy(FabricAdapter, ParallelStrategy, _Sharded):  # type: ignore[misc]
    """A `Backend` as a strategy of ``lightning.fabric``'s Fabric; its arguments are `FabricAdapter`'s."""

    root = "lightning.fabric"

"""The strategy class for Fabric of ``lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.strategies.parallel import ParallelStrategy
from lightning_fabric.strategies.strategy import _Sharded

from nnx_core.lightning.fabric import FabricAdapter


class NnxStrategy(FabricAdapter, ParallelStrategy, _Sharded):  # type: ignore[misc]
    """A `Backend` as a strategy of ``lightning_fabric``'s Fabric; its arguments are `FabricAdapter`'s."""

    root = "lightning_fabric"

"""Fully sharded data parallel (FSDP2) for PyTorch Lightning, as an nnx plugin.

Importing this package imports neither torch nor Lightning. `nnx_fsdp.backend` is the engine, and
`nnx_fsdp.sharding` is FSDP2 for engines of other packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx_fsdp.options import FSDPOptions, MixedPrecision

if TYPE_CHECKING:
    from nnx_fsdp.sharding import ShardedUnit, Sharding

__all__ = ["FSDPOptions", "MixedPrecision", "ShardedUnit", "Sharding"]


def __getattr__(name: str) -> Any:
    if name in ("ShardedUnit", "Sharding"):
        from nnx_fsdp import sharding

        return getattr(sharding, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Count the memory of a rank under the fsdp_* strategies, for ``nnx plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nnx_core.planning.estimate import World
from nnx_core.planning.trace import Trace
from nnx_core.planning.units import UnitMemory
from nnx_fsdp.units import choose_units

__all__ = ["FSDPMemory", "units_of"]


class FSDPMemory(UnitMemory):
    """A rank of the fsdp_* strategies."""

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        options = dict(options or {})
        replicas = options.get("replicate_size") or (world.nodes if options.get("hybrid") else 1)
        super().__init__(
            trace,
            world,
            options,
            units=units_of(trace.module, options),
            shards=max(world.size // replicas, 1),
            on_host=bool(options.get("cpu_offload")),
        )


def units_of(module: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Return the names of the units of the fsdp_* strategies."""
    if not options.get("auto_wrap", True):
        return []
    choice = choose_units(
        module,
        policy=options.get("auto_wrap_policy"),
        min_num_params=options.get("min_num_params"),
        by_choice=options.get("by_choice"),
    )
    return [name for name, _ in choice.units]

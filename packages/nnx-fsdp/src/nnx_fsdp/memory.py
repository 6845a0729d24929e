"""Count the memory of a rank under the fsdp_* strategies, for ``nnx plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nnx_core.planning.estimate import World
from nnx_core.planning.trace import Trace
from nnx_core.planning.units import UnitMemory
from nnx_fsdp.units import UnitChoice, choose_units

__all__ = ["FSDPMemory"]


class FSDPMemory(UnitMemory):
    """A rank of the fsdp_* strategies."""

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        options = dict(options or {})
        replicas = options.get("replicate_size") or (world.nodes if options.get("hybrid") else 1)
        choice = choice_of(trace.module, options)
        units = [name for name, _ in choice.units]
        reshard = options.get("reshard_after_forward")
        super().__init__(
            trace,
            world,
            options,
            units=units,
            keeps=[name for name in units if not choice.reshards(name, reshard)],
            shards=max(world.size // replicas, 1),
            on_host=bool(options.get("cpu_offload")),
        )


def choice_of(module: nn.Module, options: Mapping[str, Any]) -> UnitChoice:
    """Return the units of the fsdp_* strategies, with the reason for them."""
    if not options.get("auto_wrap", True):
        return UnitChoice((), "wrap() in configure_model chose them")
    return choose_units(
        module,
        policy=options.get("auto_wrap_policy"),
        min_num_params=options.get("min_num_params"),
        by_choice=options.get("by_choice"),
    )

"""Count the memory of a rank under Lightning's own strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from nnx_core.planning.estimate import World
from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Trace
from nnx_core.planning.units import UnitMemory

__all__ = ["DDPMemory", "FSDPOfLightning", "LIGHTNING"]


class DDPMemory(Replay):
    """A rank of torch's DDP: the complete model, and buckets as large as the gradients."""

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("communication", sum(parameter.nbytes for parameter in self.trained))


class FSDPOfLightning(UnitMemory):
    """A rank of Lightning's ``fsdp``, which makes one unit of the model unless it gets a wrap policy."""

    bar = 0.2

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(trace, world, options)
        self.notes.append("one unit: pass auto_wrap_policy to gather layer by layer")


LIGHTNING: dict[str, type[Replay]] = {"ddp": DDPMemory, "fsdp": FSDPOfLightning}
"""The estimators of Lightning's own strategies."""

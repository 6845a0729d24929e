"""Count the memory of a rank under the fairscale strategies, for ``nnx plan``: formulas with a wide bar."""

from __future__ import annotations

from typing_extensions import override

from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Parameter
from nnx_core.planning.units import UnitMemory

__all__ = ["FairscaleFSDPMemory", "OSSMemory", "ShardedMemory"]


class FairscaleFSDPMemory(UnitMemory):
    """A rank of ``fairscale_fsdp``: one unit, unless the user's ``wrap()`` makes more."""

    bar = 0.2


class OSSMemory(Replay):
    """A rank of ``fairscale_oss``: complete parameters and gradients, and a share of the optimizer state."""

    bar = 0.2

    @override
    def stored_state(self, parameter: Parameter) -> int:
        return parameter.state // self.world.size + parameter.scalars

    @override
    def stepped(self) -> list[int]:
        return [parameter.nbytes // self.world.size for parameter in self.trained]


class ShardedMemory(OSSMemory):
    """A rank of ``fairscale_sharded``: gradients belong to one rank each once they are reduced."""

    @override
    def stored_gradient(self, parameter: Parameter) -> int:
        return parameter.nbytes // self.world.size

    @override
    def gradient(self, name: str, nbytes: int) -> None:
        self.memory.add("gradients", nbytes // self.world.size - nbytes)

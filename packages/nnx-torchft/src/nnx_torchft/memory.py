"""Count the memory of a rank of one group, for ``nnx plan`` with the devices of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from nnx_core.planning.estimate import World
from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Trace
from nnx_fsdp.memory import FSDPMemory

__all__ = ["ElasticMemory", "ShardedElasticMemory"]


class ElasticMemory(Replay):
    """A group of one process: the complete model, and its gradients once more to sum them over the groups."""

    bar = 0.2  # torchft and gloo copy sums in threads

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(trace, world, options)
        self.notes.append("plan with the devices of one group, and its share of the batch")

    @override
    def step(self) -> None:
        flags = sum(parameter.nbytes // max(parameter.numel, 1) for parameter in self.trained)
        sums = self.gradients + flags
        self.memory.add("communication", sums)
        self.copy_by_gloo(sums)
        self.memory.add("communication", -sums)
        super().step()


class ShardedElasticMemory(ElasticMemory, FSDPMemory):
    """A rank of a group that shards the model as fsdp_auto does."""

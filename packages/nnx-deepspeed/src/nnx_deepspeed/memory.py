"""Count the memory of a rank under DeepSpeed's ZeRO, for ``nnx plan``. Imports no DeepSpeed.

Stages 1 and 2 flatten the parameters into one partition for each rank, and copy gradients into buckets during
backward. Stage 3 gathers each submodule while it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from nnx_core.planning.estimate import World
from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Parameter, Trace
from nnx_core.planning.units import UnitMemory
from nnx_deepspeed.options import DeepSpeedOptions

__all__ = ["PartitionMemory", "SubmoduleMemory"]

_MASTER = 4


def traced_precision(precision: str) -> str:
    """Return the precision of the weights in forward: DeepSpeed casts the module itself."""
    return {"bf16-mixed": "bf16-true"}.get(precision, precision)


class PartitionMemory(Replay):
    """A rank of stage 1 or 2: complete weights; masters and optimizer state in partitions."""

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(trace, world, options)
        self._options = DeepSpeedOptions(**self.options)
        self._total = sum(parameter.numel for parameter in self.trained)
        self._bucket = min(self._options.reduce_bucket_size, self._total) * self._itemsize
        self._copies = 2 if self._options.overlap_comm and self._options.contiguous_gradients else 1
        self._in_bucket = self._buckets = 0
        if self._itemsize < _MASTER:
            self.bar = 0.2  # only float32 was compared with runs

    @classmethod
    @override
    def traced_precision(cls, precision: str) -> str:
        return traced_precision(precision)

    @property
    def _itemsize(self) -> int:
        return max((parameter.itemsize for parameter in self.trained), default=_MASTER)

    @property
    def _partition(self) -> int:
        """The bytes of this rank's float32 partition."""
        return -(-self._total // self.world.size) * _MASTER

    @override
    def stored_state(self, parameter: Parameter) -> int:
        return 0  # of the partition; see `begin`

    @override
    def stepped(self) -> list[int]:
        return [self._partition]

    @override
    def begin(self) -> None:
        super().begin()
        self.memory.add("gradients", -self.memory.device["gradients"])  # freed by the step before
        states = sum(parameter.state // max(parameter.itemsize, 1) for parameter in self.trained)
        state = states * _MASTER // self.world.size
        master = self._partition if self._itemsize < _MASTER else 0
        if self._options.offload_optimizer:
            self.memory.add_host(state + self._partition * 2)
        else:
            self.memory.add("optimizer", state + master)

    @override
    def gradient(self, name: str, nbytes: int) -> None:
        if not self._buckets:
            self._buckets = self._copies * self._bucket
            self.memory.add("communication", self._buckets)
        self.memory.add("gradients", -nbytes)
        self._in_bucket += nbytes
        if self._in_bucket >= self._bucket:
            self._reduce()

    def _reduce(self) -> None:
        sent, self._in_bucket = self._in_bucket, 0
        self.memory.add_briefly("communication", sent)
        keeps = self._options.stage == 1
        kept = sent if keeps else sent // self.world.size
        if not self._options.offload_optimizer:
            self.memory.add("gradients", kept)

    @override
    def end_backward(self) -> None:
        if self._in_bucket:
            self._reduce()
        self.memory.add("communication", -self._buckets)

    @override
    def step(self) -> None:
        if self._options.offload_optimizer:
            return
        self.memory.add("gradients", self._partition)  # flattened
        self.memory.add("gradients", self._partition - self.memory.device["gradients"])
        super().step()
        self.memory.add("gradients", -self._partition)

    @override
    def end_step(self) -> None:
        if self.world.size > 1:
            self.copy_by_gloo(self._total * self._itemsize)


class SubmoduleMemory(UnitMemory):
    """A rank of stage 3: partitions of everything, and a bucket for gradients at all times."""

    bar = 0.2

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        own = DeepSpeedOptions(**dict(options or {}))
        units = {name.rpartition(".")[0] for name in trace.parameters} - {""}
        super().__init__(
            trace,
            world,
            options,
            units=sorted(units),
            on_host=own.offload_parameters or own.offload_optimizer,
        )
        self._own = own

    @classmethod
    @override
    def traced_precision(cls, precision: str) -> str:
        return traced_precision(precision)

    @override
    def begin(self) -> None:
        super().begin()
        numel = sum(parameter.numel for parameter in self.trained)
        itemsize = max((parameter.itemsize for parameter in self.trained), default=_MASTER)
        self.memory.add("communication", min(self._own.reduce_bucket_size, numel) * itemsize)
        self.memory.add("gradients", -self.memory.device["gradients"])
        masters = -(-numel // self.world.size) * _MASTER
        if self.on_host:
            self.memory.add_host(masters)
        else:
            self.memory.add("optimizer", masters)
        self.notes.append("gathered submodule by submodule; DeepSpeed's own prefetching comes on top")

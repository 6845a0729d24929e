"""Count the memory of a rank under the nnscaler_* strategies, for ``nnx plan``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from typing_extensions import override

from nnx_core.planning.estimate import World
from nnx_core.planning.fakes import repeated_layers
from nnx_core.planning.plain import DDPMemory
from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Parameter, Trace

__all__ = ["ReplicaMemory", "RowMemory", "SplitMemory", "StageMemory"]

_BUCKET = 25 << 20


class RowMemory(Replay):
    """A rank of ``nnscaler_zero``: rows of every parameter, gathered bucket by bucket.

    What autograd keeps of the gathered weights stays until backward. Every bucket has a buffer for its
    unreduced gradients from the first gradient to the last.
    """

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(trace, world, options)
        self._buckets = self._make_buckets()
        self._bucket_of = {p.name: at for at, bucket in enumerate(self._buckets) for p in bucket}
        self._present: set[str] = set()
        self._ahead: int | None = None
        self._used: set[str] = set()
        self._saved: Counter[str] = Counter()
        self._is_forward = True
        self._sent = self._scratch = 0
        self._missing: dict[int, set[str]] = {}

    def _make_buckets(self) -> list[list[Parameter]]:
        limit = _limit(self.options)
        buckets: list[list[Parameter]] = []
        size = limit
        for parameter in self.trace.parameters.values():
            if not parameter.shape:
                continue
            if size >= limit:
                buckets.append([])
                size = 0
            buckets[-1].append(parameter)
            size += parameter.nbytes
        return buckets

    def _rows(self, parameter: Parameter) -> int:
        return parameter.shard_nbytes(self.world.size)

    def _complete(self, bucket: int) -> int:
        return self.world.size * sum(map(self._rows, self._buckets[bucket]))

    @override
    def stored(self, parameter: Parameter) -> int:
        return self._rows(parameter)

    @override
    def stored_state(self, parameter: Parameter) -> int:
        share = self._rows(parameter) / max(parameter.nbytes, 1)
        return round(parameter.state * share) + parameter.scalars

    @override
    def use(self, name: str) -> None:
        at = self._bucket_of.get(name)
        if self.world.size == 1 or at is None or not self._is_forward:
            return
        if name not in self._present:
            self._read(at)
        # In host memory user code gets a copy, which shows its writes.
        if self.world.accelerator == "cpu" and name not in self._used:
            self._used.add(name)
            self.memory.add("temporary", self.trace.parameters[name].nbytes)

    def _read(self, at: int) -> None:
        """Gather a bucket and copy its parameters out of it, and start to gather the next one."""
        if self._ahead != at:
            self._gather(at)
        self._ahead = None
        several = len(self._buckets[at]) > 1  # else the parameter is a view of the gathered buffer
        if not several:
            self.memory.add("communication", -self._complete(at))
        for parameter in self._buckets[at]:
            if parameter.name not in self._present:
                self.memory.add("parameters", self._value(parameter))
                self._present.add(parameter.name)
        if several:
            self.memory.add("communication", -self._complete(at))
        following = self._buckets[at + 1 : at + 2]
        if following and self._present.isdisjoint(p.name for p in following[0]):
            self._gather(at + 1)
            self._ahead = at + 1

    def _value(self, parameter: Parameter) -> int:
        return self.world.size * self._rows(parameter)

    def _gather(self, bucket: int) -> None:
        complete = self._complete(bucket)
        self.memory.add("communication", complete)
        self.copy_by_gloo(complete)

    @override
    def save(self, name: str) -> None:
        self._saved[name] += 1

    @override
    def unsave(self, name: str) -> None:
        self._saved[name] -= 1
        if not self._is_forward and not self._saved[name]:
            self._free(name)

    def _free(self, name: str) -> None:
        if name in self._present:
            self.memory.add("parameters", -self._value(self.trace.parameters[name]))
            self._present.discard(name)

    @override
    def end_forward(self) -> None:
        self._is_forward = False
        if self._ahead is not None:
            self.memory.add("communication", -self._complete(self._ahead))
            self._ahead = None
        for name in [name for name in self._present if not self._saved[name]]:
            self._free(name)
        self.memory.add("temporary", -sum(self.trace.parameters[name].nbytes for name in self._used))
        super().end_forward()

    @override
    def gradient(self, name: str, nbytes: int) -> None:
        at = self._bucket_of.get(name)
        if self.world.size == 1 or at is None:
            return
        if not self._sent:
            self._missing = {
                at: {p.name for p in bucket if p.trained} for at, bucket in enumerate(self._buckets)
            }
            self._sent = sum(map(self._complete, self._missing))
            self.memory.add("communication", self._sent)
        self._missing[at].discard(name)
        if not self._missing[at]:
            self.memory.add("gradients", sum(map(self._rows, self._buckets[at])))
            self.copy_by_gloo(self._complete(at))
        self.memory.add("gradients", -nbytes)

    @override
    def end_backward(self) -> None:
        self.memory.add("communication", -self._sent)
        self._sent = 0


class ReplicaMemory(DDPMemory):
    """A rank of ``nnscaler_dp``: the complete model; gradients are views of the buckets."""

    @override
    def begin(self) -> None:
        Replay.begin(self)


class SplitMemory(Replay):
    """A rank of a tensor parallel plan, by formula: an equal share of every weight, all activations."""

    bar = 0.3
    shares_activations = False

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(trace, world, options)
        self.notes.append("formula: an equal share of each weight; the plan of a run may split fewer")

    @cached_property
    def _ranks(self) -> int:
        return max(self.world.size // self.world.nodes, 1)

    @override
    def stored(self, parameter: Parameter) -> int:
        return parameter.nbytes // self._ranks

    @override
    def stored_state(self, parameter: Parameter) -> int:
        return parameter.state // self._ranks + parameter.scalars

    @override
    def make(self, nbytes: int) -> int:
        return nbytes // self._ranks if self.shares_activations else nbytes

    @override
    def gradient(self, name: str, nbytes: int) -> None:
        if not self.shares_activations:
            self.memory.add("gradients", nbytes // self._ranks - nbytes)


class StageMemory(SplitMemory):
    """A rank of a pipeline of equal stages, by formula: its layers' weights, and activations by schedule.

    GPipe keeps the activations of the complete batch, other schedules of as many microbatches as there are
    ranks along the pipe.
    """

    shares_activations = True

    @cached_property
    def _ranks(self) -> int:
        ranks = self.options.get("plan_ngpus") or self.world.size
        return min(ranks, max(len(repeated_layers(self.trace.module)), 1))

    @override
    def make(self, nbytes: int) -> int:
        return super().make(nbytes) * self._kept[0] // self._kept[1]

    @cached_property
    def _kept(self) -> tuple[int, int]:
        """The microbatches whose activations a rank keeps, and all microbatches."""
        count = self.options.get("pipeline_nmicros") or 1
        is_all = (self.options.get("pipeline_scheduler") or "gpipe") == "gpipe"
        return (count if is_all else min(self._ranks, count)), count


def _limit(options: Mapping[str, Any]) -> int:
    config = options.get("config")
    megabytes = getattr(config, "reducer_bucket_cap_mb", None)
    return int(megabytes * (1 << 20)) if megabytes else _BUCKET

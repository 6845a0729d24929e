"""Replay a step under an engine that gathers whole units of sharded parameters, as FSDP2 does.

FSDP2 gathers a unit into one flat buffer, and copies it into the unit's parameters. In the forward the flat
buffer stays until the next unit is copied; in the backward it is gathered ahead, while the unit before it
computes. The input of a reduce-scatter stays until the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import override

from nnx_core.planning.estimate import World
from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Parameter, Trace

__all__ = ["UnitMemory"]


class UnitMemory(Replay):
    """A rank that stores shards of units, and gathers each unit while it is used.

    Args:
        trace: The step on one process.
        world: The ranks.
        options: The options of the strategy.
        units: The names of the units, without the root.
        shards: The number of ranks that share the parameters; None for all.
        keeps: The names of the units that stay gathered until backward.
        on_host: True if parameters, gradients and optimizer state are in host memory.
    """

    def __init__(
        self,
        trace: Trace,
        world: World,
        options: Mapping[str, Any] | None = None,
        *,
        units: Iterable[str] = (),
        shards: int | None = None,
        keeps: Iterable[str] = (),
        on_host: bool = False,
    ) -> None:
        super().__init__(trace, world, options)
        self.units: dict[str, list[Parameter]] = {name: [] for name in (*units, "")}
        self.shards = world.size if shards is None else shards
        self.keeps, self.on_host = set(keeps), on_host
        self._unit_of: dict[str, str] = {}
        for parameter in trace.parameters.values():
            name = self._innermost(parameter.name)
            self.units[name].append(parameter)
            self._unit_of[parameter.name] = name
        self._gathered: set[str] = set()
        self._flat: str | None = None
        self._ahead: str | None = None
        self._order: list[str] = []
        self._sent = 0
        self._came: dict[str, list[int]] = {}

    def _innermost(self, parameter: str) -> str:
        owner = parameter
        while owner:
            owner = owner.rpartition(".")[0]
            if owner in self.units:
                return owner
        return ""

    # The bytes of a parameter: the rank with the most rows.

    def rows(self, parameter: Parameter) -> int:
        """Return the bytes of a rank's padded shard."""
        return parameter.shard_nbytes(self.shards)

    @override
    def stored(self, parameter: Parameter) -> int:
        return 0 if self.on_host else self.rows(parameter)

    @override
    def stored_state(self, parameter: Parameter) -> int:
        if self.on_host or not parameter.nbytes:
            return 0
        return parameter.state * self.rows(parameter) // parameter.nbytes + parameter.scalars

    def _complete(self, unit: str) -> int:
        return sum(self.rows(parameter) for parameter in self.units[unit]) * self.shards

    # The step.

    @override
    def begin(self) -> None:
        super().begin()
        if self.on_host:
            share = [
                (self.rows(p), p.state / max(p.nbytes, 1), p.trained) for p in self.trace.parameters.values()
            ]
            self.memory.add_host(
                sum(round(rows * (1 + (1 + state) * trained)) for rows, state, trained in share)
            )

    @override
    def begin_forward(self) -> None:
        self._gather_in_forward("")

    @override
    def enter(self, name: str) -> None:
        if name and name in self.units:
            self._gather_in_forward(name)

    @override
    def leave(self, name: str) -> None:
        if not name:
            if self.units[""]:  # FSDP2's root frees the last flat buffer, if it has parameters of its own
                self._drop_flat()
        elif name in self.units:
            self._order.append(name)
            if name not in self.keeps:
                self._free(name)

    def _gather_in_forward(self, name: str) -> None:
        if name in self._gathered or not self.units[name]:
            return
        complete = self._complete(name)
        if self.shards > 1:
            self.memory.add("communication", complete)
            self.copy_by_gloo(complete)
        self.memory.add("parameters", complete)
        if self.shards > 1:
            self._drop_flat()
            self._flat = name
        self._gathered.add(name)

    def _drop_flat(self) -> None:
        if self._flat is not None:
            self.memory.add("communication", -self._complete(self._flat))
            self._flat = None

    def _free(self, name: str) -> None:
        if name in self._gathered:
            self.memory.add("parameters", -self._complete(name))
            self._gathered.discard(name)

    @override
    def end_forward(self) -> None:
        self._drop_flat()
        if "" not in self.keeps:
            self._free("")
        super().end_forward()

    @override
    def begin_backward(self) -> None:
        self._gather_in_backward("")

    @override
    def enter_backward(self, name: str) -> None:
        if name and name in self.units:
            self._gather_in_backward(name)
            if self._order and self._order[-1] == name:
                self._order.pop()
            self._gather_ahead()

    def _gather_in_backward(self, name: str) -> None:
        if name in self._gathered or not self.units[name]:
            return
        if self.shards > 1 and self._ahead != name:
            self.memory.add("communication", self._complete(name))
        self.memory.add("parameters", self._complete(name))
        if self.shards > 1:
            self.memory.add("communication", -self._complete(name))
            self._ahead = None if self._ahead == name else self._ahead
        self._gathered.add(name)

    def _gather_ahead(self) -> None:
        following = self._order[-1] if self._order else None
        if following is None or self.shards == 1 or self._ahead is not None or following in self._gathered:
            return
        complete = self._complete(following)
        self.memory.add("communication", complete)
        self.copy_by_gloo(complete)
        self._ahead = following

    @override
    def gradient(self, name: str, nbytes: int) -> None:
        self._came.setdefault(self._unit_of[name], []).append(nbytes)

    @override
    def leave_backward(self, name: str) -> None:
        if name and name in self.units:
            self._reduce(name)

    def _reduce(self, name: str) -> None:
        self._free(name)
        came = self._came.pop(name, [])
        if not came:
            return
        last = came[0]  # FSDP2's loop keeps the last parameter's gradient until the reduce-scatter ends
        shard = sum(self.rows(parameter) for parameter in self.units[name] if parameter.trained)
        self.memory.add("communication", -self._sent)
        self._sent = shard * self.shards
        self.memory.add("communication", self._sent)
        self.memory.add("gradients", last - sum(came))
        self.memory.add("gradients", shard)
        if self.shards > 1:
            self.copy_by_gloo(self._sent)
        self.memory.add("gradients", -last - shard * self.on_host)

    @override
    def end_backward(self) -> None:
        for name in ("", *self.units):  # units whose inputs have no gradient end here, the root first
            self._reduce(name)
        for name in [*self._gathered]:
            self._free(name)
        self.memory.add("communication", -self._sent)
        self._sent = 0
        if self._ahead is not None:
            self.memory.add("communication", -self._complete(self._ahead))
            self._ahead = None

"""Count the memory of a rank under the colossalai strategies, for ``nnx plan``.

The strategy's own planner puts each unit in a tier, as in a run. A unit of tier `gathered` stays gathered
until backward; units of the lower tiers have masters, gradients and optimizer state in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.planner import plan
from nnx_colossalai.plan.spec import Constraints, Group, ModelSpec, RankResources, Tier
from nnx_colossalai.plan.units import find_units
from nnx_core.errors import PlanError
from nnx_core.planning.estimate import World
from nnx_core.planning.trace import Kind, Parameter, Trace
from nnx_core.planning.units import UnitMemory

__all__ = ["ChunkMemory"]

_UNLIMITED = 1 << 60
_MASTER = 4


class ChunkMemory(UnitMemory):
    """A rank of the colossalai strategies."""

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        own = ColossalAIOptions(**dict(options or {}))
        if trace.precision.endswith("-mixed"):
            self.bar = 0.2  # traced with autocast; chunks cast the weights themselves
        units = [unit.name for unit in find_units(trace.module)]
        super().__init__(trace, world, options, units=units[:-1])
        self.tiers = self._planned(own)
        self.keeps = {name for name, tier in self.tiers.items() if tier is Tier.GATHERED}
        counts = {tier: sum(one is tier for one in self.tiers.values()) for tier in Tier}
        self.notes.append(", ".join(f"{count} {tier.value}" for tier, count in counts.items() if count))

    def _planned(self, own: ColossalAIOptions) -> dict[str, Tier]:
        trained = [p for p in self.trace.parameters.values() if p.trained]
        working = max((p.itemsize for p in trained), default=_MASTER)
        state = sum(p.state for p in trained) // max(sum(p.numel for p in trained), 1)
        activations = self._activations()
        groups = tuple(
            Group(
                name=name,
                numel=sum(p.numel for p in parameters),
                trainable=sum(p.numel for p in parameters if p.trained),
                activation_bytes=activations.get(name, 0),
            )
            for name, parameters in self.units.items()
            if parameters
        )
        spec = ModelSpec(
            groups=groups,
            world_size=self.world.size,
            working_bytes=working,
            optimizer_bytes=state * _MASTER // working,
            other_device_bytes=self.trace.buffers,
        )
        resources = RankResources(
            device_bytes=own.device_bytes or self.world.memory or _UNLIMITED,
            host_bytes=own.host_bytes or self.world.host or _UNLIMITED,
        )
        try:
            return dict(plan(spec, resources, Constraints(policy=own.placement_policy)).placement.tiers)
        except PlanError as error:  # the smallest footprint then shows what is missing
            self.notes.append(error.message)
            lowest = Tier.SHARDED if own.placement_policy == "cuda" else Tier.STREAMED
            return {group.name: lowest for group in groups}

    def _activations(self) -> dict[str, int]:
        """Return the bytes that each unit's forward makes and does not free."""
        found: dict[str, int] = {}
        stack = [""]
        born: dict[int, str] = {}
        for event in self.trace.events:
            if event.kind is Kind.PHASE and event.name == "backward":
                break
            if event.kind is Kind.ENTER and event.name in self.units:
                stack.append(event.name)
            elif event.kind is Kind.LEAVE and event.name == stack[-1] and len(stack) > 1:
                stack.pop()
            elif event.kind is Kind.MAKE:
                born[event.storage] = stack[-1]
                found[stack[-1]] = found.get(stack[-1], 0) + event.nbytes
            elif event.kind is Kind.FREE and event.storage in born:
                found[born[event.storage]] -= event.nbytes
        return found

    def _tier(self, parameter: Parameter) -> Tier:
        return self.tiers[self._unit_of[parameter.name]]

    def _is_on_host(self, parameter: Parameter) -> bool:
        return self._tier(parameter).steps_on_host

    @override
    def stored(self, parameter: Parameter) -> int:
        tier = self._tier(parameter)
        rows = self.rows(parameter)
        return 0 if tier is Tier.STREAMED else rows

    @override
    def stored_gradient(self, parameter: Parameter) -> int:
        return 0 if self._is_on_host(parameter) else self.rows(parameter)

    @override
    def stored_state(self, parameter: Parameter) -> int:
        return 0 if self._is_on_host(parameter) else super().stored_state(parameter)

    @override
    def stepped(self) -> list[int]:
        return [self.rows(p) for p in self.trained if not self._is_on_host(p)]

    @override
    def begin(self) -> None:
        super().begin()
        for parameter in self.trace.parameters.values():
            if self._is_on_host(parameter):
                rows = self.rows(parameter)
                state = super().stored_state(parameter) if parameter.trained else 0
                self.memory.add_host(rows + (rows + state if parameter.trained else 0))

    def _complete(self, unit: str) -> int:
        """Return the bytes of a unit in use; at one rank only a streamed unit has more than it stores."""
        if self.world.size == 1 and self.tiers.get(unit) is not Tier.STREAMED:
            return 0
        return super()._complete(unit)

    def _reduce(self, name: str) -> None:
        """Reduce a unit's gradients; at one rank they stay, or move to the host."""
        if self.world.size > 1:
            super()._reduce(name)
            return
        self._free(name)
        came = sum(self._came.pop(name, []))
        tier = self.tiers.get(name)
        if tier is not None and tier.steps_on_host:
            self.memory.add("gradients", -came)

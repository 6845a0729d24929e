"""Predict the time of a step under a placement, from lanes of compute, copies, collectives and host steps.

This module has the formulas of time and of bytes moved; `nnx_colossalai.plan.cost` has those of memory.

A lane runs one operation after the other: ``compute`` (forward, backward, the step on the device),
``to_device`` and ``to_host`` (copies), ``host`` (the step in host memory) and ``collective``. A step is timed
between the moments at which all gradients of two successive batches are complete. No optimizer step may begin
earlier, because clipping and the overflow check need all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nnx_colossalai.plan.cost import MemoryModel
from nnx_colossalai.plan.spec import Group, ModelSpec, Placement, RankResources, Tier

_FORWARD = 1 / 3
"""The forward's share of compute time; backward computes gradients of weights and of inputs."""
_NOT_HIDDEN = 0.05
"""The share of host work and copies that slows compute down, through Python and memory bandwidth."""
LANES = ("compute", "to_device", "to_host", "host", "collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The bytes that one group moves and the elements that it steps, on one rank in one step.

    Attributes:
        fetched: The bytes copied from host to device before a forward, and again before the backward.
        refreshed: The bytes copied from host to device after the step.
        gradients: The bytes copied from device to host in the backward.
        gathered: The bytes sent in the all-gather before a forward.
        gathered_again: The bytes sent in the all-gather before a backward.
        reduced: The bytes sent in the reduce-scatter of the gradients.
        host_step: The elements that the optimizer updates in host memory.
        device_step: The elements that it updates on the device.
    """

    fetched: int = 0
    refreshed: int = 0
    gradients: int = 0
    gathered: int = 0
    gathered_again: int = 0
    reduced: int = 0
    host_step: int = 0
    device_step: int = 0

    @property
    def to_device(self) -> int:
        """The bytes from host to device in one step."""
        return 2 * self.fetched + self.refreshed

    @property
    def to_host(self) -> int:
        """The bytes from device to host in one step."""
        return self.gradients


def work(spec: ModelSpec, group: Group, tier: Tier) -> Work:
    """Return the work of one group on one rank in one step of one batch.

    ``N``, ``T`` are the elements and trained elements of one rank; ``w``, ``g`` are the bytes per element of
    working weights and of the gradients that the optimizer reads:

    ========= ==================================== =======================
    tier      to the device                        to the host
    ========= ==================================== =======================
    gathered  0                                    0
    sharded   0                                    0
    offloaded ``N*w`` after the step, if any is    ``T*w`` at one rank,
              trained                              ``T*g`` above
    streamed  ``N*w`` before forward and backward  as offloaded
    ========= ==================================== =======================

    At one rank gradients move at the working width, which loses nothing. Above one rank they are sums, and
    move at the optimizer's width. A rank of ``W`` sends ``(W - 1)/W`` of the full ``n*w`` bytes in an
    all-gather (one in tier gathered, else two) and of ``t*g`` in a reduce-scatter.

    Example:
        >>> group = Group(name="layer", numel=1000, trainable=1000)
        >>> spec = ModelSpec(groups=(group,))
        >>> one = work(spec, group, Tier.STREAMED)
        >>> one.to_device, one.to_host
        (4000, 2000)
    """
    ranks = spec.world_size
    part, trained_part = -(-group.numel // ranks), -(-group.trainable // ranks)
    gathered = group.numel * spec.working_bytes * (ranks - 1) // ranks
    gradient = spec.working_bytes if ranks == 1 else spec.gradient_bytes
    host = tier.steps_on_host
    return Work(
        fetched=part * spec.working_bytes if tier is Tier.STREAMED else 0,
        refreshed=part * spec.working_bytes if tier is Tier.OFFLOADED and group.trainable else 0,
        gradients=trained_part * gradient if host else 0,
        gathered=gathered,
        gathered_again=0 if tier is Tier.GATHERED else gathered,
        reduced=group.trainable * spec.gradient_bytes * (ranks - 1) // ranks,
        host_step=trained_part if host else 0,
        device_step=0 if host else trained_part,
    )


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted time of one step.

    Attributes:
        seconds: The time from one batch's complete gradients to those of the next.
        busy: The seconds of work of each lane; a lane near `seconds` limits the step.
    """

    seconds: float
    busy: dict[str, float] = field(default_factory=dict)


def step_time(
    spec: ModelSpec, resources: RankResources, placement: Placement, *, overlapped: bool = True
) -> StepTime:
    """Predict the time of one step under a placement.

    Args:
        spec: The model.
        resources: The rates.
        placement: A tier for each group.
        overlapped: True if a forward waits only for the step of its own group, False if for all.
    """
    model = TimeModel(spec, resources, overlapped=overlapped)
    return model.step_time([placement.tiers[group.name] for group in spec.groups])


@dataclass(frozen=True, slots=True)
class _Seconds:
    """`Work` divided by the rates of the resources."""

    fetch: float
    refresh: float
    down: float
    gather: float
    gather_again: float
    reduce: float
    host: float
    device: float


class TimeModel:
    """Predicts the time of any placement of one model; figures of the model are computed once.

    Args:
        spec: The model.
        resources: The rates.
        overlapped: The argument of `step_time`.
        uses: The `MemoryModel.uses` of the model; computed if None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        resources: RankResources,
        *,
        overlapped: bool,
        uses: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.spec, self.overlapped = spec, overlapped
        self.works = [{tier: work(spec, group, tier) for tier in Tier} for group in spec.groups]
        self._seconds = [{tier: _over(resources, one[tier]) for tier in Tier} for one in self.works]
        self._lanes = [
            {tier: _lanes(group, one[tier]) for tier in Tier}
            for group, one in zip(spec.groups, self._seconds, strict=True)
        ]
        uses = MemoryModel(spec).uses if uses is None else uses
        count = len(spec.groups)
        self._first = [[j for j in range(count) if uses[j][0] == at] for at in range(count)]
        self._last = [[j for j in range(count) if uses[j][1] == at] for at in range(count)]
        self._order = sorted(range(count), key=lambda j: (uses[j][0], -uses[j][1], j))

    def lanes(self, index: int, tier: Tier) -> tuple[float, ...]:
        """Return the seconds of one group's work on each of `LANES`."""
        return self._lanes[index][tier]

    def step_time(self, tiers: Sequence[Tier]) -> StepTime:
        """Return the time of a step and of each lane's work."""
        return StepTime(self.seconds(tiers), dict(zip(LANES, self._busy(tiers), strict=True)))

    def bound(self, tiers: Sequence[Tier]) -> float:
        """Return a cheap lower bound of `seconds`: the time of the busiest lane."""
        busy = self._busy(tiers)
        return max(busy) + _NOT_HIDDEN * sum(busy[1:4])

    def seconds(self, tiers: Sequence[Tier]) -> float:
        """Return the time of a step, in which the lanes wait for each other."""
        one = [by_tier[tier] for by_tier, tier in zip(self._seconds, tiers, strict=True)]
        stepped, refreshing, started = self._step(one)
        compute, fetching = self._forward(one, stepped, refreshing, started)
        # Refreshes and fetches were scheduled separately, but share a lane that may be too busy for both.
        busy = self._busy(tiers)
        # The last term is an assumption: without it, a copy that overlaps compute would cost nothing, and the
        # planner would move chunks off the device for no gain.
        return max(self._backward(one, compute, fetching), *busy) + _NOT_HIDDEN * sum(busy[1:4])

    def _busy(self, tiers: Sequence[Tier]) -> list[float]:
        """Return the seconds of work of each of `LANES`."""
        return list(
            map(sum, zip(*(one[tier] for one, tier in zip(self._lanes, tiers, strict=True)), strict=True))
        ) or [0.0] * len(LANES)

    def _step(self, one: list[_Seconds]) -> tuple[list[float], float, float]:
        """Return when groups are refreshed, the lane to the device is free, and compute begins."""
        if not self.overlapped:
            everything = max(sum(s.host for s in one), sum(s.device for s in one)) + sum(
                s.refresh for s in one
            )
            return [everything] * len(one), everything, everything
        host = copying = 0.0
        stepped = [0.0] * len(one)
        for j in self._order:
            host += one[j].host
            if one[j].refresh:
                copying = max(copying, host) + one[j].refresh
            stepped[j] = copying if one[j].refresh else host
        return stepped, copying, 0.0

    def _forward(
        self, one: list[_Seconds], stepped: list[float], to_device: float, compute: float
    ) -> tuple[float, float]:
        """Return the times when the forward has ended and the lane to the device is free."""
        # A group's weights are fetched and gathered while the group before it computes.
        collective = before = compute
        # When overlapped, refreshes follow the order of use too, between the fetches of this loop.
        if self.overlapped:
            to_device = 0.0
        for at, group in enumerate(self.spec.groups):
            ready = compute
            for j in self._first[at]:
                arrived = max(before, stepped[j])
                if one[j].fetch:
                    to_device = arrived = max(to_device, arrived) + one[j].fetch
                if one[j].refresh:
                    to_device = max(to_device, stepped[j])
                if one[j].gather:
                    collective = arrived = max(collective, arrived) + one[j].gather
                ready = max(ready, arrived)
                if self.overlapped:
                    ready += one[j].device
            before, compute = ready, ready + group.compute_seconds * _FORWARD
        return compute, to_device

    def _backward(self, one: list[_Seconds], compute: float, to_device: float) -> float:
        """Return the time when compute has ended and the optimizer can read all gradients."""
        collective = before = end = compute
        to_host = 0.0
        for at in reversed(range(len(one))):
            ready = compute
            for j in self._last[at]:
                arrived = before
                if one[j].fetch:
                    to_device = arrived = max(to_device, arrived) + one[j].fetch
                if one[j].gather_again:
                    collective = arrived = max(collective, arrived) + one[j].gather_again
                ready = max(ready, arrived)
            before = ready
            compute = ready + self.spec.groups[at].compute_seconds * (1 - _FORWARD)
            for j in self._first[at]:
                complete = compute
                if one[j].reduce:
                    collective = complete = max(collective, complete) + one[j].reduce
                if one[j].down:
                    to_host = complete = max(to_host, complete) + one[j].down
                end = max(end, complete)
        return max(end, compute)


def _lanes(group: Group, one: _Seconds) -> tuple[float, ...]:
    return (
        group.compute_seconds + one.device,
        2 * one.fetch + one.refresh,
        one.down,
        one.host,
        one.gather + one.gather_again + one.reduce,
    )


def _over(resources: RankResources, one: Work) -> _Seconds:
    return _Seconds(
        fetch=one.fetched / resources.to_device,
        refresh=one.refreshed / resources.to_device,
        down=one.gradients / resources.to_host,
        gather=one.gathered / resources.collective,
        gather_again=one.gathered_again / resources.collective,
        reduce=one.reduced / resources.collective,
        host=one.host_step / resources.host_step,
        device=one.device_step / resources.device_step,
    )

"""What a placement costs in memory: bytes of one rank on device and host, moment by moment over a step.

Owns the formulas of memory, for the tables, the drawing and the planner alike; never decides anything, and
knows nothing of time (`nnx_colossalai.plan.schedule`).

A step is a row of moments: the forward of every group in order, their backward in reverse, and the step of
the optimizer. A group is *in use* while its module runs: a group ``""`` or ``"encoder"`` is in use while the
groups inside it (``"encoder.0"``) run too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nnx_colossalai.plan.spec import Group, ModelSpec, Placement, RankResources, Tier

Phase = Literal["forward", "backward", "step"]

_TIERS = tuple(Tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank that one group takes in one tier.

    Those that stay (`weights` to `host_optimizer`) are there all the time, gradients from the backward of the
    group on, or from the start where ``ModelSpec.gradients_in_forward``. The others come and go.

    Attributes:
        weights: Working weights on the device, or masters that are the working weights.
        masters: Masters on the device beside the working weights.
        gradients: On the device, as the optimizer reads them.
        optimizer: State of the optimizer on the device.
        host_weights: Working weights in host memory.
        host_masters: Masters in host memory.
        host_gradients: The gradients in host memory, as the optimizer reads them.
        host_optimizer: State of the optimizer in host memory.
        in_use: Complete weights on the device while the group is in use, beside `weights`.
        kept: True if `in_use` stays from the forward to the end of the backward.
        arriving: Buffers that a copy or all-gather fills while the group before it is in use.
        unpacking: The bytes that are still there when the use begins.
        backward: Gradients of working dtype and buffers to reduce them, while its backward runs.
        leaving: The bytes that may outlast it: above one rank while the next backward runs, at one rank
            until they are copied; all groups together have at most twice the largest group's weights then.
        host_staging: Host memory for a conversion or a copy under way; two chunks at most have one.
    """

    weights: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host_weights: int = 0
    host_masters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0
    in_use: int = 0
    kept: bool = False
    arriving: int = 0
    unpacking: int = 0
    backward: int = 0
    leaving: int = 0
    host_staging: int = 0

    @property
    def device(self) -> int:
        """Bytes that stay on the device, without gradients."""
        return self.weights + self.masters + self.optimizer

    @property
    def host(self) -> int:
        """Bytes that stay in host memory."""
        return self.host_weights + self.host_masters + self.host_gradients + self.host_optimizer


def footprint(spec: ModelSpec, group: Group, tier: Tier) -> Footprint:
    """Bytes of one rank that a group takes in a tier.

    With ``n`` elements of which ``t`` are trained, ``w``, ``m``, ``g``, ``o`` bytes per element of working
    weights, masters, gradients and state, and ``N``, ``T`` the parts of one rank (``n``, ``t`` divided by the
    ranks, rounded up):

    ========= =================================== ====================================
    tier      stays on the device                 stays in host memory
    ========= =================================== ====================================
    gathered  ``N*m + T*(g + o)``                 nothing
    sharded   ``N*m + T*(g + o)``                 nothing
    offloaded ``N*w``                             ``N*m + T*(g + o)``
    streamed  nothing                             ``N*w + N*m + T*(g + o)``
    ========= =================================== ====================================

    At one rank the first two hold ``n*w`` working weights more where they are not the masters themselves;
    above one rank streamed weights that would be equal to the masters are read from them, without ``N*w``.
    What comes and goes at one rank: a streamed group's ``n*w`` while it arrives and is in use; in its
    backward ``t*w`` gradients where they are not the optimizer's own, and as many that leave for the host.
    Above one rank: ``n*w`` complete weights in use and ``n*w`` in the flat buffer that they are gathered
    into (``N*w`` more where they come from the host); in the backward ``t*w`` complete gradients and the
    ``t*g`` of the flat buffer that is reduced, which is freed after the next one, with ``T*g`` of its result
    where that goes to the host.

    Example:
        >>> group = Group(name="layer", numel=1000, trainable=1000)
        >>> footprint(ModelSpec(groups=(group,)), group, Tier.OFFLOADED).weights
        2000
        >>> footprint(ModelSpec(groups=(group,)), group, Tier.OFFLOADED).host
        16000
    """
    part, trained_part = _share(group.numel, spec.world_size), _share(group.trainable, spec.world_size)
    own = spec.master_bytes == spec.working_bytes
    if tier.steps_on_host:
        from_masters = own and spec.world_size > 1
        stays = Footprint(
            weights=part * spec.working_bytes if tier is Tier.OFFLOADED else 0,
            host_weights=part * spec.working_bytes if tier is Tier.STREAMED and not from_masters else 0,
            host_masters=part * spec.master_bytes,
            host_gradients=trained_part * spec.gradient_bytes,
            host_optimizer=trained_part * spec.optimizer_bytes,
            host_staging=max(part * spec.working_bytes, trained_part * spec.gradient_bytes),
        )
    else:
        copy = part * spec.working_bytes if spec.world_size == 1 else 0
        stays = Footprint(
            weights=part * spec.master_bytes if own else copy,
            masters=0 if own else part * spec.master_bytes,
            gradients=trained_part * spec.gradient_bytes,
            optimizer=trained_part * spec.optimizer_bytes,
        )
    return (_local if spec.world_size == 1 else _distributed)(spec, group, tier, stays)


def _local(spec: ModelSpec, group: Group, tier: Tier, stays: Footprint) -> Footprint:
    """Add what comes and goes at one rank."""
    complete, gradients = group.numel * spec.working_bytes, group.trainable * spec.working_bytes
    streamed = complete if tier is Tier.STREAMED else 0
    if not tier.steps_on_host and spec.gradient_bytes == spec.working_bytes:
        gradients = 0
    return replace(
        stays,
        in_use=streamed,
        arriving=streamed,
        backward=gradients,
        leaving=gradients if tier.steps_on_host else 0,
    )


def _distributed(spec: ModelSpec, group: Group, tier: Tier, stays: Footprint) -> Footprint:
    """Add what comes and goes above one rank."""
    complete = group.numel * spec.working_bytes
    from_host = _share(group.numel, spec.world_size) * spec.working_bytes if tier is Tier.STREAMED else 0
    reduced = _share(group.trainable, spec.world_size) * spec.gradient_bytes if tier.steps_on_host else 0
    reducing = group.trainable * spec.gradient_bytes + reduced
    return replace(
        stays,
        in_use=complete,
        kept=tier is Tier.GATHERED,
        arriving=complete + from_host,
        unpacking=complete + from_host,
        backward=group.trainable * spec.working_bytes + reducing,
        leaving=reducing,
    )


def _share(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory of one rank at one moment of a step, by kind, in bytes.

    Attributes:
        phase: Forward, backward, or the optimizer's step.
        group: Name of the group whose forward or backward runs; ``""`` in the step too.
        weights: Working weights that stay on the device.
        masters: Masters that stay on the device beside them.
        gradients: The gradients as the optimizer reads them, and those on their way to that.
        optimizer: State of the optimizer.
        gathered: Complete weights on the device only while they are used.
        staging: Buffers of copies and collectives under way.
        activations: The bytes that forwards have kept for their backwards.
        other: The bytes that the device holds besides.
        host: All of host memory.
    """

    phase: Phase
    group: str
    weights: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    staging: int = 0
    activations: int = 0
    other: int = 0
    host: int = 0

    @property
    def device(self) -> int:
        """All of device memory."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Device memory by kind, in the order in which it is drawn."""
        return {
            "weights": self.weights,
            "masters": self.masters,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "gathered": self.gathered,
            "staging": self.staging,
            "activations": self.activations,
            "other": self.other,
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one rank over one step.

    Attributes:
        timeline: Every group's forward in order, every group's backward in reverse, the optimizer's step.
    """

    timeline: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment with the most device memory."""
        return max(self.timeline, key=lambda moment: moment.device)

    @property
    def device(self) -> int:
        """The most device memory of any moment."""
        return self.peak.device

    @property
    def host(self) -> int:
        """The most host memory of any moment."""
        return max(moment.host for moment in self.timeline)


def memory(spec: ModelSpec, placement: Placement) -> Memory:
    """Memory of one rank over one step under a placement.

    Args:
        spec: The model.
        placement: A tier for each of its groups.

    Example:
        >>> spec = ModelSpec(groups=(Group(name="layer", numel=1000, trainable=1000),))
        >>> memory(spec, Placement({"layer": Tier.GATHERED})).device  # 2 + 4 + 4 + 8 and 2 of gradients
        20000
    """
    return MemoryModel(spec).memory([placement.tiers[group.name] for group in spec.groups])


class MemoryModel:
    """Memory of any placement of one model, quickly: what does not depend on the placement is known before.

    Args:
        spec: The model.

    Attributes:
        footprints: The footprints of every group, by tier.
        uses: The first and last place in the order at which each group is in use.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.footprints = [{tier: footprint(spec, group, tier) for tier in _TIERS} for group in spec.groups]
        self.uses = [_use(spec, index) for index in range(len(spec.groups))]
        places = range(len(spec.groups))
        self._using = [
            [j for j, (first, last) in enumerate(self.uses) if first <= at <= last] for at in places
        ]
        self._first = [[j for j, use in enumerate(self.uses) if use[0] == at] for at in places]
        self._last = [[j for j, use in enumerate(self.uses) if use[1] == at] for at in places]

    def device_peak(self, tiers: Sequence[Tier]) -> int:
        """The most device memory of any moment."""
        prints = self._prints(tiers)
        stays = sum(one.device for one in prints) + self.spec.other_device_bytes
        return stays + max(sum(parts) for _, _, parts in self._moments(prints))

    def fits(self, tiers: Sequence[Tier], resources: RankResources) -> bool:
        """Return True if both peaks are within their budgets; what stays is looked at before any moment."""
        prints = self._prints(tiers)
        stays = sum(one.weights + one.masters + one.optimizer + one.gradients for one in prints)
        if stays + self.spec.other_device_bytes > resources.device_bytes:
            return False  # gradients are all there in the step
        return (
            self.host_peak(tiers) <= resources.host_bytes
            and self.device_peak(tiers) <= resources.device_bytes
        )

    def host_peak(self, tiers: Sequence[Tier]) -> int:
        """The most host memory of any moment: everything that stays, and two chunks' staging."""
        prints = self._prints(tiers)
        return sum(one.host for one in prints) + sum(sorted(one.host_staging for one in prints)[-2:])

    def memory(self, tiers: Sequence[Tier]) -> Memory:
        """Every moment, by kind.

        Args:
            tiers: The tiers of all groups, in their order.
        """
        prints, host = self._prints(tiers), self.host_peak(tiers)
        weights, masters = sum(one.weights for one in prints), sum(one.masters for one in prints)
        optimizer = sum(one.optimizer for one in prints)
        return Memory(
            tuple(
                Moment(
                    phase=phase,
                    group=self.spec.groups[at].name if phase != "step" else "",
                    weights=weights,
                    masters=masters,
                    optimizer=optimizer,
                    gradients=gradients,
                    gathered=gathered,
                    staging=staging,
                    activations=activations,
                    other=self.spec.other_device_bytes,
                    host=host,
                )
                for phase, at, (gathered, staging, gradients, activations) in self._moments(prints)
            )
        )

    def _prints(self, tiers: Sequence[Tier]) -> list[Footprint]:
        return [by_tier[tier] for by_tier, tier in zip(self.footprints, tiers, strict=True)]

    def _moments(self, prints: list[Footprint]) -> list[tuple[Phase, int, tuple[int, int, int, int]]]:
        """Gathered, staging, gradients and activations at every moment."""
        count = len(prints)
        always = self.spec.gradients_in_forward
        gradients = sum(one.gradients for one in prints) if always else 0
        moments: list[tuple[Phase, int, tuple[int, int, int, int]]] = []
        kept = activations = 0
        for at in range(count):
            activations += self.spec.groups[at].activation_bytes
            gathered = kept + sum(prints[j].in_use for j in self._using[at] if not prints[j].kept)
            now = sum(prints[j].in_use for j in self._first[at] if prints[j].kept)
            staging = sum(prints[j].unpacking for j in self._first[at])
            if at + 1 < count:
                staging += sum(prints[j].arriving for j in self._first[at + 1])
            moments.append(("forward", at, (gathered + now, staging, gradients, activations)))
            kept += now
        under_way = 0
        for at in reversed(range(count)):
            if not always:
                gradients += sum(prints[j].gradients for j in self._last[at])
            gathered = kept + sum(prints[j].in_use for j in self._using[at] if not prints[j].kept)
            staging = sum(prints[j].unpacking for j in self._last[at] if not prints[j].kept)
            if at:
                staging += sum(prints[j].arriving for j in self._last[at - 1] if not prints[j].kept)
            moving, under_way = self._moving(prints, at, under_way)
            moments.append(("backward", at, (gathered, staging, gradients + moving, activations)))
            activations -= self.spec.groups[at].activation_bytes
            kept -= sum(prints[j].in_use for j in self._first[at] if prints[j].kept)
        moments.append(("step", 0, (0, 0, gradients, 0)))
        return moments

    def _moving(self, prints: list[Footprint], at: int, under_way: int) -> tuple[int, int]:
        """Gradients and their buffers during the backward of a place, and of those what outlasts it."""
        backward = sum(prints[j].backward for j in self._using[at])
        ended = sum(prints[j].leaving for j in self._first[at])
        if self.spec.world_size > 1:
            return under_way + backward, ended
        sent = sum(prints[j].leaving for j in self._using[at])
        most = 2 * self.spec.working_bytes * max(group.numel for group in self.spec.groups)
        return backward - sent + min(most, under_way + sent), min(most, under_way + ended)


def _use(spec: ModelSpec, index: int) -> tuple[int, int]:
    """First and last place at which a group is in use: its own, and those of the groups inside its module."""
    name = spec.groups[index].name
    inside = [
        at
        for at, group in enumerate(spec.groups)
        if at == index or not name or group.name.startswith(name + ".")
    ]
    return inside[0], inside[-1]

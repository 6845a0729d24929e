"""Predict the memory of a placement: bytes of one rank on device and host at every moment of a step.

The tables, the drawing and the planner share these formulas. `nnx_colossalai.plan.schedule` predicts time.

A step is a sequence of moments: the forward of every group in order, the backwards in reverse, and the
optimizer step. A group is *in use* while its module runs: a group ``""`` or ``"encoder"`` is also in use
while inner groups (``"encoder.0"``) run.
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
    """The bytes of one group in one tier on one rank.

    Lasting bytes (`weights` to `host_optimizer`) are always there; gradients start with the group's backward,
    or are there in the forward too if ``ModelSpec.gradients_in_forward``. The others are temporary.

    Attributes:
        weights: The working weights on the device, or masters that serve as working weights.
        masters: The masters on the device beside the working weights.
        gradients: The gradients on the device, as the optimizer reads them.
        optimizer: The optimizer state on the device.
        host_weights: The working weights in host memory.
        host_masters: The masters in host memory.
        host_gradients: The gradients in host memory, as the optimizer reads them.
        host_optimizer: The optimizer state in host memory.
        in_use: The full weights on the device while the group is in use, besides `weights`.
        kept: True if `in_use` stays from the forward to the end of the backward.
        arriving: The buffers that a copy or all-gather fills while the group before it is in use.
        unpacking: The buffers that are still alive when the use begins.
        backward: The gradients of working dtype and their reduction buffers during the backward.
        leaving: The bytes that may outlast the backward: above one rank during the next backward, at one
            rank until they are copied. At one rank all groups have at most twice the largest group's weights.
        host_staging: The host memory of a conversion or a copy; at most two chunks have one at a time.
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
        """The lasting bytes on the device, without gradients."""
        return self.weights + self.masters + self.optimizer

    @property
    def host(self) -> int:
        """The lasting bytes in host memory."""
        return self.host_weights + self.host_masters + self.host_gradients + self.host_optimizer


def footprint(spec: ModelSpec, group: Group, tier: Tier) -> Footprint:
    """Return the bytes of a group in a tier on one rank.

    A group has ``n`` elements, of which ``t`` are trained. One element has ``w``, ``m``, ``g``, ``o`` bytes
    of working weights, masters, gradients and state. One rank's shard has ``N``, ``T`` elements (``n``, ``t``
    divided by the ranks, rounded up):

    ========= =================================== ====================================
    tier      stays on the device                 stays in host memory
    ========= =================================== ====================================
    gathered  ``N*m + T*(g + o)``                 nothing
    sharded   ``N*m + T*(g + o)``                 nothing
    offloaded ``N*w``                             ``N*m + T*(g + o)``
    streamed  nothing                             ``N*w + N*m + T*(g + o)``
    ========= =================================== ====================================

    At one rank the first two tiers hold ``n*w`` more working weights, unless the masters serve. Above one
    rank streamed weights of the masters' dtype are read from the masters, without ``N*w``.

    Temporary bytes at one rank: a streamed group has ``n*w`` while it is fetched and in use. Its backward has
    ``t*w`` gradients, unless the optimizer reads them directly, and as many in transfer to the host. Above
    one rank: a group has ``n*w`` full weights in use and ``n*w`` in the all-gather buffer (``N*w`` more if
    they come from the host). Its backward has ``t*w`` full gradients and ``t*g`` in the reduction buffer,
    which is freed after the next one, with ``T*g`` of its result if that goes to the host.

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
    """Add the temporary bytes at one rank."""
    complete, gradients = group.numel * spec.working_bytes, group.trainable * spec.working_bytes
    streamed = complete if tier is Tier.STREAMED else 0
    # The optimizer reads autograd's gradients themselves, which `gradients` counts.
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
    """Add the temporary bytes above one rank."""
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
    """The memory of one rank at one moment of a step, by kind, in bytes.

    Attributes:
        phase: Forward, backward, or the optimizer step.
        group: The name of the group whose forward or backward runs; ``""`` in the step too.
        weights: The lasting working weights on the device.
        masters: The masters on the device beside them.
        gradients: The gradients that the optimizer reads, and those that backward has not converted yet.
        optimizer: The optimizer state.
        gathered: The full weights that are on the device only for their uses.
        staging: The buffers of running copies and collectives.
        activations: The bytes that forwards have saved for their backwards.
        other: The other bytes on the device.
        host: The bytes of host memory.
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
        """The bytes of device memory."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """The device memory by kind, in the order of the drawing."""
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
    """The memory of one rank over one step.

    Attributes:
        timeline: The moments: forwards of all groups in order, backwards in reverse, the optimizer step.
    """

    timeline: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment with the most device memory."""
        return max(self.timeline, key=lambda moment: moment.device)

    @property
    def device(self) -> int:
        """The peak of device memory."""
        return self.peak.device

    @property
    def host(self) -> int:
        """The most host memory of any moment."""
        return max(moment.host for moment in self.timeline)


def memory(spec: ModelSpec, placement: Placement) -> Memory:
    """Return the memory of one rank over one step under a placement.

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
    """Predicts the memory of any placement of one model; figures of the model are computed once.

    Args:
        spec: The model.

    Attributes:
        footprints: The footprints of every group, by tier.
        uses: The indices of the first and the last moment at which each group is in use.
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
        self._activations = sum(group.activation_bytes for group in spec.groups)

    def least_device_peak(self, tiers: Sequence[Tier]) -> int:
        """Return a lower bound of `device_peak`, quickly: the lasting bytes and all activations."""
        lasting = sum(one.device for one in self._prints(tiers))
        return lasting + self.spec.other_device_bytes + self._activations

    def device_peak(self, tiers: Sequence[Tier]) -> int:
        """Return the peak of device memory."""
        prints = self._prints(tiers)
        stays = sum(one.device for one in prints) + self.spec.other_device_bytes
        return stays + max(sum(parts) for _, _, parts in self._moments(prints))

    def fits(self, tiers: Sequence[Tier], resources: RankResources) -> bool:
        """Return True if both peaks are within their budgets."""
        prints = self._prints(tiers)
        # The optimizer step has all lasting bytes and gradients: cheap tests that refuse most placements.
        stays = sum(one.weights + one.masters + one.optimizer + one.gradients for one in prints)
        if stays + self.spec.other_device_bytes > resources.device_bytes:
            return False
        if self.least_device_peak(tiers) > resources.device_bytes:
            return False
        return (
            self.host_peak(tiers) <= resources.host_bytes
            and self.device_peak(tiers) <= resources.device_bytes
        )

    def host_peak(self, tiers: Sequence[Tier]) -> int:
        """Return the peak of host memory: all lasting bytes, and the staging of two chunks."""
        prints = self._prints(tiers)
        return sum(one.host for one in prints) + sum(sorted(one.host_staging for one in prints)[-2:])

    def memory(self, tiers: Sequence[Tier]) -> Memory:
        """Return the memory of every moment, by kind.

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
        """Return gathered, staging, gradients and activations at every moment."""
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
            # The next group is fetched or gathered while this one computes.
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
        """Return the temporary gradient bytes during one backward, and the bytes of them that outlast it."""
        backward = sum(prints[j].backward for j in self._using[at])
        ended = sum(prints[j].leaving for j in self._first[at])
        if self.spec.world_size > 1:
            return under_way + backward, ended
        sent = sum(prints[j].leaving for j in self._using[at])
        # `local_gradients.Gradients.limit` bounds the bytes in transfer to the host.
        most = 2 * self.spec.working_bytes * max(group.numel for group in self.spec.groups)
        return backward - sent + min(most, under_way + sent), min(most, under_way + ended)


def _use(spec: ModelSpec, index: int) -> tuple[int, int]:
    """Return the first and the last index at which a group is in use: its own, and those of inner groups."""
    name = spec.groups[index].name
    inside = [
        at
        for at, group in enumerate(spec.groups)
        if at == index or not name or group.name.startswith(name + ".")
    ]
    return inside[0], inside[-1]

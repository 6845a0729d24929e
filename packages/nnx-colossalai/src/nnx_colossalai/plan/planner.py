"""Chooses where every group lies: the fastest placement that fits the budgets and the wishes.

Owns the choice, its explanation and the refusal where nothing fits; never the formulas (`cost`, `schedule`).
Pure and deterministic: the same input gives the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nnx_colossalai.plan.cost import Memory, MemoryModel, Moment
from nnx_colossalai.plan.policies import Choice, candidates, meets_fractions, search
from nnx_colossalai.plan.schedule import TimeModel
from nnx_colossalai.plan.spec import (
    ModelSpec,
    Placement,
    RankResources,
    Tier,
    Wishes,
    allowed_tiers,
    format_bytes,
)
from nnx_core.errors import OptionError, PlanError

_TIERS = tuple(Tier)


@dataclass(frozen=True, slots=True)
class Planned:
    """A placement and what it costs one rank.

    Attributes:
        placement: A tier for every group.
        memory: Over one step.
        seconds: Predicted time of a step.
        reasons: Why each group is where it is, by name.
        busy: Seconds of work of each lane in a step.
    """

    placement: Placement
    memory: Memory
    seconds: float
    reasons: Mapping[str, str] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)


def plan(spec: ModelSpec, resources: RankResources, wishes: Wishes | None = None) -> Planned:
    """The fastest placement that fits.

    Args:
        spec: The model.
        resources: Budgets and rates.
        wishes: The constraints that it keeps to; by default none.

    Raises:
        PlanError: None fits; the message names the bytes needed, what dominates, and the knob.
        OptionError: The wishes cannot be met by these groups, or sizes or rates make no sense.

    Example:
        >>> from nnx_colossalai.plan.spec import Group
        >>> groups = tuple(Group(name=f"layer.{at}", numel=1000, trainable=1000) for at in range(4))
        >>> planned = plan(ModelSpec(groups=groups), RankResources(device_bytes=50_000, host_bytes=100_000))
        >>> [tier.value for tier in planned.placement.tiers.values()]
        ['gathered', 'gathered', 'offloaded', 'offloaded']
    """
    choices = _Search(spec, resources, wishes or Wishes())
    best = choices.fastest(choices.candidates, choices.fits)
    if best is None:
        raise choices.nothing_fits()
    return choices.planned(best)


def evaluate(
    spec: ModelSpec, resources: RankResources, placement: Placement, wishes: Wishes | None = None
) -> Planned:
    """What a placement costs that was made elsewhere, such as one edited by hand; it need not fit.

    Raises:
        PlanError: It does not have a tier for every group.
    """
    missing = [group.name for group in spec.groups if group.name not in placement.tiers]
    if missing:
        raise PlanError(f"the placement has no tier for {missing}.", remedy="Add one for each group.")
    choices = _Search(spec, resources, wishes or Wishes())
    return choices.planned(tuple(placement.tiers[group.name] for group in spec.groups), otherwise="as given")


def downgrade(
    planned: Planned,
    spec: ModelSpec,
    resources: RankResources,
    wishes: Wishes | None = None,
    *,
    missing: int = 1,
) -> Planned | None:
    """The cheapest placement with less device memory, after the device ran out of it.

    Groups only move down, and the host's budget and the wishes are still kept.

    Args:
        planned: The plan that was too large.
        spec: The model.
        resources: Budgets and rates.
        wishes: The constraints of the plan.
        missing: Bytes by which the peak is to be lower, if known.

    Returns:
        The new plan, or None if there is none: `why_not_lower` says why.
    """
    choices = _Search(spec, resources, wishes or Wishes())
    most = choices.device_peak(planned) - max(1, missing)
    best = choices.fastest(
        choices.lower(planned),
        lambda one: choices.keeps(one, most) and choices.memory.host_peak(one) <= resources.host_bytes,
    )
    return None if best is None else choices.planned(best)


def why_not_lower(
    planned: Planned,
    spec: ModelSpec,
    resources: RankResources,
    wishes: Wishes | None = None,
    *,
    missing: int = 1,
) -> PlanError:
    """The error to raise where `downgrade` has found nothing, with the reason and the knob."""
    choices = _Search(spec, resources, wishes or Wishes())
    most = choices.device_peak(planned) - max(1, missing)
    lower = [one for one in choices.lower(planned) if choices.keeps(one, most)]
    if lower:
        least = format_bytes(min(map(choices.memory.host_peak, lower)))
        return not_lower(
            planned.memory,
            f"the next needs {least} of host memory, {format_bytes(resources.host_bytes)} are allowed.",
            remedy="Raise host_memory, or use more ranks.",
        )
    free = _Search(spec, resources, Wishes(overlapped=choices.wishes.overlapped))
    if choices.wishes.given and any(free.keeps(one, most) for one in free.lower(planned)):
        return not_lower(
            planned.memory,
            f"none keeps to {choices.wishes.given}.",
            remedy="Leave that out, or use activation checkpointing or a smaller batch.",
        )
    return no_room_on_device(spec, planned.memory, resources, after=True)


class _Search:
    """One model, its budgets and wishes, and what placements of it cost."""

    def __init__(self, spec: ModelSpec, resources: RankResources, wishes: Wishes) -> None:
        _check(spec, resources)
        self.spec, self.resources, self.wishes = spec, resources, wishes
        self.memory = MemoryModel(spec)
        self.time = TimeModel(spec, resources, overlapped=wishes.overlapped, uses=self.memory.uses)
        self._names = [group.name for group in spec.groups]
        self._allowed = allowed_tiers(wishes, self._names, spec.world_size)
        self._candidates: list[Choice] | None = None
        self._allowance = self._margin()

    @property
    def candidates(self) -> list[Choice]:
        """See `nnx_colossalai.plan.planner.candidates`."""
        if self._candidates is None:
            self._candidates = candidates(self.spec, self.memory, self.time, self.wishes)
        return self._candidates

    def fits(self, choice: Choice) -> bool:
        """Return True if a placement is within the budgets and the margin."""
        if self._allowance is not None and self._trained_on_device(choice) > self._allowance:
            return False
        return self.memory.fits(choice, self.resources)

    def fastest(self, placements: Iterable[Choice], fits: Callable[[Choice], bool]) -> Choice | None:
        """The best of those that fit; what costs much is not counted of those that cannot be it."""
        best: tuple[tuple[float, int, tuple[int, ...]], Choice] | None = None
        for bound, choice in sorted(
            ((self.time.bound(one), one) for one in placements), key=lambda one: one[0]
        ):
            if best is not None and bound > best[0][0] * (1 + 1e-6):
                break
            if best is not None and self.time.seconds(choice) > best[0][0] * (1 + 1e-6):
                continue
            if fits(choice) and (best is None or self.rank(choice) < best[0]):
                best = self.rank(choice), choice
        return None if best is None else best[1]

    def rank(self, choice: Choice) -> tuple[float, int, tuple[int, ...]]:
        """Smaller is better: faster, then fewer bytes moved, then higher tiers for the first groups."""
        works = [by_tier[tier] for by_tier, tier in zip(self.time.works, choice, strict=True)]
        moved = sum(one.to_device + one.to_host + one.gathered + one.gathered_again for one in works)
        seconds = float(f"{self.time.seconds(choice):.9g}")  # not the last bits of equal sums
        return seconds, moved, tuple(map(_TIERS.index, choice))

    def planned(self, choice: Choice, *, otherwise: str = "fastest of what was compared") -> Planned:
        """The plan with its cost and reasons.

        Args:
            choice: The placement.
            otherwise: The reason for a group that could be a tier higher by itself, and faster.
        """
        step = self.time.step_time(choice)
        return Planned(
            placement=Placement(dict(zip(self._names, choice, strict=True))),
            memory=self.memory.memory(choice),
            seconds=step.seconds,
            reasons={name: self._reason(choice, at) or otherwise for at, name in enumerate(self._names)},
            busy=step.busy,
        )

    def _margin(self) -> int | None:
        """Bytes that masters, gradients and state may take on the device by ``gpu_margin_ratio``."""
        if self.wishes.gpu_margin_ratio is None:
            return None
        weights = tuple(self.wishes.tiers.get(group.name, Tier.OFFLOADED) for group in self.spec.groups)
        left = self.resources.device_bytes - self.memory.device_peak(weights)
        return int(self.wishes.gpu_margin_ratio * max(0, left))

    def _trained_on_device(self, choice: Choice) -> int:
        prints = (
            by_tier[tier]
            for group, by_tier, tier in zip(self.spec.groups, self.memory.footprints, choice, strict=True)
            if group.name not in self.wishes.tiers
        )
        return sum(one.masters + one.gradients + one.optimizer for one in prints)

    def _reason(self, choice: Choice, at: int) -> str:
        """Why a group is not one tier higher; empty where only the choice as a whole says it."""
        name, tier = self.spec.groups[at].name, choice[at]
        if name in self.wishes.tiers:
            return "asked for"
        higher = [one for one in self._allowed[name] if _TIERS.index(one) < _TIERS.index(tier)]
        if not higher:
            return "fits" if self.wishes.policy == "auto" else f"policy {self.wishes.policy!r}"
        other = (*choice[:at], higher[-1], *choice[at + 1 :])
        needed = self.memory.device_peak(other)
        if needed > self.resources.device_bytes:
            allowed = format_bytes(self.resources.device_bytes)
            more = f"{higher[-1].value} would need {format_bytes(needed)} of device memory"
            return f"{more}, {allowed} are allowed"
        if self._allowance is not None and self._trained_on_device(other) > self._allowance:
            return f"{higher[-1].value} would exceed gpu_margin_ratio={self.wishes.gpu_margin_ratio}"
        if self.rank(other) > self.rank(choice):
            return f"{higher[-1].value} would not be faster"
        return f"keeps to {self.wishes.given}" if self.wishes.given else ""

    def lower(self, planned: Planned) -> list[Choice]:
        """Placements worth comparing in which groups have only moved down, to tiers that they may have."""
        below = [
            (tier, *(one for one in self._allowed[name] if _TIERS.index(one) > _TIERS.index(tier)))
            for name, tier in zip(self._names, self._tiers_of(planned), strict=True)
        ]
        return search(self.spec, self.memory, self.time, below)

    def keeps(self, choice: Choice, most: int) -> bool:
        """Return True if a placement needs at most so much of the device, and has the fractions."""
        return meets_fractions(self.spec, self.wishes, choice) and self.memory.device_peak(choice) <= most

    def device_peak(self, planned: Planned) -> int:
        """Of a plan, by the sizes that are known now."""
        return self.memory.device_peak(self._tiers_of(planned))

    def _tiers_of(self, planned: Planned) -> Choice:
        return tuple(planned.placement.tiers[name] for name in self._names)

    def nothing_fits(self) -> PlanError:
        """Why no candidate fits."""
        device = self.resources.device_bytes
        fitting = [one for one in self.candidates if self.memory.device_peak(one) <= device]
        least = (
            min(fitting, key=self.memory.host_peak)
            if fitting
            else min(self.candidates, key=self.memory.device_peak)
        )
        costs = self.memory.memory(least)
        if self.wishes.given:
            free = _Search(self.spec, self.resources, Wishes(overlapped=self.wishes.overlapped))
            if any(free.fits(choice) for choice in free.candidates):
                return not_these_wishes(costs, self.resources, self.wishes)
        return (no_room_on_host if fitting else no_room_on_device)(self.spec, costs, self.resources)


def _check(spec: ModelSpec, resources: RankResources) -> None:
    names = [group.name for group in spec.groups]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"several groups are named {twice}.", remedy="Give each group a name of its own.")
    for group in spec.groups:
        if not 0 <= group.trainable <= group.numel:
            raise OptionError(
                f"group {group.name!r} has {group.numel} elements of which {group.trainable} are trained.",
                remedy="Count only elements of the group itself.",
            )
    for name in ("to_device", "to_host", "host_step", "device_step", "collective"):
        if not getattr(resources, name) > 0:
            raise OptionError(
                f"the rate {name} is {getattr(resources, name)!r}.",
                remedy="Give a number above 0, or measure it.",
            )


# What is said when no placement fits: the bytes needed, what most of them are, and the knob.


_KNOBS = {
    "activations": "use activation checkpointing or a smaller batch",
    "gathered": "lower chunk_size, so that the largest group is divided",
    "staging": "lower chunk_size, so that the largest group is divided",
    "gradients": "lower chunk_size, so that the largest group is divided",
    "weights": "let more of it lie in host memory",
    "masters": "let more of it lie in host memory",
    "optimizer": "let more of it lie in host memory",
    "other": "use a smaller batch",
}


def no_room_on_device(
    spec: ModelSpec, least: Memory, resources: RankResources, *, after: bool = False
) -> PlanError:
    """The device cannot hold even the placement that needs least of it.

    Args:
        spec: The model.
        least: The least memory of that placement.
        resources: The budgets.
        after: True if the device has run out of memory although the plan fitted.
    """
    peak = least.peak
    kind = max(peak.by_kind, key=lambda one: peak.by_kind[one])
    knob = _KNOBS[kind]
    if after:
        return not_lower(
            least,
            f"no group has a lower tier that needs less. {_dominating(spec, peak)}",
            remedy=f"{knob[0].upper()}{knob[1:]}.",
        )
    return PlanError(
        f"the model does not fit: the least device memory that a step needs is {format_bytes(peak.device)}, "
        f"{format_bytes(resources.device_bytes)} are allowed. {_dominating(spec, peak)}",
        remedy=f"Raise device_memory, or {knob}.",
    )


def no_room_on_host(spec: ModelSpec, least: Memory, resources: RankResources) -> PlanError:
    """The host cannot hold what the device has no room for."""
    device, host = format_bytes(resources.device_bytes), format_bytes(resources.host_bytes)
    return PlanError(
        f"the model does not fit: with {device} of device memory a step needs at least "
        f"{format_bytes(least.host)} of host memory on each rank, {host} are allowed. {_largest(spec)}",
        remedy="Raise host_memory or device_memory, or use more ranks.",
    )


def not_these_wishes(least: Memory, resources: RankResources, wishes: Wishes) -> PlanError:
    """A placement would fit, but none that keeps to what is asked for."""
    device, host = format_bytes(resources.device_bytes), format_bytes(resources.host_bytes)
    return PlanError(
        f"no placement with {wishes.given} fits: the least that it needs is {format_bytes(least.device)} of "
        f"device memory ({device} are allowed) and {format_bytes(least.host)} of host memory ({host} are "
        "allowed). Without it there is one that fits.",
        remedy="Leave it out or relax it, or raise device_memory or host_memory.",
    )


def not_lower(now: Memory, why: str, *, remedy: str) -> PlanError:
    """The device ran out of memory, and no lower plan can be taken."""
    return PlanError(
        f"the device ran out of memory under a plan with a peak of {format_bytes(now.device)}, and there "
        f"is no lower plan to go on with: {why}",
        remedy=remedy,
    )


def _dominating(spec: ModelSpec, peak: Moment) -> str:
    where = f"the {peak.phase}" + (f" of group {peak.group!r}" if peak.phase != "step" else "")
    parts = sorted(peak.by_kind.items(), key=lambda item: -item[1])
    most = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts[:3] if size)
    return f"Its peak is in {where}: {most}. {_largest(spec)}"


def _largest(spec: ModelSpec) -> str:
    largest = max(spec.groups, key=lambda group: group.numel, default=None)
    if largest is None:
        return "The model has no groups."
    size = format_bytes(largest.numel * spec.working_bytes)
    return f"The largest group is {largest.name!r} with {largest.numel} elements, {size} of complete weights."

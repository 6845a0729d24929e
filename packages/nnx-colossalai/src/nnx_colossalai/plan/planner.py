"""Choose the fastest placement within the budgets and constraints, and explain the choice.

`cost` and `schedule` have the formulas. Planning is deterministic: equal inputs give all ranks equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from nnx_colossalai.plan.cost import Memory, MemoryModel, Moment
from nnx_colossalai.plan.policies import Choice, candidates, meets_fractions, search
from nnx_colossalai.plan.schedule import TimeModel
from nnx_colossalai.plan.spec import (
    Constraints,
    ModelSpec,
    Placement,
    RankResources,
    Tier,
    allowed_tiers,
    format_bytes,
)
from nnx_core.errors import OptionError, PlanError

_TIERS = tuple(Tier)


@dataclass(frozen=True, slots=True)
class Planned:
    """A placement and its cost on one rank.

    Attributes:
        placement: A tier for every group.
        memory: The memory over one step.
        seconds: The predicted time of a step.
        reasons: The reason for each group's tier, by name.
        busy: The seconds of work of each lane in a step.
    """

    placement: Placement
    memory: Memory
    seconds: float
    reasons: Mapping[str, str] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)


def plan(spec: ModelSpec, resources: RankResources, constraints: Constraints | None = None) -> Planned:
    """Return the fastest placement that fits.

    Args:
        spec: The model.
        resources: The budgets and rates.
        constraints: The constraints; by default none.

    Raises:
        PlanError: No placement fits; the message names the bytes needed, their largest kind, and the option
            to change.
        OptionError: These groups cannot meet the constraints, or sizes or rates are invalid.

    Example:
        >>> from nnx_colossalai.plan.spec import Group
        >>> groups = tuple(Group(name=f"layer.{at}", numel=1000, trainable=1000) for at in range(4))
        >>> planned = plan(ModelSpec(groups=groups), RankResources(device_bytes=50_000, host_bytes=100_000))
        >>> [tier.value for tier in planned.placement.tiers.values()]
        ['gathered', 'gathered', 'offloaded', 'offloaded']
    """
    choices = _Search(spec, resources, constraints or Constraints())
    best = choices.fastest(choices.candidates, choices.fits)
    if best is None:
        raise choices.nothing_fits()
    return choices.planned(best)


def evaluate(
    spec: ModelSpec, resources: RankResources, placement: Placement, constraints: Constraints | None = None
) -> Planned:
    """Return the cost of a given placement, such as one edited by hand; it need not fit.

    Raises:
        PlanError: A group has no tier.
    """
    missing = [group.name for group in spec.groups if group.name not in placement.tiers]
    if missing:
        raise PlanError(f"the placement has no tier for {missing}.", remedy="Add one for each group.")
    choices = _Search(spec, resources, constraints or Constraints())
    return choices.planned(tuple(placement.tiers[group.name] for group in spec.groups), otherwise="as given")


def downgrade(
    planned: Planned,
    spec: ModelSpec,
    resources: RankResources,
    constraints: Constraints | None = None,
    *,
    missing: int = 1,
) -> Planned | None:
    """Return the fastest placement with less device memory, after the device ran out of it.

    Groups only move to lower tiers, and the host budget and the constraints still hold.

    Args:
        planned: The plan that was too large.
        spec: The model.
        resources: The budgets and rates.
        constraints: The constraints of the plan.
        missing: The bytes by which the peak must fall, if known.

    Returns:
        The new plan; None if there is none, for the reason of `why_not_lower`.
    """
    choices = _Search(spec, resources, constraints or Constraints())
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
    constraints: Constraints | None = None,
    *,
    missing: int = 1,
) -> PlanError:
    """Return the error to raise if `downgrade` returns None, with the reason and the option to change."""
    choices = _Search(spec, resources, constraints or Constraints())
    most = choices.device_peak(planned) - max(1, missing)
    lower = [one for one in choices.lower(planned) if choices.keeps(one, most)]
    if lower:
        least = format_bytes(min(map(choices.memory.host_peak, lower)))
        return not_lower(
            planned.memory,
            f"the next needs {least} of host memory, {format_bytes(resources.host_bytes)} are allowed.",
            remedy="Raise host_memory, or use more ranks.",
        )
    free = _Search(spec, resources, Constraints(overlapped=choices.constraints.overlapped))
    if choices.constraints.given and any(free.keeps(one, most) for one in free.lower(planned)):
        return not_lower(
            planned.memory,
            f"none keeps to {choices.constraints.given}.",
            remedy="Leave that out, or use activation checkpointing or a smaller batch.",
        )
    return no_room_on_device(spec, planned.memory, resources, after=True)


class _Search:
    """Compares the costs of placements of one model under its budgets and constraints."""

    def __init__(self, spec: ModelSpec, resources: RankResources, constraints: Constraints) -> None:
        _check(spec, resources)
        self.spec, self.resources, self.constraints = spec, resources, constraints
        self.memory = MemoryModel(spec)
        self.time = TimeModel(spec, resources, overlapped=constraints.overlapped, uses=self.memory.uses)
        self._names = [group.name for group in spec.groups]
        self._allowed = allowed_tiers(constraints, self._names, spec.world_size)
        self._candidates: list[Choice] | None = None
        self._allowance = self._margin()

    @property
    def candidates(self) -> list[Choice]:
        """The result of `nnx_colossalai.plan.policies.candidates`."""
        if self._candidates is None:
            self._candidates = candidates(self.spec, self.memory, self.time, self.constraints)
        return self._candidates

    def fits(self, choice: Choice) -> bool:
        """Return True if a placement is within the budgets and the margin."""
        if self._allowance is not None and self._trained_on_device(choice) > self._allowance:
            return False
        return self.memory.fits(choice, self.resources)

    def fastest(self, placements: Iterable[Choice], fits: Callable[[Choice], bool]) -> Choice | None:
        """Return the best placement that fits."""
        # Sorted by lower bounds of the time, so that exact times and memory are computed for few placements.
        best: tuple[tuple[float, int, tuple[int, ...]], Choice] | None = None
        for bound, choice in sorted(
            ((self.time.bound(one), one) for one in placements), key=lambda one: one[0]
        ):
            # Within the tolerance a placement may still win by fewer bytes moved or by higher tiers.
            if best is not None and bound > best[0][0] * (1 + 1e-6):
                break
            if best is not None and self.time.seconds(choice) > best[0][0] * (1 + 1e-6):
                continue
            if fits(choice) and (best is None or self.rank(choice) < best[0]):
                best = self.rank(choice), choice
        return None if best is None else best[1]

    def rank(self, choice: Choice) -> tuple[float, int, tuple[int, ...]]:
        """Return a sort key: less time, then fewer bytes moved, then higher tiers of the first groups."""
        works = [by_tier[tier] for by_tier, tier in zip(self.time.works, choice, strict=True)]
        moved = sum(one.to_device + one.to_host + one.gathered + one.gathered_again for one in works)
        # Rounded, because equal sums may differ in their last bits.
        seconds = float(f"{self.time.seconds(choice):.9g}")
        return seconds, moved, tuple(map(_TIERS.index, choice))

    def planned(self, choice: Choice, *, otherwise: str = "fastest of those compared") -> Planned:
        """Return a placement with its cost and reasons.

        Args:
            choice: The placement.
            otherwise: The reason for a group that alone would be faster in a higher tier.
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
        """Return the bytes of masters, gradients and state on the device that ``gpu_margin_ratio`` allows."""
        if self.constraints.gpu_margin_ratio is None:
            return None
        weights = tuple(self.constraints.tiers.get(group.name, Tier.OFFLOADED) for group in self.spec.groups)
        # Offloaded groups keep only working weights on the device: the rest of the budget is the margin.
        left = self.resources.device_bytes - self.memory.device_peak(weights)
        return int(self.constraints.gpu_margin_ratio * max(0, left))

    def _trained_on_device(self, choice: Choice) -> int:
        prints = (
            by_tier[tier]
            for group, by_tier, tier in zip(self.spec.groups, self.memory.footprints, choice, strict=True)
            if group.name not in self.constraints.tiers
        )
        return sum(one.masters + one.gradients + one.optimizer for one in prints)

    def _reason(self, choice: Choice, at: int) -> str:
        """Return the reason why a group is not one tier higher; empty if no reason is the group's alone."""
        name, tier = self.spec.groups[at].name, choice[at]
        if name in self.constraints.tiers:
            return "asked for"
        higher = [one for one in self._allowed[name] if _TIERS.index(one) < _TIERS.index(tier)]
        if not higher:
            return "fits" if self.constraints.policy == "auto" else f"policy {self.constraints.policy!r}"
        other = (*choice[:at], higher[-1], *choice[at + 1 :])
        needed = self.memory.device_peak(other)
        if needed > self.resources.device_bytes:
            allowed = format_bytes(self.resources.device_bytes)
            more = f"{higher[-1].value} would need {format_bytes(needed)} of device memory"
            return f"{more}, {allowed} are allowed"
        if self._allowance is not None and self._trained_on_device(other) > self._allowance:
            return f"{higher[-1].value} would exceed gpu_margin_ratio={self.constraints.gpu_margin_ratio}"
        if self.rank(other) > self.rank(choice):
            return f"{higher[-1].value} would not be faster"
        return f"keeps to {self.constraints.given}" if self.constraints.given else ""

    def lower(self, planned: Planned) -> list[Choice]:
        """Return placements to compare in which groups only move to lower allowed tiers."""
        below = [
            (tier, *(one for one in self._allowed[name] if _TIERS.index(one) > _TIERS.index(tier)))
            for name, tier in zip(self._names, self._tiers_of(planned), strict=True)
        ]
        return search(self.spec, self.memory, self.time, below)

    def keeps(self, choice: Choice, most: int) -> bool:
        """Return True if a placement's device peak is at most `most`, and it has the wanted fractions."""
        return (
            meets_fractions(self.spec, self.constraints, choice) and self.memory.device_peak(choice) <= most
        )

    def device_peak(self, planned: Planned) -> int:
        """Return the device peak of a plan, with the present sizes."""
        return self.memory.device_peak(self._tiers_of(planned))

    def _tiers_of(self, planned: Planned) -> Choice:
        return tuple(planned.placement.tiers[name] for name in self._names)

    def nothing_fits(self) -> PlanError:
        """Return the error that no candidate fits."""
        device = self.resources.device_bytes
        peaks = [self.memory.device_peak(one) for one in self.candidates]
        fitting = [one for one, peak in zip(self.candidates, peaks, strict=True) if peak <= device]
        least = (
            min(fitting, key=self.memory.host_peak) if fitting else self.candidates[peaks.index(min(peaks))]
        )
        costs = self.memory.memory(least)
        if self.constraints.given:
            free = _Search(self.spec, self.resources, Constraints(overlapped=self.constraints.overlapped))
            if any(free.fits(choice) for choice in free.candidates):
                return only_without_constraints(costs, self.resources, self.constraints)
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


_REMEDIES = {
    "activations": "use activation checkpointing or a smaller batch",
    "gathered": "lower chunk_size, so that the largest group is divided",
    "staging": "lower chunk_size, so that the largest group is divided",
    "gradients": "lower chunk_size, so that the largest group is divided",
    "weights": "offload more of the model to host memory",
    "masters": "offload more of the model to host memory",
    "optimizer": "offload more of the model to host memory",
    "other": "use a smaller batch",
}
"""The remedy if no placement fits, by the largest kind of memory at the peak."""


def no_room_on_device(
    spec: ModelSpec, least: Memory, resources: RankResources, *, after: bool = False
) -> PlanError:
    """Return the error that the device cannot hold even the smallest placement.

    Args:
        spec: The model.
        least: The memory of that placement.
        resources: The budgets.
        after: True if the device ran out of memory although the plan fitted.
    """
    peak = least.peak
    kind = max(peak.by_kind, key=lambda one: peak.by_kind[one])
    remedy = _REMEDIES[kind]
    if after:
        return not_lower(
            least,
            f"no group has a lower tier that needs less. {_dominating(spec, peak)}",
            remedy=f"{remedy[0].upper()}{remedy[1:]}.",
        )
    return PlanError(
        f"the model does not fit: the least device memory that a step needs is {format_bytes(peak.device)}, "
        f"{format_bytes(resources.device_bytes)} are allowed. {_dominating(spec, peak)}",
        remedy=f"Raise device_memory, or {remedy}.",
    )


def no_room_on_host(spec: ModelSpec, least: Memory, resources: RankResources) -> PlanError:
    """Return the error that the host cannot hold the rest of the model."""
    device, host = format_bytes(resources.device_bytes), format_bytes(resources.host_bytes)
    return PlanError(
        f"the model does not fit: with {device} of device memory a step needs at least "
        f"{format_bytes(least.host)} of host memory on each rank, {host} are allowed. {_largest(spec)}",
        remedy="Raise host_memory or device_memory, or use more ranks.",
    )


def only_without_constraints(least: Memory, resources: RankResources, constraints: Constraints) -> PlanError:
    """Return the error that a placement fits, but none that meets the constraints."""
    device, host = format_bytes(resources.device_bytes), format_bytes(resources.host_bytes)
    return PlanError(
        f"no placement with {constraints.given} fits: the least that it needs is "
        f"{format_bytes(least.device)} of device memory ({device} are allowed) and "
        f"{format_bytes(least.host)} of host memory ({host} are allowed). Without it a placement fits.",
        remedy="Leave it out or relax it, or raise device_memory or host_memory.",
    )


def not_lower(now: Memory, why: str, *, remedy: str) -> PlanError:
    """Return the error that no lower plan is left after the device ran out of memory."""
    return PlanError(
        f"the device ran out of memory under a plan with a peak of {format_bytes(now.device)}, and there "
        f"is no lower plan: {why}",
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

"""What the user asks of a plan, checked for contradictions before anything is computed.

Owns the meaning of the wishes; never looks at a model's sizes (`nnx_colossalai.plan.planner` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from nnx_colossalai.plan.cost import Memory, Moment
from nnx_colossalai.plan.spec import ModelSpec, RankResources, Tier
from nnx_core.errors import OptionError, PlanError

POLICIES: Mapping[str, tuple[Tier, ...]] = {
    "auto": tuple(Tier),
    "cuda": (Tier.GATHERED, Tier.SHARDED),
    "cpu": (Tier.STREAMED,),
    **{tier.value: (tier,) for tier in Tier},
}
"""The tiers that each policy allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a plan is to keep to, beside the budgets.

    Attributes:
        policy: ``"auto"`` lets the planner choose; ``"cuda"`` keeps everything on the device, ``"cpu"``
            everything in host memory; the name of a tier puts every group there.
        offload_fraction: Share of the trained elements whose masters and optimizer state are in host memory,
            met to within one group; None leaves it to the planner.
        stream_fraction: Share of the trained elements whose working weights are in host memory too.
        gpu_margin_ratio: Share of the device memory left beside all working weights and activations that
            masters, gradients and optimizer state may take; None: as much as fits.
        gathered_allowed: True if complete weights may stay on every rank.
        tiers: The tiers of single groups, by name; these are not chosen.
        overlapped: True if the step in host memory overlaps with the next forward, which decides what is
            fast.

    Raises:
        OptionError: A value is out of range, a name is unknown, or two wishes contradict each other.

    Example:
        >>> Wishes(offload_fraction=0.25).policy
        'auto'
        >>> Wishes(policy="cuda", offload_fraction=0.25)
        Traceback (most recent call last):
        ...
        nnx_core.errors.OptionError: policy='cuda' contradicts offload_fraction=0.25. Leave one of them out.
    """

    policy: str = "auto"
    offload_fraction: float | None = None
    stream_fraction: float | None = None
    gpu_margin_ratio: float | None = None
    gathered_allowed: bool = True
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    overlapped: bool = True

    def __post_init__(self) -> None:
        _check_policy(self.policy)
        for name in ("offload_fraction", "stream_fraction", "gpu_margin_ratio"):
            _check_share(name, getattr(self, name))
        object.__setattr__(self, "tiers", {name: _tier(name, tier) for name, tier in self.tiers.items()})
        for one, other in self._contradictions():
            raise OptionError(f"{one} contradicts {other}.", remedy="Leave one of them out.")

    @property
    def given(self) -> str:
        """What is asked for that narrows the choice, as the user wrote it; empty if nothing."""
        parts = [f"policy={self.policy!r}"] if self.policy != "auto" else []
        parts += [
            f"{name}={value}"
            for name in ("offload_fraction", "stream_fraction", "gpu_margin_ratio")
            if (value := getattr(self, name)) is not None
        ]
        parts += [f"tier {tier.value!r} of {name!r}" for name, tier in self.tiers.items()][:3]
        return ", ".join(parts)

    def _contradictions(self) -> Iterable[tuple[str, str]]:
        """Pairs of wishes that cannot both be kept, as the user wrote them."""
        policy, allowed = f"policy={self.policy!r}", POLICIES[self.policy]
        host = any(tier.steps_on_host for tier in allowed)
        device = any(not tier.steps_on_host for tier in allowed)
        if self.offload_fraction is not None:
            written = f"offload_fraction={self.offload_fraction}"
            if (self.offload_fraction > 0 and not host) or (self.offload_fraction < 1 and not device):
                yield policy, written
            if self.gpu_margin_ratio is not None:
                yield written, f"gpu_margin_ratio={self.gpu_margin_ratio}"
        if self.stream_fraction is not None:
            written = f"stream_fraction={self.stream_fraction}"
            if (self.stream_fraction > 0 and Tier.STREAMED not in allowed) or (
                self.stream_fraction < 1 and allowed == (Tier.STREAMED,)
            ):
                yield policy, written
            if self.offload_fraction is not None and self.stream_fraction > self.offload_fraction:
                yield (
                    written + ", which is part of what is offloaded,",
                    f"offload_fraction={self.offload_fraction}",
                )
        if self.gpu_margin_ratio is not None and self.policy != "auto":
            yield policy, f"gpu_margin_ratio={self.gpu_margin_ratio}"
        if not self.gathered_allowed and allowed == (Tier.GATHERED,):
            yield policy, "gathered_allowed=False"
        for name, tier in self.tiers.items():
            if tier not in allowed:
                yield policy, f"tier {tier.value!r} of {name!r}"
            if tier is Tier.GATHERED and not self.gathered_allowed:
                yield f"tier 'gathered' of {name!r}", "gathered_allowed=False"


def allowed_tiers(wishes: Wishes, names: Iterable[str], world_size: int) -> dict[str, tuple[Tier, ...]]:
    """The tiers that each group may have, from most device memory to least.

    At one rank gathered and sharded are the same: only one of them is left to choose.

    Raises:
        OptionError: A wish is about a group that there is not.
    """
    names = tuple(names)
    for name in wishes.tiers:
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.0)
            raise OptionError(
                f"a tier is asked for {name!r}, but there is no group of that name.",
                remedy=f"Nearest names: {', '.join(map(repr, near))}."
                if near
                else "The model has no groups.",
            )
    tiers = tuple(
        tier for tier in POLICIES[wishes.policy] if wishes.gathered_allowed or tier is not Tier.GATHERED
    )
    if world_size == 1 and Tier.GATHERED in tiers:
        tiers = tuple(tier for tier in tiers if tier is not Tier.SHARDED)
    return {name: (wishes.tiers[name],) if name in wishes.tiers else tiers for name in names}


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        near = get_close_matches(str(policy), POLICIES, n=1)
        raise OptionError(
            f"policy {policy!r} is unknown.",
            remedy=(f"Did you mean {near[0]!r}? " if near else "") + f"Choose one of {', '.join(POLICIES)}.",
        )


def _check_share(name: str, value: float | None) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or math.isnan(value) or not 0 <= value <= 1:
        raise OptionError(f"{name} is {value!r}.", remedy="Give a number from 0 to 1, or None.")


def _tier(name: str, tier: Tier | str) -> Tier:
    try:
        return Tier(tier)
    except ValueError:
        raise OptionError(
            f"tier {tier!r} of {name!r} is unknown.",
            remedy=f"Choose one of {', '.join(one.value for one in Tier)}.",
        ) from None


# --- refusals --------------------------------------------------------------------------------------------
#
# What is said when no placement fits: the bytes needed, what most of them are, and the knob.
#
# Owns these messages; never decides that nothing fits (`planner` does).


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


def in_words(count: int) -> str:
    """Bytes as a person reads them, and exactly.

    Example:
        >>> in_words(3 * 2**30)
        '3.00 GiB (3221225472 bytes)'
        >>> in_words(100)
        '100 bytes'
    """
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit} ({count} bytes)"
    return f"{count} bytes"


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
        f"the model does not fit: the least device memory that a step needs is {in_words(peak.device)}, "
        f"{in_words(resources.device_bytes)} are allowed. {_dominating(spec, peak)}",
        remedy=f"Raise device_memory, or {knob}.",
    )


def no_room_on_host(spec: ModelSpec, least: Memory, resources: RankResources) -> PlanError:
    """The host cannot hold what the device has no room for."""
    device, host = in_words(resources.device_bytes), in_words(resources.host_bytes)
    return PlanError(
        f"the model does not fit: with {device} of device memory a step needs at least "
        f"{in_words(least.host)} of host memory on each rank, {host} are allowed. {_largest(spec)}",
        remedy="Raise host_memory or device_memory, or use more ranks.",
    )


def not_these_wishes(least: Memory, resources: RankResources, wishes: Wishes) -> PlanError:
    """A placement would fit, but none that keeps to what is asked for."""
    device, host = in_words(resources.device_bytes), in_words(resources.host_bytes)
    return PlanError(
        f"no placement with {wishes.given} fits: the least that it needs is {in_words(least.device)} of "
        f"device memory ({device} are allowed) and {in_words(least.host)} of host memory ({host} are "
        "allowed). Without it there is one that fits.",
        remedy="Leave it out or relax it, or raise device_memory or host_memory.",
    )


def not_lower(now: Memory, why: str, *, remedy: str) -> PlanError:
    """The device ran out of memory, and no lower plan can be taken."""
    return PlanError(
        f"the device ran out of memory under a plan with a peak of {in_words(now.device)}, and there "
        f"is no lower plan to go on with: {why}",
        remedy=remedy,
    )


def _dominating(spec: ModelSpec, peak: Moment) -> str:
    where = f"the {peak.phase}" + (f" of group {peak.group!r}" if peak.phase != "step" else "")
    parts = sorted(peak.by_kind.items(), key=lambda item: -item[1])
    most = ", ".join(f"{kind} {in_words(size)}" for kind, size in parts[:3] if size)
    return f"Its peak is in {where}: {most}. {_largest(spec)}"


def _largest(spec: ModelSpec) -> str:
    largest = max(spec.groups, key=lambda group: group.numel, default=None)
    if largest is None:
        return "The model has no groups."
    size = in_words(largest.numel * spec.working_bytes)
    return f"The largest group is {largest.name!r} with {largest.numel} elements, {size} of complete weights."

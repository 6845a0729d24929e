"""What the planner is given: groups of parameters, what the hardware has, and what the user wishes.

Plain data without torch, so that plans are made, saved, edited and compared anywhere. All sizes are bytes,
times are seconds, rates are per second; sizes are those of one rank unless their name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum

from nnx_core.errors import OptionError

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(number: int) -> str:
    """A number of bytes as people read it, exact as well where it is rounded.

    Example:
        >>> format_bytes(512)
        '512 bytes'
        >>> format_bytes(3 * 2**29)
        '1.50 GiB (1610612736 bytes)'
    """
    if abs(number) < 1024:
        return f"{number} bytes"
    value, unit = number / 1024, 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]} ({number} bytes)"


class Tier(str, Enum):
    """Where the weights of a chunk and what trains them lie, from most device memory to least.

    Each rank holds its part of masters, gradients and optimizer state in every tier.
    """

    GATHERED = "gathered"
    """All on the device; the complete working weights stay from a forward to its backward."""
    SHARDED = "sharded"
    """All on the device; each rank keeps its part of the weights, complete only while they are used."""
    OFFLOADED = "offloaded"
    """Working weights on the device; masters, gradients and optimizer state in host memory."""
    STREAMED = "streamed"
    """Working weights in host memory too, on the device only while they are used."""

    @property
    def steps_on_host(self) -> bool:
        """True if the optimizer updates the masters in host memory."""
        return self in (Tier.OFFLOADED, Tier.STREAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The parameters of one chunk, in the order in which a forward uses the chunks.

    Attributes:
        name: The name of the module (``""`` for the root), or of the first of several small ones merged into
            one chunk.
        numel: Elements of all ranks together.
        trainable: The number of them that are trained.
        activation_bytes: The bytes that its forward keeps for its backward.
        compute_seconds: Forward and backward on the device.
    """

    name: str
    numel: int
    trainable: int
    activation_bytes: int = 0
    compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        groups: The groups in the order of the forward.
        world_size: Ranks over which masters, gradients and optimizer state are divided.
        working_bytes: Per element of the weights that forward and backward compute with: 2 or 4.
        master_bytes: Per element of the masters; 4, or `working_bytes` where the weights are their own
            masters.
        gradient_bytes: Per element of the gradients that the optimizer reads.
        optimizer_bytes: Per trained element of the optimizer's state, such as 8 for Adam.
        other_device_bytes: The bytes that the device holds besides: buffers, the largest temporary, the
            allocator's slack.
        gradients_in_forward: True if gradients of the batch before are still there in a forward: they are
            when gradients are accumulated, when a step overlaps the forward, and in Lightning's Trainer,
            which clears them after it.
    """

    groups: tuple[Group, ...]
    world_size: int = 1
    working_bytes: int = 2
    master_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    other_device_bytes: int = 0
    gradients_in_forward: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a rank is; per second. By default a common accelerator, which nobody measured.

    Attributes:
        to_device: Bytes from host to device.
        to_host: Bytes from device to host.
        host_step: Elements that the optimizer updates in host memory.
        device_step: The same on the device.
        collective: Bytes that a rank sends in an all-gather or reduce-scatter.
        flops: Floating point operations of matrix products.
    """

    to_device: float = 20e9
    to_host: float = 20e9
    host_step: float = 1e9
    device_step: float = 50e9
    collective: float = 20e9
    flops: float = 100e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources(Rates):
    """What a rank may use, and how fast it is.

    Attributes:
        device_bytes: The bytes of the device for this rank.
        host_bytes: The bytes of the host for this rank.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A tier for every group: the outcome of planning, before it is explained.

    Attributes:
        tiers: The tiers by the name of the group, in the order of the forward.
    """

    tiers: dict[str, Tier]


# What the user asks of a plan, checked for contradictions before anything is computed.
#
# Owns the meaning of the wishes; never looks at a model's sizes (`planner` does).


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

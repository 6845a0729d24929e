"""Define the inputs of the planner: parameter groups, the resources of a rank, and the user's constraints.

This is plain data without torch, so plans can be made, saved, edited and compared anywhere. All sizes are
bytes of one rank unless stated otherwise, times are seconds, and rates are per second.
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
    """Return a number of bytes as readable text, with the exact number if it is rounded.

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
    """The memory of a chunk's weights, gradients and optimizer state, from most device memory to least.

    In every tier, the ranks shard masters, gradients and optimizer state.
    """

    GATHERED = "gathered"
    """All on the device; the gathered working weights stay from a forward to its backward."""
    SHARDED = "sharded"
    """All on the device; working weights are sharded, and gathered only for their uses."""
    OFFLOADED = "offloaded"
    """Working weights on the device; masters, gradients and optimizer state in host memory."""
    STREAMED = "streamed"
    """Working weights in host memory too, and on the device only for their uses."""

    @property
    def steps_on_host(self) -> bool:
        """True if the optimizer updates the masters in host memory."""
        return self in (Tier.OFFLOADED, Tier.STREAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The parameters of one chunk.

    Attributes:
        name: The name of the module (``""`` for the root), or of the first of several small ones merged into
            one chunk.
        numel: The elements of all ranks together.
        trainable: The trained elements among them.
        activation_bytes: The bytes that its forward saves for its backward.
        compute_seconds: The seconds of its forward and backward on the device.
    """

    name: str
    numel: int
    trainable: int
    activation_bytes: int = 0
    compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The description of a model for the planner.

    Attributes:
        groups: The groups in the order of the forward.
        world_size: The number of ranks that shard masters, gradients and optimizer state.
        working_bytes: The bytes per element of the working weights: 2 or 4.
        master_bytes: The bytes per element of the masters: 4, or `working_bytes` without separate masters.
        gradient_bytes: The bytes per element of the gradients that the optimizer reads.
        optimizer_bytes: The bytes of optimizer state per trained element, such as 8 for Adam.
        other_device_bytes: The other bytes on the device: buffers, the largest temporary, the allocator's
            slack.
        gradients_in_forward: True if a forward runs while gradients of the last batch are alive. This is so
            with gradient accumulation, with a step that overlaps the forward, and in Lightning's Trainer,
            which clears them after the forward.
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
    """The rates of a rank, per second. The defaults are assumed for a common accelerator, not measured.

    Attributes:
        to_device: The bytes from host to device.
        to_host: The bytes from device to host.
        host_step: The elements that the optimizer updates in host memory.
        device_step: The elements that the optimizer updates on the device.
        collective: The bytes that a rank sends in an all-gather or reduce-scatter.
        flops: The floating point operations of matrix products.
    """

    to_device: float = 20e9
    to_host: float = 20e9
    host_step: float = 1e9
    device_step: float = 50e9
    collective: float = 20e9
    flops: float = 100e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources(Rates):
    """The budgets and rates of a rank.

    Attributes:
        device_bytes: The budget of device memory.
        host_bytes: The budget of host memory.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A tier for every group.

    Attributes:
        tiers: The tiers by the name of the group, in the order of the forward.
    """

    tiers: dict[str, Tier]


POLICIES: Mapping[str, tuple[Tier, ...]] = {
    "auto": tuple(Tier),
    "cuda": (Tier.GATHERED, Tier.SHARDED),
    "cpu": (Tier.STREAMED,),
    **{tier.value: (tier,) for tier in Tier},
}
"""The tiers that each policy allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The user's constraints of a plan, besides the budgets.

    Contradictions are found before anything is computed; `planner` applies constraints to a model's sizes.

    Attributes:
        policy: ``"auto"`` lets the planner choose, ``"cuda"`` keeps everything on the device, ``"cpu"``
            everything in host memory, and the name of a tier puts every group there.
        offload_fraction: The share of the trained elements whose masters and optimizer state are in host
            memory, exact to one group; None leaves it to the planner.
        stream_fraction: The share of the trained elements whose working weights are in host memory too.
        gpu_margin_ratio: The share of device memory for masters, gradients and optimizer state, out of the
            memory that working weights and activations leave; None for as much as fits.
        gathered_allowed: True if gathered weights may stay on every rank.
        tiers: The fixed tiers of single groups, by name.
        overlapped: True if the step in host memory overlaps with the next forward, which changes the times.

    Raises:
        OptionError: A value is out of range, a name is unknown, or two constraints contradict each other.

    Example:
        >>> Constraints(offload_fraction=0.25).policy
        'auto'
        >>> Constraints(policy="cuda", offload_fraction=0.25)
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
        """The constraints that narrow the choice, as the user wrote them; empty if there are none."""
        parts = [f"policy={self.policy!r}"] if self.policy != "auto" else []
        parts += [
            f"{name}={value}"
            for name in ("offload_fraction", "stream_fraction", "gpu_margin_ratio")
            if (value := getattr(self, name)) is not None
        ]
        parts += [f"tier {tier.value!r} of {name!r}" for name, tier in self.tiers.items()][:3]
        return ", ".join(parts)

    def _contradictions(self) -> Iterable[tuple[str, str]]:
        """Yield pairs of constraints that exclude each other, as the user wrote them."""
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
                    written + ", a share of the offloaded elements,",
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


def allowed_tiers(
    constraints: Constraints, names: Iterable[str], world_size: int
) -> dict[str, tuple[Tier, ...]]:
    """Return the allowed tiers of each group, from most device memory to least.

    Raises:
        OptionError: A constraint names an unknown group.
    """
    names = tuple(names)
    for name in constraints.tiers:
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.0)
            raise OptionError(
                f"a tier is asked for {name!r}, but there is no group of that name.",
                remedy=f"Nearest names: {', '.join(map(repr, near))}."
                if near
                else "The model has no groups.",
            )
    tiers = tuple(
        tier
        for tier in POLICIES[constraints.policy]
        if constraints.gathered_allowed or tier is not Tier.GATHERED
    )
    # At one rank gathered and sharded are the same, so only one of them is left to choose.
    if world_size == 1 and Tier.GATHERED in tiers:
        tiers = tuple(tier for tier in tiers if tier is not Tier.SHARDED)
    return {name: (constraints.tiers[name],) if name in constraints.tiers else tiers for name in names}


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

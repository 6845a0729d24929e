"""What the planner knows: groups of parameters, the memory and speed of the hardware, and where things lie.

Plain data without torch, so that plans are made, saved, edited and compared anywhere. All sizes are bytes,
times are seconds, rates are per second; sizes are those of one rank unless their name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
        """Whether the optimizer updates the masters in host memory."""
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

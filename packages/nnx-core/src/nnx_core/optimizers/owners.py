"""Choose owner ranks of parameters, and list the transfers between them and the shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.shard import Box, Shard
from nnx_core.optimizers.optimizer_probe import Trial

log = logging.getLogger("nnx.unsharded_optimizer")


class Route:
    """The boxes of a parameter on each rank, and its owner.

    Args:
        shape: The shape of the unsharded parameter.
        boxes: The boxes of each rank.
        has_state: True for each rank that has optimizer state of it. A single such rank was the owner before
            and remains the owner, so that no state moves.

    Attributes:
        owner: The rank that steps it; -1 before `choose_owners`.
    """

    def __init__(
        self, shape: tuple[int, ...], boxes: Sequence[Sequence[Box]], has_state: Sequence[bool]
    ) -> None:
        self.shape = shape
        self.boxes = boxes
        self.owner = has_state.index(True) if len(has_state) > 1 and sum(has_state) == 1 else -1

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the unsharded parameter."""
        return all(len(boxes) == 1 and boxes[0].size == self.shape for boxes in self.boxes)

    @property
    def work(self) -> int:
        """Estimate the cost of a step: for matrices, the cost of a product with a square matrix."""
        if len(self.shape) < 2:
            return math.prod(self.shape)
        rows = self.shape[0]
        columns = math.prod(self.shape[1:])
        return rows * columns * max(1, min(rows, columns))

    def senders(self) -> Iterator[tuple[int, int]]:
        """Yield the rank and the index of each box to send to the owner: each box once, its own first."""
        sent: set[Box] = set()
        order = [self.owner, *(rank for rank in range(len(self.boxes)) if rank != self.owner)]
        for rank in order:
            for number, box in enumerate(self.boxes[rank]):
                if box not in sent:
                    sent.add(box)
                    yield rank, number


def choose_owners(routes: Sequence[Route], *, to_rank_0: bool) -> None:
    """Assign parameters to the rank with the least work so far, in order of decreasing work."""
    load = [0] * dist.get_world_size()
    for route in sorted(routes, key=lambda route: (route.owner < 0, -route.work)):
        if route.owner < 0:
            route.owner = 0 if to_rank_0 else min(range(len(load)), key=lambda rank: load[rank])
        load[route.owner] += route.work


@dataclass(eq=False)
class Owned:
    """The facts about one optimizer.

    Attributes:
        trial: The result of the probe.
        membership: The parameters of its groups at the time of the probe.
        routes: The parameters that owners step.
        stand_ins: The unsharded parameters that replace those of this rank's own in a step.
        gradients: The unsharded gradients that owners received for a step, and their versions then.
        has_state: True if owners have state, from a step, a resume, or the constructor.
    """

    trial: Trial
    membership: tuple[tuple[int, ...], ...]
    routes: dict[nn.Parameter, Route] = field(default_factory=dict)
    stand_ins: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    gradients: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)
    has_state: bool = False


def log_owners(optimizer: Optimizer, owned: Owned) -> None:
    """Log the number of parameters that owners step, and the reason, on rank zero."""
    if not owned.routes or dist.get_rank() != 0:
        return
    name, count = type(optimizer).__name__, len(owned.routes)
    if owned.trial.dependence == "parameter":
        log.info(
            "%s: stepping %d parameters on owner ranks (its update reads more than one element)", name, count
        )
        return
    error = owned.trial.error
    reason = "its update reads the whole model" if error is None else f"probing it failed: {error}"
    log.info("%s: stepping all %d parameters on rank 0 (%s)", name, count, reason)


def _membership(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)


@dataclass(eq=False, slots=True)
class Transfer:
    """A slice of a tensor that one rank sends to another.

    Attributes:
        source: The rank that sends.
        target: The rank that receives.
        sent: The slice; None on other ranks than the source.
        received: The memory that it fills; None on other ranks than the target.
    """

    source: int
    target: int
    sent: Any
    received: Any


Item = tuple[Route, Sequence[Tensor], "Tensor | None"]
"""A route, this rank's shard of a tensor with that layout, and the unsharded tensor on the owner."""


def to_owner(items: Sequence[Item]) -> list[Transfer]:
    """List the transfers that gather tensors on their owners."""
    rank = dist.get_rank()
    return [
        Transfer(
            source,
            route.owner,
            own[number] if source == rank else None,
            unsharded[route.boxes[source][number].slices] if unsharded is not None else None,
        )
        for route, own, unsharded in items
        for source, number in route.senders()
    ]


def from_owner(items: Sequence[Item]) -> list[Transfer]:
    """List the transfers that scatter tensors from their owners to the shards."""
    rank = dist.get_rank()
    return [
        Transfer(
            route.owner,
            target,
            unsharded[box.slices] if unsharded is not None else None,
            own[number] if target == rank else None,
        )
        for route, own, unsharded in items
        for target, boxes in enumerate(route.boxes)
        for number, box in enumerate(boxes)
    ]


def fill_from_bytes(view: Tensor, received: Tensor) -> None:
    """Copy received bytes into a view."""
    target = torch.view_as_real(view) if view.is_complex() else view
    # Bytes of one dtype may begin at any offset behind those of another, where torch cannot view them.
    if received.storage_offset() % target.element_size():
        received = received.clone()
    target.copy_(received.view(target.dtype).view(target.shape))


def empty(shard: Shard, parameter: nn.Parameter) -> Tensor:
    """Allocate a tensor of the shape of an unsharded parameter."""
    device = shard.data[0].device if shard.data else parameter.device
    return torch.empty(shard.shape, dtype=shard.dtype, device=device)

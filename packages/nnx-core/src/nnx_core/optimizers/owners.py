"""Owner ranks of parameters, and the tensors that are sent to them."""

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
from nnx_core.optimizers.elementwise import Trial

log = logging.getLogger("nnx.whole_matrix")


class Route:
    """The ranks that hold the boxes of a parameter, and its owner.

    Args:
        shape: The shape of the whole parameter.
        boxes: The boxes that each rank holds.
        has_state: True if each rank has state for it: one alone was its owner before, and stays it.

    Attributes:
        owner: The rank that steps it; -1 until there is one.
    """

    def __init__(
        self, shape: tuple[int, ...], boxes: Sequence[Sequence[Box]], has_state: Sequence[bool]
    ) -> None:
        self.shape = shape
        self.boxes = boxes
        self.owner = has_state.index(True) if len(has_state) > 1 and sum(has_state) == 1 else -1

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds all of it."""
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
        """Which rank sends which of its boxes to the owner: each box once, the owner's own first."""
        sent: set[Box] = set()
        order = [self.owner, *(rank for rank in range(len(self.boxes)) if rank != self.owner)]
        for rank in order:
            for number, box in enumerate(self.boxes[rank]):
                if box not in sent:
                    sent.add(box)
                    yield rank, number


def choose_owners(routes: Sequence[Route], *, to_rank_0: bool) -> None:
    """The heaviest parameter first, each to the rank with the least work so far."""
    load = [0] * dist.get_world_size()
    for route in sorted(routes, key=lambda route: (route.owner < 0, -route.work)):
        if route.owner < 0:
            route.owner = 0 if to_rank_0 else min(range(len(load)), key=lambda rank: load[rank])
        load[route.owner] += route.work


@dataclass(eq=False)
class Owned:
    """The facts about one optimizer.

    Attributes:
        trial: The result of the trial of what its updates depend on.
        membership: Its groups' parameters when that was found out.
        routes: The parameters that owners step.
        places: The complete parameters that take the places of this rank's own in a step.
        gradients: The complete gradients that owners got for a step, and their versions then.
        has_state: True if owners have state, by a step, by resuming, or from before.
    """

    trial: Trial
    membership: tuple[tuple[int, ...], ...]
    routes: dict[nn.Parameter, Route] = field(default_factory=dict)
    places: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    gradients: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)
    has_state: bool = False


def tell(optimizer: Optimizer, owned: Owned) -> None:
    """Log on rank 0 what owners step, and why."""
    if not owned.routes or dist.get_rank() != 0:
        return
    name, count = type(optimizer).__name__, len(owned.routes)
    if owned.trial.dependence == "parameter":
        log.info(
            "%s: %d of its parameters are stepped whole, each on an owner rank, because its update looks at "
            "more than one element.",
            name,
            count,
        )
        return
    error = owned.trial.error
    why = "its update looks at the whole model" if error is None else f"it could not be tried ({error})"
    log.info("%s: all of its %d parameters are stepped whole on rank 0, because %s.", name, count, why)


def _membership(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)


@dataclass(eq=False, slots=True)
class Parcel:
    """A piece of a tensor on its way: `sent` is meaningful on the source, `received` on the target."""

    source: int
    target: int
    sent: Any
    received: Any


Item = tuple[Route, Sequence[Tensor], "Tensor | None"]
"""A route, this rank's part of a tensor that lies so, and the whole of it on the owner."""


def to_owner(items: Sequence[Item]) -> list[Parcel]:
    """Tensors that this rank sends to, or gets as, the owners of parameters."""
    rank = dist.get_rank()
    return [
        Parcel(
            source,
            route.owner,
            own[number] if source == rank else None,
            whole[route.boxes[source][number].slices] if whole is not None else None,
        )
        for route, own, whole in items
        for source, number in route.senders()
    ]


def from_owner(items: Sequence[Item]) -> list[Parcel]:
    """Tensors that this rank gets from the owners of parameters."""
    rank = dist.get_rank()
    return [
        Parcel(
            route.owner,
            target,
            whole[box.slices] if whole is not None else None,
            own[number] if target == rank else None,
        )
        for route, own, whole in items
        for target, boxes in enumerate(route.boxes)
        for number, box in enumerate(boxes)
    ]


def fill_from_bytes(view: Tensor, received: Tensor) -> None:
    """Copy received bytes into a view."""
    target = torch.view_as_real(view) if view.is_complex() else view
    if received.storage_offset() % target.element_size():
        received = received.clone()
    target.copy_(received.view(target.dtype).view(target.shape))


def empty(shard: Shard, parameter: nn.Parameter) -> Tensor:
    """An empty tensor of the size of a whole parameter."""
    device = shard.data[0].device if shard.data else parameter.device
    return torch.empty(shard.shape, dtype=shard.dtype, device=device)

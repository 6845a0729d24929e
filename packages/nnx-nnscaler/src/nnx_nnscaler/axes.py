"""Make the process groups along which ranks work together.

Consecutive ranks form a *plan unit* and work on one batch. Ranks with the same index in their units form a
group along the *outer* axis, over which gradients are averaged. With ZeRO, each of `zero_ngroups` groups of
units shards the parameters over its ranks, the *parts*; the *copies* hold the same shard. With a pipeline,
consecutive ranks of a unit form stages; ranks with the same index in their stages form a group along the
*pipe*. Each group is made once for a world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from nnx_base.ranks import is_distributed

__all__ = ["Axes", "make_axes", "with_pipe"]

T = TypeVar("T")

_Key = tuple[tuple[tuple[int, ...], ...], str | None]
_groups: dict[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Axes:
    """This rank's group along each axis; None if the rank would be alone in it.

    Attributes:
        unit: The ranks of its plan unit.
        outer: The ranks with its index in their units.
        parts: The ranks of `outer` that shard the same copy of the parameters; with ZeRO only.
        copies: The ranks of `outer` that store the same shard; `outer` without ZeRO.
        world: All ranks.
        unit_rank: The index of this rank in its unit.
        unit_size: The number of ranks of a unit.
        outer_rank: The index of its unit.
        outer_size: The number of units.
        part_rank: The index of the shard that it stores.
        part_size: The number of shards of a parameter; 1 without ZeRO.
        unit_control: The ranks of the unit, as a group whose collectives take CPU tensors.
        pipe: The ranks of the unit with its index in the other stages.
        pipe_rank: The index of its stage ranks along the pipe.
        pipe_size: The number of stages that work at the same time; 1 without a pipeline.
        stage: The axes within its stage. Its unit is the ranks that compute the stage together, and its world
            the ranks of the same stage in all units. None without a pipeline.
    """

    unit: dist.ProcessGroup | None
    outer: dist.ProcessGroup | None
    parts: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    world: dist.ProcessGroup | None
    unit_rank: int
    unit_size: int
    outer_rank: int
    outer_size: int
    part_rank: int
    part_size: int
    unit_control: dist.ProcessGroup | None = None
    pipe: dist.ProcessGroup | None = None
    pipe_rank: int = 0
    pipe_size: int = 1
    stage: Axes | None = None

    @property
    def within_stage(self) -> Axes:
        """Return the axes of the ranks that compute the same operators: of the stage, or of the unit."""
        return self.stage or self

    @property
    def reading(self) -> range:
        """The ranks that read parameters together: the unit, or without one the ranks with other rows.

        Units do not compare reads with each other, because one may compile for long while another trains.
        """
        size = self.unit_size if self.unit_size > 1 else self.part_size
        first = (self.outer_rank * self.unit_size + self.unit_rank) // size * size
        return range(first, first + size)

    def from_first(self, value: T) -> T:
        """Return the value of this unit's first rank. Collective over the unit."""
        if self.unit_control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.unit_control, group_src=0)
        return box[0]


def make_axes(*, rank: int, world_size: int, unit_size: int, part_size: int) -> Axes:
    """Return the axes of a world. Collective the first time.

    Args:
        rank: This rank.
        world_size: The number of ranks, a multiple of the next two's product.
        unit_size: The number of ranks of a plan unit.
        part_size: The number of units that shard parameters; 1 without ZeRO.
    """
    units = [range(start, start + unit_size) for start in range(0, world_size, unit_size)]
    outer = [range(place, world_size, unit_size) for place in range(unit_size)]
    parts = [axis[i : i + part_size] for axis in outer for i in range(0, len(axis), part_size)]
    copies = [axis[i::part_size] for axis in outer for i in range(part_size)]
    outer_rank = rank // unit_size
    return Axes(
        unit=_group_of(rank, units),
        outer=_group_of(rank, outer),
        parts=_group_of(rank, parts),
        copies=_group_of(rank, copies),
        world=_group_of(rank, [range(world_size)]),
        unit_rank=rank % unit_size,
        unit_size=unit_size,
        outer_rank=outer_rank,
        outer_size=world_size // unit_size,
        part_rank=outer_rank % part_size,
        part_size=part_size,
        unit_control=_control_group_of(rank, units),
    )


def with_pipe(axes: Axes, pipe_size: int) -> Axes:
    """Return the axes with a pipeline within each unit. Collective the first time.

    Args:
        axes: This rank's axes without a pipeline.
        pipe_size: The number of stages that work at the same time, at least two, a divisor of the unit's
            ranks.
    """
    if axes.pipe_size == pipe_size:
        return axes
    rank = axes.outer_rank * axes.unit_size + axes.unit_rank
    world_size = axes.outer_size * axes.unit_size
    size = axes.unit_size // pipe_size
    stages = [range(start, start + size) for start in range(0, world_size, size)]
    units = range(0, world_size, axes.unit_size)
    pipes = [range(unit + place, unit + axes.unit_size, size) for unit in units for place in range(size)]
    same = [
        [unit + number * size + place for unit in units for place in range(size)]
        for number in range(pipe_size)
    ]
    pipe, pipe_rank = _group_of(rank, pipes), axes.unit_rank // size
    stage = replace(
        axes,
        unit=_group_of(rank, stages),
        world=_group_of(rank, same),
        unit_rank=axes.unit_rank % size,
        unit_size=size,
        unit_control=_control_group_of(rank, stages),
        pipe=pipe,
        pipe_rank=pipe_rank,
        pipe_size=pipe_size,
    )
    return replace(axes, pipe=pipe, pipe_rank=pipe_rank, pipe_size=pipe_size, stage=stage)


def _control_group_of(rank: int, axis: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Return a rank's group along an axis, whose collectives take CPU tensors."""
    return _group_of(rank, axis, backend=None if _takes_cpu_tensors() else "gloo")


def _takes_cpu_tensors() -> bool:
    return is_distributed() and "gloo" in dist.get_backend()


def _group_of(
    rank: int, axis: Sequence[Sequence[int]], *, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Return the group along one axis that this rank is in."""
    ranks = tuple(tuple(group) for group in axis)
    own = next(group for group in ranks if rank in group)
    world = dist.group.WORLD
    if len(own) == 1 or not is_distributed() or world is None:
        return None
    if len(ranks) == 1 and backend is None:
        return world
    if world not in _groups:
        _groups.clear()  # their world was destroyed
    made = _groups.setdefault(world, {})
    if (ranks, backend) not in made:
        made[ranks, backend], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            [list(group) for group in ranks], backend=backend
        )
    return made[ranks, backend]

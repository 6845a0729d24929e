"""Where the part of a parameter that one rank stores lies in the whole.

Two cuts follow each other: a placement divides the parameter among the ranks of a plan unit, and with ZeRO
the ranks of the outer axis share the rows of what is left. This module owns the arithmetic on shapes and
boxes; it never communicates and stores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nnx_checkpoint.box import Box
from nnx_checkpoint.shard import Shard
from nnx_nnscaler.placement import Placement, R


def rows_of(count: int, *, rank: int, size: int) -> tuple[int, int]:
    """Which of `count` rows one of `size` ranks stores: equal numbers in order, the last ones fewer or none.

    Example:
        >>> [rows_of(5, rank=rank, size=4) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = math.ceil(count / size)
    return min(rank * most, count), min((rank + 1) * most, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """How one rank stores one parameter.

    Attributes:
        shape: Logical shape: what one process would have.
        placement: Says how the ranks of the unit share it, ``R`` or ``S``.
        unit_rank: This rank's place in the unit.
        unit_size: Ranks of the unit.
        rows: First and one past the last row (index of dim 0) that this rank stores of what the unit's
            placement leaves it; None where it stores all of them.
    """

    shape: tuple[int, ...]
    placement: Placement = R
    unit_rank: int = 0
    unit_size: int = 1
    rows: tuple[int, int] | None = None

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part within the unit, all rows of it."""
        return self.placement.local_shape(self.shape, self.unit_size)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank stores."""
        if self.rows is None:
            return self.unit_shape
        start, stop = self.rows
        return (stop - start, *self.unit_shape[1:])

    @property
    def is_whole(self) -> bool:
        """Whether this rank stores all of the parameter."""
        return self.local_shape == self.shape

    def unit_part(self, whole: Tensor) -> Tensor:
        """This rank's part within the unit of a tensor of the logical shape; a view unless it has groups."""
        if not self.placement.is_shard:
            return whole
        dim, groups = self.placement.dim, self.placement.groups
        if groups == 1:
            return whole.chunk(self.unit_size, dim)[self.unit_rank]
        grouped = torch.unflatten(whole, dim, (groups, -1))
        return grouped.chunk(self.unit_size, dim + 1)[self.unit_rank].flatten(dim, dim + 1)

    def local_part(self, whole: Tensor) -> Tensor:
        """What this rank stores of a tensor of the logical shape."""
        return self.stored_rows(self.unit_part(whole))

    def stored_rows(self, unit_part: Tensor) -> Tensor:
        """What this rank stores of its part within the unit; a view."""
        return unit_part if self.rows is None else unit_part[self.rows[0] : self.rows[1]]

    def shard_of_local(self, tensor: Tensor) -> Shard:
        """Describe a tensor of the local shape: the parameter, its gradient, or state of its optimizer.

        Example:
            >>> import torch
            >>> layout = ParameterLayout(shape=(4, 3), rows=(2, 4))
            >>> layout.shard_of_local(torch.zeros(2, 3)).boxes
            (Box(offset=(2, 0), size=(2, 3)),)
        """
        tensor = tensor.detach()
        pieces = list(self._pieces())
        boxes = tuple(box for box, _ in pieces)
        return Shard(self.shape, tensor.dtype, boxes, tuple(tensor[place.slices] for _, place in pieces))

    def _pieces(self) -> Iterator[tuple[Box, Box]]:
        """Every box that this rank stores: where it lies in the whole, and where in the local tensor."""
        if math.prod(self.shape) and not math.prod(self.local_shape):
            return
        local, reached = self.unit_shape, 0
        dim = self.placement.dim
        for box in self.placement.boxes(self.shape, rank=self.unit_rank, size=self.unit_size):
            place = Box(tuple(reached if d == dim else 0 for d in range(len(local))), box.size)
            if self.placement.is_shard:
                reached += box.size[dim]
            yield from self._stored(box, place)

    def _stored(self, box: Box, place: Box) -> Iterator[tuple[Box, Box]]:
        """The rows of one box that this rank stores."""
        if self.rows is None:
            yield box, place
            return
        kept = place.intersection(Box((self.rows[0], *(0,) * (len(place.size) - 1)), self.local_shape))
        if kept is not None:
            within = kept.relative_to(place)
            offset = tuple(a + b for a, b in zip(box.offset, within.offset, strict=True))
            yield Box(offset, kept.size), Box((kept.offset[0] - self.rows[0], *kept.offset[1:]), kept.size)

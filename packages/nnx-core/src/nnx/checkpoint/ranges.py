"""Which ranges of bytes of a stored box a region of it is made of.

A region whose inner dims are whole is one range; columns of a matrix are one range for each row. Ranges
whose gap is small are joined, because reading a small gap costs less than leaving it out.
This module owns that arithmetic; it never reads anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nnx.box import Box

__all__ = ["Ranges", "cut", "ranges_of", "strides_of"]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of equal length, in order.

    Attributes:
        first: Position of the first byte, counted from the start of the stored box.
        span: Length of one range.
        wanted: Bytes of one range that belong to the region; the rest of it are gaps.
        steps: How often, and by how many bytes, the outer dims move on; one pair for each.
    """

    first: int
    span: int
    wanted: int
    steps: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many ranges there are."""
        return math.prod(count for count, _ in self.steps)

    @property
    def gapless(self) -> bool:
        """Whether the ranges hold nothing but the region."""
        return self.span == self.wanted

    def starts(self) -> Iterator[int]:
        """Where each range starts."""
        moves = (range(0, count * stride, stride) for count, stride in self.steps)
        for offsets in itertools.product(*moves):
            yield self.first + sum(offsets)


def ranges_of(region: Box, outer: Sequence[int], itemsize: int, gap: int) -> Ranges:
    """The ranges that a region consists of.

    Args:
        region: A region with at least one element, in coordinates of the stored box.
        outer: Extents of the stored box.
        itemsize: Bytes of one element.
        gap: Ranges that lie at most this many bytes apart are joined.

    Example:
        Two columns of a matrix with three rows of four: one range for each row, or all in one.

        >>> ranges_of(Box((0, 1), (3, 2)), (3, 4), 1, gap=0)
        Ranges(first=1, span=2, wanted=2, steps=((3, 4),))
        >>> ranges_of(Box((0, 1), (3, 2)), (3, 4), 1, gap=2)
        Ranges(first=1, span=10, wanted=6, steps=())
    """
    strides = [stride * itemsize for stride in strides_of(outer)]
    first = sum(offset * stride for offset, stride in zip(region.offset, strides, strict=True))
    span = wanted = itemsize
    dim = len(strides)
    while dim:
        count, stride = region.size[dim - 1], strides[dim - 1]
        if count > 1 and stride - span > gap:
            break
        span += (count - 1) * stride
        wanted *= count
        dim -= 1
    steps = tuple((region.size[d], strides[d]) for d in range(dim) if region.size[d] > 1)
    return Ranges(first, span, wanted, steps)


def cut(
    region: Box, view: Tensor, outer: Sequence[int], *, gap: int, limit: int
) -> Iterator[tuple[Box, Tensor, Ranges]]:
    """Cut a region, and the view that it goes into, until what is read at once is small.

    Args:
        region: A region of the stored box.
        view: A tensor of the region's extents.
        outer: Extents of the stored box.
        gap: As in `ranges_of`.
        limit: Most bytes of one part: of all its ranges, or of its only range if that has gaps.
    """
    ranges = ranges_of(region, outer, view.element_size(), gap)
    small = ranges.count * ranges.span <= limit and (ranges.gapless or ranges.count == 1)
    if small or region.numel == 1:
        yield region, view, ranges
        return
    dim = next(d for d, extent in enumerate(region.size) if extent > 1)
    half = region.size[dim] // 2
    for start, extent in ((0, half), (half, region.size[dim] - half)):
        offset = (*region.offset[:dim], region.offset[dim] + start, *region.offset[dim + 1 :])
        size = (*region.size[:dim], extent, *region.size[dim + 1 :])
        yield from cut(Box(offset, size), view.narrow(dim, start, extent), outer, gap=gap, limit=limit)


def strides_of(size: Sequence[int]) -> tuple[int, ...]:
    """Distance of neighbours along each dim, in elements, where nothing lies between."""
    strides, stride = [], 1
    for extent in reversed(size):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))

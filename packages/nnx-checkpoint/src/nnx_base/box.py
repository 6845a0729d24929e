"""Compute with boxes: axis-aligned regions of a tensor.

This module owns arithmetic on offsets and sizes only. It knows no tensors and imports nothing but the
standard library, so that tools which merely inspect a checkpoint need not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned region of a tensor.

    Attributes:
        offset: Index of the first element, one entry per tensor dim.
        size: Extent along each tensor dim.

    Example:
        >>> Box(offset=(2, 0), size=(3, 4)).numel
        12
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size) or min((0, *self.offset, *self.size)) < 0:
            raise ValueError(f"not a box: offset {self.offset}, size {self.size}")

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index expression that selects this box from a tensor of the global shape."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box that covers an unsharded tensor of this shape, one object for each shape."""
        return _whole(tuple(shape))

    def intersection(self, other: Box) -> Box | None:
        """Return the common region, or None where the two do not overlap.

        Example:
            >>> Box((0,), (4,)).intersection(Box((3,), (4,)))
            Box(offset=(3,), size=(1,))
        """
        if self == other:  # the usual case
            return self if self.numel else None
        start = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        stop = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        ]
        size = [b - a for a, b in zip(start, stop, strict=True)]
        if any(extent <= 0 for extent in size):
            return None
        return Box(tuple(start), tuple(size))

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`, which must contain it."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box(offset=(0,) * len(shape), size=shape)


def cut_range(begin: int, numel: int, *, low: int, high: int) -> tuple[int, int]:
    """Return the slice of a tensor at ``[begin, begin + numel)`` in a partition ``[low, high)`` of a buffer.

    Returns:
        The begin of the slice in the tensor, and its length; 0 and 0 if the two ranges do not overlap.

    Example:
        >>> cut_range(4, 6, low=7, high=14), cut_range(4, 6, low=12, high=14)
        ((3, 3), (0, 0))
    """
    first, last = max(begin, low), min(begin + numel, high)
    return (first - begin, last - first) if last > first else (0, 0)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut a range of the row-major flattened tensor into boxes, in order of their elements.

    Args:
        shape: Shape of the tensor.
        start: First flat element of the range.
        stop: One past the last flat element.

    Returns:
        At most ``2 * len(shape) - 1`` boxes that together hold exactly the range.

    Example:
        >>> boxes_of_range((3, 4), 2, 9)
        [Box(offset=(0, 2), size=(1, 2)), Box(offset=(1, 0), size=(1, 4)), Box(offset=(2, 0), size=(1, 1))]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range [{start}, {stop}) lies outside a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    if len(shape) == 0:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head_is_whole = start % row == 0
    tail_is_whole = stop % row == 0
    if first == last and not (head_is_whole and tail_is_whole):
        return _in_row(shape, first, start - first * row, stop - first * row)
    boxes: list[Box] = []
    if not head_is_whole:
        boxes += _in_row(shape, first, start - first * row, row)
    middle_start = first if head_is_whole else first + 1
    middle_stop = last + 1 if tail_is_whole else last
    if middle_start < middle_stop:
        rest = tuple(shape[1:])
        boxes.append(Box((middle_start, *(0,) * len(rest)), (middle_stop - middle_start, *rest)))
    if not tail_is_whole:
        boxes += _in_row(shape, last, 0, stop - last * row)
    return boxes


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes_of_range(shape[1:], start, stop)]


@lru_cache(maxsize=16)  # plans and indexes request few shapes, many times each
def boxes_of_grid(shape: tuple[int, ...], grid: tuple[int, ...]) -> Sequence[Box]:
    """Cut a tensor into boxes of one size, as `torch.chunk` cuts: the last box along a dim may be smaller.

    Args:
        shape: The shape of a tensor that has elements.
        grid: The extents of a box, at least 1 each.

    Returns:
        The boxes in order of their offsets.

    Example:
        >>> [(box.offset, box.size) for box in boxes_of_grid((5, 4), (3, 4))]
        [((0, 0), (3, 4)), ((3, 0), (2, 4))]
    """
    return tuple(map(Box, _offsets_of_grid(shape, grid), _sizes_of_grid(shape, grid)))


@lru_cache(maxsize=1 << 14)
def box_of_grid(shape: tuple[int, ...], grid: tuple[int, ...], number: int) -> Box:
    """Return the box with this number in the order of `boxes_of_grid`."""
    at: list[int] = []
    for full, step in zip(reversed(shape), reversed(grid), strict=True):
        number, place = divmod(number, -(-full // step))
        at.append(place * step)
    at.reverse()
    return Box(tuple(at), tuple(min(step, full - i) for step, full, i in zip(grid, shape, at, strict=True)))


def overlapping_of_grid(shape: tuple[int, ...], grid: tuple[int, ...], box: Box) -> list[int]:
    """Return the numbers of the boxes of a grid that share elements with a box, in ascending order.

    Example:
        >>> overlapping_of_grid((10, 4), (3, 4), Box((2, 0), (2, 4)))
        [0, 1]
    """
    found = [0] if box.numel else []
    for full, step, start, extent in zip(shape, grid, box.offset, box.size, strict=True):
        count = -(-full // step)
        places = range(start // step, (start + extent - 1) // step + 1)
        found = [before * count + place for before in found for place in places]
    return found


def numels_of_grid(shape: Sequence[int], grid: Sequence[int]) -> list[int]:
    """Return the number of elements of each box of a grid.

    Example:
        >>> numels_of_grid((5, 4), (3, 4))
        [12, 8]
    """
    return [math.prod(size) for size in _sizes_of_grid(shape, grid)]


def _offsets_of_grid(shape: Sequence[int], grid: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(0, full, step) for full, step in zip(shape, grid, strict=True)))


def _sizes_of_grid(shape: Sequence[int], grid: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(
        *(
            [step] * (full // step) + [full % step] * (full % step > 0)
            for full, step in zip(shape, grid, strict=True)
        )
    )


def grid_of(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Return the extents of one box if the boxes form a regular grid, else None.

    Args:
        shape: The shape of the tensor.
        boxes: The boxes in order of their offsets.
    """
    if not boxes or 0 in boxes[0].size or len(boxes[0].size) != len(shape):
        return None
    grid = boxes[0].size
    if math.prod(-(-full // step) for full, step in zip(shape, grid, strict=True)) != len(boxes):
        return None
    same_offsets = [box.offset for box in boxes] == list(_offsets_of_grid(shape, grid))
    return grid if same_offsets and [box.size for box in boxes] == list(_sizes_of_grid(shape, grid)) else None


def find_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Check that boxes partition a tensor: inside its shape, without overlap, without a gap.

    Args:
        shape: Shape of the tensor.
        boxes: The boxes, in any order.

    Returns:
        The fault, or an empty string.

    Example:
        >>> find_fault((4,), [Box((0,), (2,)), Box((2,), (2,))])
        ''
        >>> find_fault((4,), [Box((0,), (3,)), Box((2,), (2,))])
        'box (2,)+(2,) overlaps box (0,)+(3,)'
    """
    boxes = list(boxes)
    if len(boxes) == 1 and boxes[0] == Box.whole(shape):
        return ""  # most tensors are stored unsharded
    pieces = [box for box in boxes if box.numel > 0]
    for box in pieces:
        if len(box.size) != len(shape) or any(
            start + extent > full for start, extent, full in zip(box.offset, box.size, shape, strict=True)
        ):
            return f"box {_text(box)} lies outside the shape {tuple(shape)}"
    overlap = _find_overlap(shape, pieces)
    if overlap is not None:
        return f"box {_text(overlap[1])} overlaps box {_text(overlap[0])}"
    covered, total = sum(box.numel for box in pieces), math.prod(shape)
    return "" if covered == total else f"the boxes hold {covered} of {total} elements"


def _find_overlap(shape: Sequence[int], boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, or None; compare boxes that are flat ranges by their ends only."""
    flat = [(found, box) for box in boxes if (found := _range_of(shape, box)) is not None]
    if len(flat) < len(boxes):
        return _sweep(len(shape), boxes)
    flat.sort()
    for ((_, stop), box), ((start, _), following) in pairwise(flat):
        if stop > start:
            return box, following
    return None


def _range_of(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """Return the flat range of a box's elements if they are contiguous in row-major order, else None."""
    start, inside = 0, False
    for full, offset, extent in zip(shape, box.offset, box.size, strict=True):
        if inside and extent != full:
            return None
        inside = inside or extent > 1
        start = start * full + offset
    return start, start + box.numel


def _sweep(dims: int, boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two overlapping boxes; sweep along the dim with most cuts, so that few pairs are compared."""
    import numpy as np  # numpy is imported here: listing checkpoints of unsharded tensors never needs it

    dim = max(range(dims), key=lambda d: len({box.offset[d] for box in boxes}))
    boxes = sorted(boxes, key=lambda b: (b.offset[dim], b))
    starts = np.array([box.offset for box in boxes], np.int64)
    stops = starts + np.array([box.size for box in boxes], np.int64)
    following = np.searchsorted(starts[:, dim], stops[:, dim])  # first box after each end
    for index, stop in enumerate(following):
        near = slice(index + 1, int(stop))
        meets = (starts[near] < stops[index]).all(1) & (starts[index] < stops[near]).all(1)
        if meets.any():
            return boxes[index], boxes[index + 1 + int(meets.argmax())]
    return None


def _text(box: Box) -> str:
    return f"{box.offset}+{box.size}"

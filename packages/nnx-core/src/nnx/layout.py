"""What a shard is: the part of one logical tensor that this rank holds.

A logical tensor has a global shape and is cut into *boxes* (axis-aligned hyperrectangles).
Every engine's way of partitioning reduces to boxes: whole replicas, DTensor shards along any
tensor dim, local shards of a compiled program, and ranges of a flattened buffer.
This module owns that geometry. It never communicates and never copies data.
See `nnx.checkpoint` for who writes and reads shards, `nnx.backend` for who makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Box", "Shard", "boxes_of_range", "shard_of", "shard_of_range"]


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

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a whole tensor of this shape."""
        return cls(offset=(0,) * len(shape), size=tuple(shape))

    def intersection(self, other: Box) -> Box | None:
        """The common region, or None where the two do not overlap.

        Example:
            >>> Box((0,), (4,)).intersection(Box((3,), (4,)))
            Box(offset=(3,), size=(1,))
        """
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
        """This box in the coordinates of `outer`, which must contain it."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Handles on what this rank holds of one logical tensor: views, never copies.

    Attributes:
        shape: Shape of the whole logical tensor.
        dtype: Its dtype, which is also that of every view.
        boxes: Where each view lies in the logical tensor; empty where this rank holds nothing.
        data: One view for each box, of exactly the box's size. Writing into it fills the engine's
            own storage in place.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    data: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if len(self.boxes) != len(self.data):
            raise ValueError(f"a shard has {len(self.boxes)} boxes but {len(self.data)} views")
        for box, view in zip(self.boxes, self.data, strict=True):
            if tuple(view.shape) != box.size:
                raise ValueError(f"a view of shape {tuple(view.shape)} cannot fill {box}")

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(view.numel() * view.element_size() for view in self.data)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the complete tensor in one piece."""
        return len(self.boxes) == 1 and self.boxes[0].size == self.shape

    def fill_from(self, full: Tensor) -> None:
        """Copy this rank's part out of a complete tensor of the logical shape."""
        for box, view in zip(self.boxes, self.data, strict=True):
            view.copy_(full[box.slices])


def shard_of(tensor: Tensor) -> Shard:
    """Describe a plain tensor (held whole) or a DTensor (any placement but partial).

    Args:
        tensor: The tensor as the engine holds it; autograd history is ignored.

    Returns:
        A shard whose views alias the tensor's own storage. It has no box where this rank holds no
        element, except that an empty tensor keeps its one empty box.

    Example:
        >>> shard_of(torch.zeros(2, 3)).is_whole
        True
    """
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not isinstance(tensor, DTensor):
        return Shard(shape, dtype, (Box.whole(shape),), (tensor.detach(),))
    chunk = tensor.__create_chunk_list__()[0]
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if box.numel == 0 and tensor.numel() > 0:
        return Shard(shape, dtype, (), ())
    return Shard(shape, dtype, (box,), (tensor.detach().to_local(),))


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


def shard_of_range(flat: Tensor, *, shape: Sequence[int], start: int) -> Shard:
    """Describe a piece of a flat buffer that holds elements ``[start, start + len)`` of a tensor.

    This is how ZeRO partitions and chunk managers expose what they hold.

    Args:
        flat: 1-d view on the elements that this rank holds.
        shape: Shape of the whole logical tensor.
        start: Flat index, in the logical tensor, of the first element of `flat`.

    Returns:
        A shard whose views alias `flat`.
    """
    boxes = boxes_of_range(shape, start, start + flat.numel())
    pieces = flat.detach().split([box.numel for box in boxes]) if boxes else ()
    views = tuple(piece.view(box.size) for piece, box in zip(pieces, boxes, strict=True))
    return Shard(tuple(shape), flat.dtype, tuple(boxes), views)

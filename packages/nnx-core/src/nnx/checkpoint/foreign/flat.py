"""Ranges of flat buffers, as pieces of the tensors that were flattened into them.

ZeRO and its like keep many tensors end to end in one buffer and cut that evenly, wherever the tensors begin.
What one rank holds of a tensor is then a range of its elements, and a few boxes of it (`nnx.box`).
"""

from __future__ import annotations

from nnx.box import Box, boxes_of_range
from nnx.checkpoint.foreign.torch_file import FileTensor
from nnx.checkpoint.index import Piece
from nnx.errors import CheckpointError

__all__ = ["pieces_of_range"]


def pieces_of_range(source: FileTensor, position: int, outer: Box, start: int, stop: int) -> list[Piece]:
    """Say where the elements of a box lie, of which `source` holds a range.

    Args:
        source: A contiguous tensor in a file.
        position: Index in it of the first element of the range.
        outer: A box of the logical tensor; the range is one of its elements in row-major order.
        start: First element of the range.
        stop: One past its last element.

    Raises:
        CheckpointError: The tensor in the file ends before the range does.
    """
    if position + stop - start > source.numel or not source.is_contiguous:
        raise CheckpointError(
            f"a tensor of '{source.path}' has {source.numel} elements, expected at least "
            f"{position + stop - start} without gaps.",
            remedy="The files of this checkpoint do not belong together; restore them from a backup.",
        )
    pieces = []
    at = source.start + position * source.dtype.itemsize
    for inner in boxes_of_range(outer.size, start, stop):
        offset = tuple(a + b for a, b in zip(outer.offset, inner.offset, strict=True))
        nbytes = inner.numel * source.dtype.itemsize
        pieces.append(Piece(Box(offset, inner.size), str(source.path), at, nbytes))
        at += nbytes
    return pieces

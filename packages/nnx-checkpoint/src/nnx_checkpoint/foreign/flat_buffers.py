"""Read ranges of flat buffers, which ZeRO and FSDP1 write.

These engines store many tensors end to end in one buffer and partition it evenly, regardless of tensor
bounds. A rank's shard of a tensor is then a range of its elements, or a few boxes (`nnx_base.box`). State
that all elements share, such as the number of steps, is stored beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from nnx_base.box import Box, boxes_of_range, cut_range
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import TENSORS, Contents
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.unpickling.torch_file import FileTensor

_MOST_DIMS = 64
"""The largest number of dims that torch's operators take."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a parameter, which one rank holds from `position` on."""

    rank: int
    position: int
    start: int
    stop: int


def spans_of_partitions(offset: int, numel: int, size: int) -> list[Span]:
    """Split a parameter at the bounds of its buffer's partitions (ZeRO 1 and 2).

    Example:
        >>> [(span.rank, span.position, span.start, span.stop) for span in spans_of_partitions(3, 4, 5)]
        [(0, 3, 0, 2), (1, 0, 2, 4)]
    """
    spans = []
    for rank in range(offset // max(size, 1), math.ceil((offset + numel) / max(size, 1))):
        start, length = cut_range(offset, numel, low=rank * size, high=(rank + 1) * size)
        if length:
            spans.append(Span(rank, offset + start - rank * size, start, start + length))
    return spans


def split_evenly(position: int, numel: int, world_size: int) -> list[Span]:
    """Split a parameter itself into equal ranges, the last ones shorter or empty (ZeRO 3).

    Example:
        >>> [(span.rank, span.position, span.start, span.stop) for span in split_evenly(10, 5, 3)]
        [(0, 10, 0, 2), (1, 10, 2, 4), (2, 10, 4, 5)]
    """
    part = math.ceil(numel / world_size)
    held = [cut_range(0, numel, low=rank * part, high=(rank + 1) * part) for rank in range(world_size)]
    return [
        Span(rank, position, start, start + length) for rank, (start, length) in enumerate(held) if length
    ]


def pieces_of_range(source: FileTensor, position: int, outer: Box, start: int, stop: int) -> list[Piece]:
    """Return the pieces of a box of which `source` holds a range.

    Args:
        source: A contiguous tensor in a file.
        position: Index in it of the first element of the range.
        outer: A box of the logical tensor; the range is one of its elements in row-major order.
        start: First element of the range.
        stop: One past its last element.

    Raises:
        CheckpointError: The tensor in the file ends before the range does, or the box has too many dims.
    """
    if len(outer.size) > _MOST_DIMS:
        raise CheckpointError(
            f"a tensor of '{source.path}' claims {len(outer.size)} dims; torch has at most {_MOST_DIMS}.",
            remedy="Restore the file from a backup, or use another checkpoint.",
        )
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


def as_step(value: Any) -> Any:
    """Return a step count as the tensor of torch's optimizers (other programs use an int)."""
    return torch.tensor(float(value)) if isinstance(value, int) else value


def add_shared_state(contents: Contents, key: str, value: Any, values: dict[str, Any]) -> None:
    """Add optimizer state that all elements of a parameter share, such as the number of steps.

    Args:
        contents: The contents to add a tensor to.
        key: The logical name of the state.
        value: The state.
        values: The dict to add other values to.
    """
    name = key.rpartition(".")[2]
    value = as_step(value) if name == "step" else value
    if isinstance(value, TENSORS):
        contents.add(key, value)
    else:
        values[name] = value

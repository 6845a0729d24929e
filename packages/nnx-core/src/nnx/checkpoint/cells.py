"""Regular cuts: a tensor cut into cells of one size, as `torch.chunk` cuts, along any of its dims.

A *chunk* says how far a cell reaches along each tensor dim; the last cell of a dim is shorter where the
extent is no multiple. A *cell* is named by its coordinates, without trailing zeros: ``(3,)`` is the fourth
slab of rows, ``()`` the only cell of a tensor that is not cut. So one short tuple says what a rank holds of
thousands of tensors, and where their boxes lie follows by arithmetic. This module owns that arithmetic, and
guessing chunk and cell from a box. It never imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nnx.box import Box

__all__ = [
    "Cell",
    "Habits",
    "Ints",
    "cell_box",
    "cell_sizes",
    "cells_overlapping",
    "find_fault_of_grid",
    "grid",
    "guess",
    "habits",
    "has_cell",
    "seats",
    "table",
    "trimmed",
]

Cell = tuple[int, ...]
Ints = npt.NDArray[np.int64]
Habits = tuple[tuple[int, ...], ...]
"""For each tensor dim, the coordinates that a rank's cells have there, the most frequent one first."""


def grid(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """How many cells a tensor has along each dim.

    Example:
        >>> grid((10, 4), (3, 4))
        (4, 1)
    """
    return tuple(-(-extent // step) for extent, step in zip(shape, chunk, strict=True))


def has_cell(shape: Sequence[int], chunk: Sequence[int], cell: Cell) -> bool:
    """Whether a tensor has this cell; one with few rows has none for ranks far back."""
    if len(cell) > len(shape):
        return False
    at = (*cell, *(0,) * (len(shape) - len(cell)))
    return all(i * step < extent for i, step, extent in zip(at, chunk, shape, strict=True))


@lru_cache(maxsize=1 << 14)
def cell_box(shape: tuple[int, ...], chunk: tuple[int, ...], cell: Cell) -> Box:
    """The box of a cell that the tensor has.

    Example:
        >>> cell_box((10, 4), (3, 4), (3,))
        Box(offset=(9, 0), size=(1, 4))
    """
    at = (*cell, *(0,) * (len(shape) - len(cell)))
    offset = tuple(i * step for i, step in zip(at, chunk, strict=True))
    size = tuple(min(step, full - o) for step, full, o in zip(chunk, shape, offset, strict=True))
    return Box(offset, size)


def cells_overlapping(shape: tuple[int, ...], chunk: tuple[int, ...], box: Box) -> Iterator[Cell]:
    """The cells that share elements with a box, in row-major order.

    Example:
        >>> list(cells_overlapping((10, 4), (3, 4), Box((2, 0), (2, 4))))
        [(), (1,)]
    """
    if 0 in shape or 0 in box.size:
        return
    if chunk == shape:
        yield ()
        return
    spans = (
        range(start // step, (start + extent - 1) // step + 1)
        for start, extent, step in zip(box.offset, box.size, chunk, strict=True)
    )
    for at in itertools.product(*spans):
        yield trimmed(at)


def trimmed(at: Sequence[int]) -> Cell:
    """Coordinates as a cell is named by: without trailing zeros."""
    stop = len(at)
    while stop and at[stop - 1] == 0:
        stop -= 1
    return tuple(at[:stop])


def cell_sizes(
    shapes: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], cells: Sequence[Cell]
) -> Ints:
    """Elements of every cell of every tensor: one row for each tensor, zero where it has no such cell."""
    dims = max([*map(len, shapes), *map(len, cells), 0]) if shapes else 0
    sizes = np.ones((len(shapes), len(cells)), np.int64)
    for dim in range(dims):
        extent = np.array([[shape[dim] if dim < len(shape) else 1] for shape in shapes], np.int64)
        step = np.array([[chunk[dim] if dim < len(chunk) else 1] for chunk in chunks], np.int64)
        at = np.array([cell[dim] if dim < len(cell) else 0 for cell in cells], np.int64)
        # Beyond the last cell there is nothing, however far.
        sizes *= np.clip(extent - np.minimum(at, -(-extent // step)) * step, 0, step)
    return sizes


def table(cells: Iterable[Cell]) -> Ints:
    """Coordinates of cells, one row for each.

    Example:
        >>> table([(), (1,), (0, 2)]).tolist()
        [[0, 0], [1, 0], [0, 2]]
    """
    found = list(cells)
    dims = max(map(len, found), default=0)
    rows = [(*cell, *(0,) * (dims - len(cell))) for cell in found]
    return np.array(rows, np.int64).reshape(len(found), dims)


def find_fault_of_grid(shape: Sequence[int], chunk: Sequence[int], cells: Ints) -> str:
    """What is wrong with cells as a cut of a tensor, or an empty string.

    Cells outside the tensor do not count: a layout is shared by tensors with more and with fewer rows.

    Args:
        shape: Of the tensor.
        chunk: How far a cell reaches.
        cells: Different ones, as `table` gives them.

    Example:
        >>> find_fault_of_grid((10, 4), (3, 4), table([(), (1,), (2,)]))
        'it lacks 1 of 4 cells'
    """
    counts = grid(shape, chunk)
    dims = cells.shape[1]
    there = (*counts[:dims], *(1,) * (dims - len(counts)))
    inside = (cells < np.array(there, np.int64)).all(1) & (0 not in counts)
    expected = math.prod(counts)
    missing = expected - int(inside.sum())
    return f"it lacks {missing} of {expected} cells" if missing else ""


# --- guessing -------------------------------------------------------------------------------------


def seats(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Into how many parts a mesh of these ranks may cut a tensor dim, and which part is then this rank's.

    Example:
        >>> seats(5, 6)
        [(6, 5), (3, 2), (2, 1)]
    """
    found = {
        (parts, rank // inner % parts): None
        for parts in reversed(_divisors(world_size))
        for inner in _divisors(world_size // parts)
        if parts > 1
    }
    return list(found)


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def habits(boxes: Iterable[tuple[Sequence[int], Box, int]]) -> Habits:
    """Which coordinates a rank's cells have, from shapes, the boxes it holds of them, and how often.

    Only boxes that end before their tensor does count: they have the full size of a cell.
    """
    seen: dict[int, Counter[int]] = {}
    for shape, box, count in boxes:
        for dim, (full, start, extent) in enumerate(zip(shape, box.offset, box.size, strict=True)):
            if start + extent < full and start % extent == 0:
                seen.setdefault(dim, Counter())[start // extent] += count
    return tuple(
        tuple(i for i, _ in seen.get(dim, Counter()).most_common()) for dim in range(max([*seen, -1]) + 1)
    )


def guess(
    shape: Sequence[int], box: Box, usual: Habits, possible: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], Cell] | None:
    """A chunk and a cell that are exactly this box; None if there are none.

    The last cell of a dim may be shorter than the chunk, which therefore is uncertain; then the coordinates
    that the rank usually has decide, or else where in a mesh it may be. Other ranks hold full cells and will
    tell whether the guess was right.

    Args:
        shape: Of the tensor.
        box: What the rank holds of it.
        usual: As `habits` finds them.
        possible: As `seats` finds them.

    Example:
        >>> guess((10,), Box((9,), (1,)), usual=((3,),), possible=[])
        ((3,), (3,))
        >>> guess((10,), Box((9,), (1,)), usual=(), possible=seats(3, 4))
        ((3,), (3,))
    """
    chunk, at = [], []
    for dim, (full, start, extent) in enumerate(zip(shape, box.offset, box.size, strict=True)):
        found = _guess_dim(full, start, extent, usual[dim] if dim < len(usual) else (), possible)
        if found is None:
            return None
        chunk.append(found[0])
        at.append(found[1])
    return tuple(chunk), trimmed(at)


def _guess_dim(
    full: int, start: int, extent: int, usual: Sequence[int], possible: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    if start == 0:
        return extent, 0
    if start + extent == full:
        for i in usual:
            if i and start % i == 0 and start // i >= extent:
                return start // i, i
        for parts, i in possible:
            step = -(-full // parts)
            if i * step == start and start + step >= full:
                return step, i
    return (extent, start // extent) if start % extent == 0 else None

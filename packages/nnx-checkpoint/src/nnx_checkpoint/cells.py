"""Regular cuts: a tensor cut into cells of one size, and where their boxes lie in the files.

A *chunk* says how far a cell reaches along each tensor dim, as `torch.chunk` cuts; the last cell of a dim is
shorter where the extent is no multiple. A *cell* is named by its coordinates, without trailing zeros:
``(3,)`` is the fourth slab of rows, ``()`` the only cell of a tensor that is not cut. So one short tuple says
what a rank holds of thousands of tensors, and where their boxes lie, in the tensor and in the file, follows
by arithmetic. This module owns that arithmetic, and guessing chunk and cell from a box. It imports no torch
and touches no files.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from nnx_checkpoint.box import Box
from nnx_checkpoint.dtypes import DTYPES, width

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
        shape: The shape of the tensor.
        chunk: The extent of a cell along each dim.
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
        shape: The shape of the tensor.
        box: The box of it that the rank holds.
        usual: The usual chunks, found by `habits`.
        possible: The possible coordinates, found by `seats`.

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


# --- positions in files ---------------------------------------------------------------------------
# The pieces of a file stand in a fixed order: tensors with wider numbers first, then by name, then by the
# offset of the box. So a position is a sum of sizes, and sums are shared: all files that hold cells of the
# same sizes of a layout's tensors have the same ones. Finding one piece costs no more for a thousand files
# than for one. Writers and readers follow this one rule, so no positions need to be listed.


Layout = Mapping[Cell, tuple[int, ...]]
"""For each cell the numbers of the files that hold it."""

_SHARED = 1024
"""Layouts of at least so many tensors keep sums for all of them, which files share."""
_TABLE = 1 << 22
"""Most entries of a table of sizes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tensors of one kind have in common.

    Attributes:
        dtype_name: Their element type.
        shape: Their shape.
        chunk: The chunk by which they are cut.
        layout: Number of the layout that says which files hold which cells.
    """

    dtype_name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    layout: int


@dataclass(frozen=True, slots=True)
class OddBox:
    """A box that is listed. Its position is -1 where it is not known yet."""

    box: Box
    file: int
    start: int = -1


@dataclass(frozen=True, slots=True)
class OddTensor:
    """A tensor whose boxes are listed."""

    dtype_name: str
    shape: tuple[int, ...]
    boxes: tuple[OddBox, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What is stored in which files; all that an index says, except for aliases.

    Attributes:
        files: Names of the files, by number.
        layouts: The {n} by number.
        kinds: The {n} by number.
        regular: The number of the kind of each regular tensor.
        odd: All other tensors.
    """

    files: Sequence[str]
    layouts: Sequence[Layout]
    kinds: Sequence[Kind]
    regular: Mapping[str, int]
    odd: Mapping[str, OddTensor]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Bytes and checksums of a layout's pieces in front of each tensor; the last entry is their total."""

    nbytes: Ints
    blocks: Ints


@dataclass(frozen=True, slots=True)
class _File:
    """One file: sums that it shares with others, and its own pieces in order with theirs."""

    shared: list[_Sums]
    keys: list[tuple[int, tuple[int, ...]]]
    nbytes: list[int]
    blocks: list[int]


class Placement:
    """Positions of all pieces.

    Args:
        stored: The tensors that are stored.
        bases: The offset at which the data of each file starts.
        block: Bytes under one checksum.
    """

    def __init__(self, stored: Stored, bases: Sequence[int], block: int) -> None:
        self._stored = stored
        self._bases = bases
        self._block = block
        kind_width = [-width(kind.dtype_name) for kind in stored.kinds]
        order = [(kind_width[kind], name, kind) for name, kind in stored.regular.items()]
        order += [(-width(tensor.dtype_name), name, -1) for name, tensor in stored.odd.items()]
        order.sort()
        self.names = [name for _, name, _ in order]
        """All tensors in the order in which they stand in files."""
        self._kind_of = np.array([kind for _, _, kind in order], np.int64)
        self._files: dict[int, _File] = {}
        self._sums: dict[tuple[int, bytes], _Sums] = {}

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Where each tensor stands in that order."""
        return {name: i for i, name in enumerate(self.names)}

    def locate(self, file: int, name: str, offset: tuple[int, ...]) -> tuple[int, int]:
        """Position of a piece in its file, and the number of its first checksum."""
        return self._locate(file, self.number[name], offset)

    def size(self, file: int) -> int:
        """Bytes of data in a file."""
        return self._sizes[file]

    def blocks(self, file: int) -> int:
        """Checksums of a file."""
        content = self._file(file)
        return sum(int(sums.blocks[-1]) for sums in content.shared) + content.blocks[-1]

    def holds_cells(self, file: int) -> bool:
        """Whether anything regular is in a file."""
        return file in self._cells

    def pieces(self, file: int) -> list[tuple[str, Box]]:
        """The regular pieces of a file in order."""
        found = []
        for layout, cell in self._cells.get(file, ()):
            boxes = self._cell_boxes(layout, cell)
            tensors = self._tensors(layout)
            for i, kind in zip(tensors.tolist(), self._kind_of[tensors].tolist(), strict=True):
                if kind in boxes:
                    found.append((i, boxes[kind]))
        return [(self.names[i], box) for i, box in sorted(found)]

    # --- by layout --------------------------------------------------------------------------------

    @cached_property
    def _by_layout(self) -> tuple[Ints, Ints]:
        """Tensors, those of one layout together, and where each layout's begin."""
        layouts = np.array([kind.layout for kind in self._stored.kinds] + [-1], np.int64)[self._kind_of]
        order = np.argsort(layouts, kind="stable")
        return order, np.searchsorted(layouts[order], np.arange(len(self._stored.layouts) + 1))

    def _tensors(self, layout: int) -> Ints:
        order, starts = self._by_layout
        return order[starts[layout] : starts[layout + 1]]

    @cached_property
    def _kinds_by_layout(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._stored.layouts]
        for number, kind in enumerate(self._stored.kinds):
            found[kind.layout].append(number)
        return found

    def _cell_bytes(self, layout: int, cells: Sequence[Cell]) -> Ints:
        """Bytes of cells of each of a layout's kinds."""
        kinds = [self._stored.kinds[i] for i in self._kinds_by_layout[layout]]
        itemsize = np.array([DTYPES[kind.dtype_name].itemsize for kind in kinds], np.int64).reshape(-1, 1)
        return itemsize * cell_sizes([kind.shape for kind in kinds], [kind.chunk for kind in kinds], cells)

    @cached_property
    def _cells(self) -> dict[int, list[tuple[int, Cell]]]:
        """The cells of each file."""
        found: dict[int, list[tuple[int, Cell]]] = {}
        for number, layout in enumerate(self._stored.layouts):
            for cell, files in layout.items():
                for file in files:
                    found.setdefault(file, []).append((number, cell))
        return found

    @cached_property
    def _sizes(self) -> list[int]:
        sizes = [0] * len(self._stored.files)
        counts = np.bincount(self._kind_of[self._kind_of >= 0], minlength=len(self._stored.kinds))
        for number, layout in enumerate(self._stored.layouts):
            kinds, cells = self._kinds_by_layout[number], list(layout)
            step = max(1, _TABLE // max(1, len(kinds)))
            for first in range(0, len(cells), step):
                some = cells[first : first + step]
                totals = counts[kinds] @ self._cell_bytes(number, some)
                for cell, nbytes in zip(some, totals.tolist(), strict=True):
                    for file in layout[cell]:
                        sizes[file] += nbytes
        for tensor in self._stored.odd.values():
            itemsize = DTYPES[tensor.dtype_name].itemsize
            for odd in tensor.boxes:
                sizes[odd.file] += odd.box.numel * itemsize
        return sizes

    # --- by file ----------------------------------------------------------------------------------

    def _locate(self, file: int, i: int, offset: tuple[int, ...]) -> tuple[int, int]:
        content = self._file(file)
        own = bisect_left(content.keys, (i, offset))
        start, first = self._bases[file] + content.nbytes[own], content.blocks[own]
        for sums in content.shared:
            start += int(sums.nbytes[i])
            first += int(sums.blocks[i])
        return start, first

    def _file(self, file: int) -> _File:
        if file not in self._files:
            self._files[file] = self._read_file(file)
        return self._files[file]

    def _read_file(self, file: int) -> _File:
        shared: list[_Sums] = []
        own: list[tuple[int, tuple[int, ...], int]] = list(self._odd_by_file.get(file, ()))
        cells = self._cells.get(file, ())
        for layout, cell in cells:
            alone = sum(other == layout for other, _ in cells) == 1
            if alone and len(self._tensors(layout)) >= _SHARED:
                shared.append(self._shared(layout, cell))
            else:
                own += self._own(layout, cell)
        own.sort()
        nbytes, blocks = [0], [0]
        for _, _, size in own:
            nbytes.append(nbytes[-1] + size)
            blocks.append(blocks[-1] - (-size // self._block))
        return _File(shared, [(i, offset) for i, offset, _ in own], nbytes, blocks)

    def _shared(self, layout: int, cell: Cell) -> _Sums:
        sizes = self._cell_bytes(layout, [cell])[:, 0]
        key = (layout, sizes.tobytes())
        if key not in self._sums:
            by_kind = np.zeros(len(self._stored.kinds) + 1, np.int64)
            by_kind[self._kinds_by_layout[layout]] = sizes
            nbytes = by_kind[self._kind_of]
            self._sums[key] = _Sums(_sums(nbytes), _sums(-(-nbytes // self._block)))
        return self._sums[key]

    def _own(self, layout: int, cell: Cell) -> Iterator[tuple[int, tuple[int, ...], int]]:
        boxes, tensors = self._cell_boxes(layout, cell), self._tensors(layout)
        for i, kind in zip(tensors.tolist(), self._kind_of[tensors].tolist(), strict=True):
            if kind in boxes:
                itemsize = DTYPES[self._stored.kinds[kind].dtype_name].itemsize
                yield i, boxes[kind].offset, boxes[kind].numel * itemsize

    def _cell_boxes(self, layout: int, cell: Cell) -> dict[int, Box]:
        """The box of a cell in each kind that has it."""
        kinds = {i: self._stored.kinds[i] for i in self._kinds_by_layout[layout]}
        return {
            i: cell_box(kind.shape, kind.chunk, cell)
            for i, kind in kinds.items()
            if has_cell(kind.shape, kind.chunk, cell)
        }

    @cached_property
    def _odd_by_file(self) -> dict[int, list[tuple[int, tuple[int, ...], int]]]:
        found: dict[int, list[tuple[int, tuple[int, ...], int]]] = {}
        for name, tensor in self._stored.odd.items():
            itemsize = DTYPES[tensor.dtype_name].itemsize
            for odd in tensor.boxes:
                item = (self.number[name], odd.box.offset, odd.box.numel * itemsize)
                found.setdefault(odd.file, []).append(item)
        return found


def _sums(values: Ints) -> Ints:
    """What stands in front of each value, and the total."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums

"""Where every stored box lies in its file, by rule instead of by list.

The pieces of a file stand in a fixed order: tensors with wider numbers first, then by name, then by the
offset of the box. So a position is a sum of sizes, and sums are shared: all files that hold cells of the
same sizes of a layout's tensors have the same ones. Finding one piece costs no more for a thousand files
than for one. This module owns that rule for writers and readers alike. It imports neither torch nor touches
files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nnx.box import Box
from nnx.checkpoint.cells import Cell, Ints, cell_box, cell_sizes, has_cell
from nnx.checkpoint.dtypes import DTYPES, width

__all__ = ["Kind", "Layout", "OddBox", "OddTensor", "Placement", "Stored"]

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
        chunk: How they are cut.
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
        layouts: By number.
        kinds: By number.
        regular: For each regular tensor the number of its kind.
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
        stored: What is stored.
        bases: Where the data of each file starts.
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

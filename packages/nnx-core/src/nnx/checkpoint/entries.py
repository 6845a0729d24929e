"""One stored tensor: what it is, and the pieces that hold it.

A *piece* is one box of a tensor in one file. Where a tensor is cut regularly its pieces are not listed but
computed when somebody asks for them, so that a tensor in a thousand files costs no more than one in a
single file. This module owns both, whatever format they come from. It imports torch only when a dtype is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

from typing_extensions import override

from nnx.box import Box
from nnx.checkpoint.cells import Cell, Kind, Layout, Placement, cell_box, cells_overlapping, has_cell
from nnx.checkpoint.dtypes import DTYPES
from nnx.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["CellPieces", "Piece", "TensorEntry"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor in one file.

    Attributes:
        box: Where it lies in the logical tensor.
        file: Name of the file in the save directory.
        start: Position of its first byte in the file.
        nbytes: Its length.
        first_block: Number of its first checksum among those of the file, if there are any.
    """

    box: Box
    file: str
    start: int
    nbytes: int
    first_block: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor.

    Attributes:
        name: Its name, such as ``model.layers.0.weight``.
        shape: Its global shape.
        dtype_name: Its element type, as torch names it, without ``torch.``.
        pieces: What is stored of it. Several pieces may hold the same box, then with the same data.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    pieces: Sequence[Piece]

    @property
    def dtype(self) -> torch.dtype:
        """The element type as torch's object."""
        import torch

        found = getattr(torch, self.dtype_name)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"unknown element type {self.dtype_name!r} of tensor '{self.name}'.")
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype_name].itemsize

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without copies."""
        return self.numel * self.itemsize

    @cached_property
    def copies(self) -> Mapping[Box, tuple[Piece, ...]]:
        """The stored pieces of each distinct box."""
        grouped: dict[Box, list[Piece]] = {}
        for piece in self.pieces:
            grouped.setdefault(piece.box, []).append(piece)
        return {box: tuple(pieces) for box, pieces in grouped.items()}

    def overlapping(self, box: Box) -> Iterator[tuple[Box, Sequence[Piece]]]:
        """The distinct stored boxes that share elements with a box, and the pieces that hold each."""
        if isinstance(self.pieces, CellPieces):
            yield from self.pieces.overlapping(box)
            return
        for stored, pieces in self.copies.items():
            if stored.intersection(box) is not None:
                yield stored, pieces


class CellPieces(Sequence[Piece]):
    """The pieces of a regularly cut tensor, in row-major order of their cells.

    Args:
        name: The tensor.
        kind: How it is cut.
        layout: Which files hold which cells.
        files: Names of the files.
        placement: Where pieces lie.
    """

    def __init__(
        self, name: str, kind: Kind, layout: Layout, files: Sequence[str], placement: Placement
    ) -> None:
        self._name = name
        self._kind = kind
        self._layout = layout
        self._files = files
        self._placement = placement

    @cached_property
    def _all(self) -> list[tuple[Cell, int]]:
        kind = self._kind
        return [
            (cell, file)
            for cell, files in sorted(self._layout.items())
            if has_cell(kind.shape, kind.chunk, cell)
            for file in files
        ]

    @override
    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    @override
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        cell, file = self._all[index]
        return self._piece(cell_box(self._kind.shape, self._kind.chunk, cell), file)

    def overlapping(self, box: Box) -> Iterator[tuple[Box, Sequence[Piece]]]:
        """The boxes that share elements with a box, and the pieces that hold each."""
        kind = self._kind
        for cell in cells_overlapping(kind.shape, kind.chunk, box):
            stored = cell_box(kind.shape, kind.chunk, cell)
            yield stored, [self._piece(stored, file) for file in self._layout[cell]]

    def _piece(self, box: Box, file: int) -> Piece:
        start, first = self._placement.locate(file, self._name, box.offset)
        nbytes = box.numel * DTYPES[self._kind.dtype_name].itemsize
        return Piece(box, self._files[file], start, nbytes, first)

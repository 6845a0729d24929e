"""The index: which logical tensors a checkpoint holds and where their bytes are.

It says so in the shortest way: what thousands of tensors have in common is written once, as a kind, and which
files hold which cells once for all of them, as a layout. Reading it makes no list of pieces. It is plain JSON
and can be rebuilt from the headers of the rank files. This module owns a tensor's entry, whatever format it
comes from, the index's text form, and the check of everything a reader relies on: pieces lie inside their
files, do not collide there, and cut each tensor without gap or overlap. It never touches the file system and
never imports torch unless a dtype is asked for.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from typing_extensions import override

from nnx_checkpoint.box import Box, find_fault
from nnx_checkpoint.cells import (
    Cell,
    Kind,
    Layout,
    OddBox,
    OddTensor,
    Placement,
    Stored,
    cell_box,
    cells_overlapping,
    find_fault_of_grid,
    grid,
    has_cell,
    table,
    trimmed,
)
from nnx_checkpoint.dtypes import DTYPES
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.manifest import KINDS, Manifest, load_json

if TYPE_CHECKING:
    import torch

__all__ = ["INDEX", "Index", "Piece", "TensorEntry", "decode_index", "encode_index", "required"]


# --- one tensor -----------------------------------------------------------------------------------
# A *piece* is one box of a tensor in one file. Where a tensor is cut regularly its pieces are not listed
# but computed when somebody asks for them, so that a tensor in a thousand files costs no more than one in a
# single file.


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor in one file.

    Attributes:
        box: The box of it in the logical tensor.
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
        kind: The kind, which says how it is cut.
        layout: Says which files hold which cells.
        files: Names of the files.
        placement: Finds the offsets of pieces.
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


# --- all tensors ----------------------------------------------------------------------------------


INDEX = "index.json"
_MOST_ELEMENTS = 1 << 58
"""Sums of bytes stay exact below this; no checkpoint comes near it."""
_MOST_PAIRS = 1 << 25
"""Kinds times cells: work that an index of little more than their sum in bytes could ask for."""
_MOST_DIMS = 64
"""torch has no tensors of more."""


class Index:
    """All tensors of a checkpoint.

    Args:
        stored: The tensors that are stored.
        placement: Finds the offsets of its pieces.
        odd: The pieces of every tensor that is not regular.
        aliases: Names of tied tensors, mapped to the name under which the data is stored.
    """

    def __init__(
        self,
        stored: Stored,
        placement: Placement,
        odd: Mapping[str, Sequence[Piece]],
        aliases: Mapping[str, str],
    ) -> None:
        self.aliases = aliases
        self._stored = stored
        self._placement = placement
        self._odd = odd
        self._number = {file: i for i, file in enumerate(stored.files)}

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """All tensors by name."""
        return _Tensors(self)

    def block_count(self, file: str) -> int:
        """How many checksums a file has."""
        return self._placement.blocks(self._number[file]) if file in self._number else 0

    def pieces_of(self, file: str) -> Sequence[tuple[Piece, TensorEntry]]:
        """The pieces of a file in order of position, which is also the order of their checksums."""
        number = self._number.get(file, -1)
        found = [(piece, self.tensors[name]) for name, piece in self._odd_by_file.get(file, ())]
        kinds, regular = self._stored.kinds, self._stored.regular
        for name, box in self._placement.pieces(number):
            start, first = self._placement.locate(number, name, box.offset)
            nbytes = box.numel * DTYPES[kinds[regular[name]].dtype_name].itemsize
            found.append((Piece(box, file, start, nbytes, first), self.tensors[name]))
        return sorted(found, key=lambda pair: (pair[0].start, pair[0].nbytes))

    @cached_property
    def _odd_by_file(self) -> Mapping[str, list[tuple[str, Piece]]]:
        found: dict[str, list[tuple[str, Piece]]] = {}
        for name, pieces in self._odd.items():
            for piece in pieces:
                found.setdefault(piece.file, []).append((name, piece))
        return found

    def entry(self, name: str) -> TensorEntry:
        """The entry of a stored tensor."""
        stored = self._stored
        number = stored.regular.get(name)
        if number is None:
            tensor = stored.odd[name]
            return TensorEntry(name, tensor.shape, tensor.dtype_name, self._odd[name])
        kind = stored.kinds[number]
        pieces = CellPieces(name, kind, stored.layouts[kind.layout], stored.files, self._placement)
        return TensorEntry(name, kind.shape, kind.dtype_name, pieces)

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""
        return [*self._stored.regular, *self._stored.odd]

    def holds(self, name: object) -> bool:
        """Whether a tensor of this name is stored."""
        return name in self._stored.regular or name in self._stored.odd


class _Tensors(Mapping[str, TensorEntry]):
    """Entries by name, in alphabetical order, made when they are asked for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._names = sorted(index.names)

    @override
    def __getitem__(self, name: str) -> TensorEntry:
        return self._index.entry(name)

    @override
    def __contains__(self, name: object) -> bool:
        return self._index.holds(name)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


# --- writing --------------------------------------------------------------------------------------


def encode_index(stored: Stored, bases: Sequence[int], block: int, aliases: Mapping[str, str]) -> bytes:
    """The bytes of ``index.json``.

    Args:
        stored: The tensors that are stored; positions of odd boxes are found here.
        bases: The offset at which the data of each file starts.
        block: Bytes under one checksum.
        aliases: Tied names.

    Raises:
        CheckpointError: No reader would take it.
    """
    if _pairs(stored) > _MOST_PAIRS:
        raise CheckpointError(
            f"the kinds of tensors have more than {_MOST_PAIRS:,} cells together, which nothing would read.",
            remedy="Cut tensors of fewer different shapes, or over fewer ranks.",
        )
    placement = Placement(stored, bases, block)
    tensors: dict[str, Any] = dict(stored.regular)
    for name, tensor in stored.odd.items():
        tensors[name] = {
            "dtype": tensor.dtype_name,
            "shape": tensor.shape,
            "pieces": [
                [odd.box.offset, odd.box.size, odd.file, placement.locate(odd.file, name, odd.box.offset)[0]]
                for odd in tensor.boxes
            ],
        }
    body: dict[str, Any] = {"files": stored.files, "aliases": dict(aliases)}
    if stored.kinds:
        body["layouts"] = [list(layout.items()) for layout in stored.layouts]
        body["kinds"] = [
            {"dtype": kind.dtype_name, "shape": kind.shape, "chunk": kind.chunk, "layout": kind.layout}
            for kind in stored.kinds
        ]
    body["tensors"] = tensors
    return (json.dumps(body, separators=(",", ":")) + "\n").encode()


def _pairs(stored: Stored) -> int:
    return sum(len(stored.layouts[kind.layout]) for kind in stored.kinds)


def required(stored: Stored) -> tuple[str, ...]:
    """What a reader of an index must know."""
    return (KINDS,) if stored.kinds else ()


# --- reading --------------------------------------------------------------------------------------


def decode_index(raw: bytes, manifest: Manifest, *, source: str) -> Index:
    """Parse ``index.json``, whose digest was checked before, and check every claim it makes.

    Args:
        raw: Its bytes.
        manifest: Lists the files, their lengths and where their data starts.
        source: Its path, for messages.

    Raises:
        CheckpointError: Something in it cannot be true.
    """
    try:
        body = load_json(raw)
        stored = _stored(body)
        aliases = {str(a): str(b) for a, b in body["aliases"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise _inconsistent(source, f"malformed entry ({error!r})") from error
    _check_cover(stored, source)
    for file in stored.files:
        if file not in manifest.files or f"{file.rsplit('.', 1)[0]}.sums" not in manifest.files:
            raise _inconsistent(source, f"'{file}' or its checksums are not in the manifest")
    bases = [manifest.files[file].digested for file in stored.files]
    placement = Placement(stored, bases, manifest.block)
    odd = _place_odd(stored, placement, bases, manifest.block, source)
    for number, file in enumerate(stored.files):
        stop, size = bases[number] + placement.size(number), manifest.files[file].size
        if stop != size:
            raise _inconsistent(source, f"the pieces of '{file}' end at {stop} of {size} bytes")
    index = Index(stored, placement, odd, aliases)
    for alias, target in aliases.items():
        if not index.holds(target) or index.holds(alias):
            raise _inconsistent(source, f"alias '{alias}' of '{target}'")
    return index


def _stored(body: Mapping[str, Any]) -> Stored:
    files = [str(name) for name in body["files"]]
    layouts = [_layout(layout, len(files)) for layout in body.get("layouts", ())]
    kinds = [_kind(kind, len(layouts)) for kind in body.get("kinds", ())]
    regular: dict[str, int] = {}
    odd: dict[str, OddTensor] = {}
    for name, value in body["tensors"].items():
        if type(value) is int:
            regular[name] = value
        else:
            odd[name] = _odd_tensor(name, value, len(files))
    if regular and not 0 <= min(regular.values()) <= max(regular.values()) < len(kinds):
        raise ValueError("number of a kind")
    counts = Counter(regular.values())
    if sum(math.prod(kinds[i].shape) * count for i, count in counts.items()) > _MOST_ELEMENTS:
        raise ValueError("too many elements")
    return Stored(files, layouts, kinds, regular, odd)


def _layout(items: Sequence[Any], files: int) -> Layout:
    layout: dict[Cell, tuple[int, ...]] = {}
    for at, numbers in items:
        cell = _sizes(at)
        if cell in layout or trimmed(cell) != cell or any(i > _MOST_ELEMENTS for i in cell):
            raise ValueError(f"cell {at!r}")
        if not numbers or not all(type(number) is int and 0 <= number < files for number in numbers):
            raise ValueError(f"files of cell {at!r}")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"files of cell {at!r}")
        layout[cell] = tuple(numbers)
    return layout


def _kind(value: Mapping[str, Any], layouts: int) -> Kind:
    kind = Kind(value["dtype"], _sizes(value["shape"]), _sizes(value["chunk"]), value["layout"])
    if any(step > max(full, 1) for step, full in zip(kind.chunk, kind.shape, strict=True)):
        raise ValueError(f"chunk of kind {value!r}")
    if kind.dtype_name not in DTYPES or type(kind.layout) is not int or not 0 <= kind.layout < layouts:
        raise ValueError(f"kind {value!r}")
    return kind


def _odd_tensor(name: str, value: Mapping[str, Any], files: int) -> OddTensor:
    boxes = []
    for offset, size, number, start in value["pieces"]:
        if type(number) is not int or type(start) is not int or not 0 <= number < files or start < 0:
            raise ValueError(f"piece of {name!r}")
        boxes.append(OddBox(Box(_sizes(offset), _sizes(size)), number, start))
    if value["dtype"] not in DTYPES:
        raise ValueError(f"element type of {name!r}")
    return OddTensor(value["dtype"], _sizes(value["shape"]), tuple(boxes))


def _sizes(values: list[int]) -> tuple[int, ...]:
    if len(values) > _MOST_DIMS or any(
        type(value) is not int or not 0 <= value <= _MOST_ELEMENTS for value in values
    ):
        raise ValueError("not extents")
    return tuple(values)


def _check_cover(stored: Stored, source: str) -> None:
    """Every tensor must be cut without gap or overlap; for regular ones it is enough that no cell lacks."""
    names = {number: name for name, number in stored.regular.items()}
    if _pairs(stored) > _MOST_PAIRS:
        raise _inconsistent(source, f"its kinds have more than {_MOST_PAIRS:,} cells together")
    tables = [table(layout) for layout in stored.layouts]
    checked = set()
    for number, kind in enumerate(stored.kinds):
        if 0 in kind.chunk:
            raise _inconsistent(source, f"kind {number} has chunk {kind.chunk}")
        what = (kind.layout, grid(kind.shape, kind.chunk))
        if what in checked:
            continue
        fault = find_fault_of_grid(kind.shape, kind.chunk, tables[kind.layout])
        if fault:
            raise _inconsistent(source, f"tensor '{names.get(number, f'of kind {number}')}': {fault}")
        checked.add(what)
    for name, tensor in stored.odd.items():
        fault = find_fault(tensor.shape, {odd.box for odd in tensor.boxes})
        if fault:
            raise _inconsistent(source, f"tensor '{name}': {fault}")


def _place_odd(
    stored: Stored, placement: Placement, bases: Sequence[int], block: int, source: str
) -> dict[str, tuple[Piece, ...]]:
    """The listed pieces. Where a file holds nothing else, they alone say in which order they stand."""
    found: dict[str, list[Piece]] = {name: [] for name in stored.odd}
    loose: dict[int, list[tuple[int, int, str, Box]]] = {}
    for name, tensor in stored.odd.items():
        itemsize = DTYPES[tensor.dtype_name].itemsize
        for odd in tensor.boxes:
            nbytes = odd.box.numel * itemsize
            if not placement.holds_cells(odd.file):
                loose.setdefault(odd.file, []).append((odd.start, nbytes, name, odd.box))
                continue
            file = stored.files[odd.file]
            start, first = placement.locate(odd.file, name, odd.box.offset)
            _check_start(file, odd.start, start, source)
            found[name].append(Piece(odd.box, file, start, nbytes, first))
    for number, items in loose.items():
        position, first = bases[number], 0
        for start, nbytes, name, box in sorted(items, key=lambda item: item[:2]):
            _check_start(stored.files[number], start, position, source)
            found[name].append(Piece(box, stored.files[number], start, nbytes, first))
            position += nbytes
            first -= -nbytes // block
    return {name: tuple(pieces) for name, pieces in found.items()}


def _check_start(file: str, claimed: int, position: int, source: str) -> None:
    if claimed != position:
        raise _inconsistent(source, f"a piece in '{file}' starts at {claimed}, not at {position}")


def _inconsistent(source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{source}' contradicts itself: {why}.",
        remedy="Resume from another checkpoint; this one was not written by a working nnx.",
    )

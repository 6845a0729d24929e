"""Define the index: the logical tensors of a checkpoint, their boxes, and the files of each box.

Tensors of one dtype and shape whose boxes are in the same files form one *group*, which is written once for
any number of tensors. A group whose boxes form a regular grid is a few numbers. The position of a box in its
file is not in the index but in the header of the file (`nnx_checkpoint.format.rankfile`), which is read on
demand. This module owns the entry of a tensor (for every format), the text form of the index, and the checks
that readers rely on: boxes partition each tensor, and files are exactly as long as their content. It never
touches the file system, and imports torch only to return a dtype.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from nnx_base.box import (
    Box,
    box_of_grid,
    boxes_of_grid,
    find_fault,
    grid_of,
    numels_of_grid,
    overlapping_of_grid,
)
from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.manifest import Manifest, load_json
from nnx_checkpoint.format.rankfile_header import DTYPES, Entry, Offsets, find_offsets

if TYPE_CHECKING:
    import torch

__all__ = ["INDEX", "Group", "Index", "Piece", "TensorEntry", "decode_index", "encode_index"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor in one file.

    Attributes:
        box: The box in the logical tensor.
        file: Name of the file in the save directory.
        start: Position of its first byte in the file.
        nbytes: Its length in bytes.
        first_block: Number of its first checksum among those of the file, if the format has any.
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
        dtype_name: torch's name of its element type, without ``torch.``.
        pieces: Its stored pieces. Pieces of the same box hold the same data.
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
        """Number of elements of the unsharded tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensor, without copies."""
        return self.numel * self.itemsize

    @property
    def boxes(self) -> Sequence[Box]:
        """The distinct stored boxes."""
        if isinstance(self.pieces, GroupPieces):
            return self.pieces.group.boxes
        return list(self.copies)

    @cached_property
    def copies(self) -> Mapping[Box, tuple[Piece, ...]]:
        """The stored pieces of each distinct box."""
        grouped: dict[Box, list[Piece]] = {}
        for piece in self.pieces:
            grouped.setdefault(piece.box, []).append(piece)
        return {box: tuple(pieces) for box, pieces in grouped.items()}

    def overlapping(self, box: Box, prefer: str = "") -> Iterator[Piece]:
        """Yield one piece for each distinct stored box that shares elements with a box.

        Args:
            box: A box of the tensor.
            prefer: The preferred file if several hold the same box.
        """
        if isinstance(self.pieces, GroupPieces):
            yield from self.pieces.overlapping(box, prefer)
            return
        for stored, pieces in self.copies.items():
            if stored.intersection(box) is not None:
                yield next((piece for piece in pieces if piece.file == prefer), pieces[0])


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors of one dtype and shape with boxes in the same files.

    Attributes:
        dtype_name: Their element type.
        shape: Their shape.
        owners: The numbers of the files that hold each box, in order of offset; in the plan of a save, the
            numbers of the ranks.
        grid: The extents of a box, if the boxes form a regular grid like that of `torch.chunk`; else None.
        listed: The boxes in order of offset, if they form no grid.
    """

    dtype_name: str
    shape: tuple[int, ...]
    owners: Sequence[Sequence[int]]
    grid: tuple[int, ...] | None = None
    listed: Sequence[Box] = ()

    @classmethod
    def of(
        cls, dtype_name: str, shape: tuple[int, ...], boxes: Mapping[Box, Sequence[int]], what: str
    ) -> Group:
        """Make a group from its boxes and their owners.

        Args:
            dtype_name: The element type of its tensors.
            shape: Their shape.
            boxes: The owners of each box.
            what: The name of one of its tensors, for messages.

        Raises:
            CheckpointError: The boxes do not partition a tensor of this shape.
        """
        ordered = sorted(boxes, key=attrgetter("offset", "size"))
        owners = [tuple(boxes[box]) for box in ordered]
        grid = grid_of(shape, ordered)
        if grid is not None:
            return cls(dtype_name, shape, owners, grid)
        fault = find_fault(shape, ordered)
        if fault:
            raise CheckpointError(
                f"the shards of tensor '{what}' do not make up its shape {shape}: {fault}.",
                remedy="This is a bug of the strategy; please report it.",
            )
        return cls(dtype_name, shape, owners, listed=tuple(ordered))

    @cached_property
    def boxes(self) -> Sequence[Box]:
        """The distinct boxes, in order of offset."""
        return self.listed if self.grid is None else boxes_of_grid(self.shape, self.grid)

    @cached_property
    def nbytes(self) -> Sequence[int]:
        """Bytes of each box."""
        if self.grid is None:
            sizes = [box.numel for box in self.listed]
        else:
            sizes = numels_of_grid(self.shape, self.grid)
        itemsize = DTYPES[self.dtype_name].itemsize
        return [size * itemsize for size in sizes]

    def box(self, number: int) -> Box:
        """Return the box with this number."""
        return self.listed[number] if self.grid is None else box_of_grid(self.shape, self.grid, number)

    def overlapping(self, box: Box) -> Sequence[int]:
        """Return the numbers of the boxes that share elements with a box."""
        if self.grid is not None:
            return overlapping_of_grid(self.shape, self.grid, box)
        return [number for number, own in enumerate(self.listed) if own.intersection(box) is not None]


class GroupPieces(Sequence[Piece]):
    """The pieces of one tensor of a group, each with its position looked up on access.

    Args:
        name: The name of the tensor.
        group: The group of the tensor.
        index: The index, with the positions of entries in each file.
    """

    def __init__(self, name: str, group: Group, index: Index) -> None:
        self.group = group
        self._name = name
        self._index = index

    @cached_property
    def _all(self) -> list[tuple[int, int]]:
        return [(box, file) for box, files in enumerate(self.group.owners) for file in files]

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
        return self._index.locate(self._name, *self._all[index])

    def overlapping(self, box: Box, prefer: str) -> Iterator[Piece]:
        """Yield one piece for each box that shares elements with a box."""
        files = self._index.files
        for number in self.group.overlapping(box):
            owners = self.group.owners[number]
            file = next((i for i in owners if files[i] == prefer), owners[0])
            yield self._index.locate(self._name, number, file)


INDEX = "index.json"
_MOST_ELEMENTS = 1 << 58
"""Largest sum of bytes: sums below it are exact, and no checkpoint comes near it."""
_MOST_BOXES = 1 << 23
"""Largest number of boxes of all groups: a short malicious index could claim any number."""
_MOST_DIMS = 64
"""The largest number of dims that torch supports."""


def _no_headers(file: str) -> Offsets:
    raise CheckpointError(f"the header of '{file}' was not read.")


@dataclass(frozen=True, eq=False)
class Index:
    """All tensors of a checkpoint.

    Attributes:
        files: Names of the files, by number.
        groups: The groups by number.
        numbers: The number of the group of each tensor.
        aliases: Names of tied tensors, mapped to the name under which the data is stored.
        offsets: Function from a file to the positions of its entries; called when data is read.
    """

    files: Sequence[str]
    groups: Sequence[Group]
    numbers: Mapping[str, int]
    aliases: Mapping[str, str] = field(default_factory=dict)
    offsets: Callable[[str], Offsets] = _no_headers
    _known: dict[int, Mapping[int, Sequence[int]]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """All tensors by name."""
        return _Tensors(self)

    @cached_property
    def _place(self) -> Mapping[str, int]:
        """The position of each tensor among the names."""
        return {name: i for i, name in enumerate(self.numbers)}

    @cached_property
    def _file_number(self) -> Mapping[str, int]:
        return {file: i for i, file in enumerate(self.files)}

    @cached_property
    def _members(self) -> Sequence[Sequence[str]]:
        """The tensors of each group."""
        found: list[list[str]] = [[] for _ in self.groups]
        for name, number in self.numbers.items():
            found[number].append(name)
        return found

    @cached_property
    def _held(self) -> npt.NDArray[np.int64]:
        """File, group and box of every stored entry, in order of files."""
        rows = [
            (file, number, box)
            for number, group in enumerate(self.groups)
            for box, files in enumerate(group.owners)
            for file in files
        ]
        table = np.array(rows, np.int64).reshape(-1, 3)
        return table[np.argsort(table[:, 0], kind="stable")]

    def _held_by(self, file: int) -> Mapping[int, Sequence[int]]:
        """Return the groups with boxes in a file, each with the numbers of these boxes."""
        if file not in self._known:
            first, last = np.searchsorted(self._held[:, 0], (file, file + 1))
            found: dict[int, list[int]] = {}
            for _, number, box in self._held[first:last].tolist():
                found.setdefault(number, []).append(box)
            self._known[file] = found
        return self._known[file]

    def entries_of(self, file: str) -> tuple[list[Entry], list[int]]:
        """Return the entries of a file, and for each the position of its tensor among the names."""
        at = self._file_number.get(file)
        entries: list[Entry] = []
        places: list[int] = []
        for number, boxes in (self._held_by(at) if at is not None else {}).items():
            group, members = self.groups[number], self._members[number]
            for box in boxes:
                entries += [Entry(name, group.shape, group.dtype_name, group.box(box)) for name in members]
                places += [self._place[name] for name in members]
        return entries, places

    def locate(self, name: str, box: int, file: int) -> Piece:
        """Return the piece of a file that holds a box of a tensor.

        Args:
            name: The tensor.
            box: The number of the box in the tensor's group.
            file: The number of the file.

        Raises:
            CheckpointError: The header of the file is damaged, or contradicts the index.
        """
        number = self.numbers[name]
        group, held = self.groups[number], self._held_by(file)[number]
        start, block = self.offsets(self.files[file]).find(self._place[name], held.index(box))
        found = group.box(box)
        nbytes = found.numel * DTYPES[group.dtype_name].itemsize
        return Piece(found, self.files[file], start, nbytes, block)

    def pieces_of(self, file: str) -> list[tuple[str, Piece]]:
        """Return the pieces of a file with the names of their tensors, in order of position and of checksums.

        Raises:
            CheckpointError: The header of the file is damaged, or contradicts the index.
        """
        entries, places = self.entries_of(file)
        if not entries:
            return []
        rows = self.offsets(file).rows(places)
        found = [
            (entry.name, Piece(entry.box, file, start, entry.nbytes, block))
            for entry, (start, block) in zip(entries, rows, strict=True)
        ]
        return sorted(found, key=lambda pair: (pair[1].start, pair[1].nbytes))

    def read_offsets(self, file: str, header: bytes, block: int) -> Offsets:
        """Return the positions of a file's entries from its header.

        Args:
            file: The name of the file.
            header: The bytes of the file before the data.
            block: Bytes under one checksum.

        Raises:
            CheckpointError: The entries of the header and of the index differ.
        """
        return find_offsets(header, *self.entries_of(file), block=block, source=file)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a stored tensor."""
        group = self.groups[self.numbers[name]]
        return TensorEntry(name, group.shape, group.dtype_name, GroupPieces(name, group, self))


class _Tensors(Mapping[str, TensorEntry]):
    """Entries by name, in alphabetical order, made on access."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._names = sorted(index.numbers)

    @override
    def __getitem__(self, name: str) -> TensorEntry:
        return self._index.entry(name)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._index.numbers

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


def index_of(tensors: Mapping[str, tuple[str, tuple[int, ...], Mapping[Box, Sequence[str]]]]) -> Index:
    """Return the index of tensors that are listed one by one.

    Args:
        tensors: The dtype and shape of each tensor, and the names of the files that hold each of its boxes.

    Raises:
        CheckpointError: The boxes of a tensor do not partition it.
    """
    files = sorted({file for _, _, boxes in tensors.values() for held in boxes.values() for file in held})
    place = {file: i for i, file in enumerate(files)}
    groups: list[Group] = []
    known: dict[Any, int] = {}
    numbers: dict[str, int] = {}
    for name, (dtype_name, shape, boxes) in sorted(tensors.items()):
        owners = {box: tuple(place[file] for file in held) for box, held in boxes.items()}
        numbers[name] = known.setdefault((dtype_name, shape, frozenset(owners.items())), len(groups))
        if numbers[name] == len(groups):
            groups.append(Group.of(dtype_name, shape, owners, name))
    return Index(files, groups, numbers)


def encode_index(index: Index) -> bytes:
    """Return the bytes of ``index.json``.

    Raises:
        CheckpointError: The index exceeds the limits of readers.
    """
    if sum(len(group.owners) for group in index.groups) > _MOST_BOXES:
        raise CheckpointError(
            f"the groups of tensors have more than {_MOST_BOXES:,} boxes, the limit of readers.",
            remedy="Shard tensors of fewer different shapes, or over fewer ranks.",
        )
    owners: dict[tuple[int | tuple[int, ...], ...], int] = {}
    groups: list[dict[str, Any]] = []
    for group in index.groups:
        held = tuple(files[0] if len(files) == 1 else tuple(files) for files in group.owners)
        body: dict[str, Any] = {"dtype": group.dtype_name, "shape": group.shape}
        if group.grid is None:
            body["boxes"] = [(box.offset, box.size) for box in group.listed]
        else:
            body["grid"] = group.grid
        groups.append(body | {"owners": owners.setdefault(held, len(owners))})
    whole = {
        "files": list(index.files),
        "aliases": dict(index.aliases),
        "owners": list(owners),
        "groups": groups,
        "tensors": dict(index.numbers),
    }
    return (json.dumps(whole, separators=(",", ":")) + "\n").encode()


def decode_index(
    raw: bytes, manifest: Manifest, *, source: str, offsets: Callable[[str], Offsets] = _no_headers
) -> Index:
    """Parse ``index.json`` after its digest was checked, and check every claim in it.

    Args:
        raw: The bytes of the index.
        manifest: The manifest, with the files, their lengths and the lengths of their headers.
        source: The path of the index, for messages.
        offsets: Function from a file to the positions of its entries; called when data is read.

    Raises:
        CheckpointError: A claim of the index is impossible.
    """
    try:
        body = load_json(raw)
        files = [str(name) for name in body["files"]]
        owners = [_owners(value, len(files)) for value in body["owners"]]
        groups = _groups(body["groups"], owners)
        aliases = {str(a): str(b) for a, b in body["aliases"].items()}
        index = Index(files, groups, _numbers(body["tensors"], groups), aliases, offsets)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise _inconsistent(source, f"malformed entry ({error!r})") from error
    _check_cover(index, source)
    _check_lengths(index, manifest, source)
    for alias, target in aliases.items():
        if target not in index.numbers or alias in index.numbers:
            raise _inconsistent(source, f"alias '{alias}' of '{target}'")
    return index


def _owners(value: Sequence[Any], files: int) -> list[Sequence[int]]:
    found: list[Sequence[int]] = []
    for held in value:
        numbers = (held,) if type(held) is int else tuple(held)
        if not numbers or not all(type(number) is int and 0 <= number < files for number in numbers):
            raise ValueError(f"owners {held!r}")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"owners {held!r}")
        found.append(numbers)
    return found


def _groups(values: Sequence[Mapping[str, Any]], owners: Sequence[Sequence[Sequence[int]]]) -> list[Group]:
    groups, boxes = [], 0
    for value in values:
        group = _group(value, owners)
        boxes += len(group.owners)
        if boxes > _MOST_BOXES:
            raise ValueError(f"more than {_MOST_BOXES:,} boxes")
        groups.append(group)
    return groups


def _group(value: Mapping[str, Any], owners: Sequence[Sequence[Sequence[int]]]) -> Group:
    dtype, shape, number = value["dtype"], _extents(value["shape"]), value["owners"]
    if dtype not in DTYPES or type(number) is not int or number < 0:
        raise ValueError(f"group {value!r}")
    held = owners[number]
    if "grid" not in value:
        listed = tuple(Box(_extents(offset), _extents(size)) for offset, size in value["boxes"])
        if len(listed) != len(held):
            raise ValueError(f"{len(listed)} boxes with {len(held)} owners")
        return Group(dtype, shape, held, listed=listed)
    grid = _extents(value["grid"])
    count = 1
    for full, step in zip(shape, grid, strict=True):
        if not 0 < step <= full:
            raise ValueError(f"grid {grid} of shape {shape}")
        count *= -(-full // step)
    if count != len(held):
        raise ValueError(f"{count} boxes with {len(held)} owners")
    return Group(dtype, shape, held, grid)


def _extents(values: list[int]) -> tuple[int, ...]:
    if len(values) > _MOST_DIMS or any(
        type(value) is not int or not 0 <= value <= _MOST_ELEMENTS for value in values
    ):
        raise ValueError("not extents")
    return tuple(values)


def _numbers(values: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, int]:
    numbers = dict(values)
    if not all(type(number) is int and 0 <= number < len(groups) for number in numbers.values()):
        raise ValueError("number of a group")
    counts = Counter(numbers.values())
    if sum(math.prod(groups[i].shape) * count for i, count in counts.items()) > _MOST_ELEMENTS:
        raise ValueError("too many elements")
    return numbers


def _check_cover(index: Index, source: str) -> None:
    """Refuse an index whose boxes do not partition a tensor (a grid always does)."""
    names = {number: name for name, number in index.numbers.items()}
    for number, group in enumerate(index.groups):
        fault = "" if group.grid is not None else find_fault(group.shape, group.listed)
        if fault:
            raise _inconsistent(source, f"tensor '{names.get(number, f'of group {number}')}': {fault}")


def _check_lengths(index: Index, manifest: Manifest, source: str) -> None:
    """Refuse an index unless every file is exactly as long as its header and entries."""
    counts = Counter(index.numbers.values())
    totals = [0] * len(index.files)
    for number, group in enumerate(index.groups):
        for files, nbytes in zip(group.owners, group.nbytes, strict=True):
            for file in files:
                totals[file] += nbytes * counts[number]
    for name, total in zip(index.files, totals, strict=True):
        if name not in manifest.files or f"{name.rsplit('.', 1)[0]}.sums" not in manifest.files:
            raise _inconsistent(source, f"'{name}' or its checksums are not in the manifest")
        stop, size = manifest.files[name].digested + total, manifest.files[name].size
        if stop != size:
            raise _inconsistent(source, f"the entries of '{name}' end at {stop} of {size} bytes")


def _inconsistent(source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{source}' contradicts itself: {why}.",
        remedy="Resume from another checkpoint; this one was not written by a working nnx.",
    )

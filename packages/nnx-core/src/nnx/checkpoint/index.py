"""The index: which logical tensors a checkpoint holds and where their bytes are.

A *piece* is one box of a tensor in one file. The index is plain JSON and can be rebuilt from the headers
of the rank files. This module owns its text form and checks everything a reader relies on: pieces
lie inside their files, do not collide there, and cut each tensor without gap or overlap.
It never touches the file system and never imports torch unless a dtype is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nnx.box import Box, find_fault
from nnx.checkpoint.dtypes import DTYPES
from nnx.checkpoint.manifest import Manifest
from nnx.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["INDEX", "Index", "Piece", "TensorEntry", "decode_index", "encode_index"]

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor in one file.

    Attributes:
        box: Where it lies in the logical tensor.
        file: Name of the file in the save directory.
        start: Position of its first byte in the file.
        nbytes: Its length.
    """

    box: Box
    file: str
    start: int
    nbytes: int


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
    pieces: tuple[Piece, ...]

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


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint.

    Attributes:
        tensors: By name.
        aliases: Names of tied tensors, mapped to the name under which the data is stored.
    """

    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]

    @cached_property
    def pieces_by_file(self) -> Mapping[str, tuple[tuple[Piece, TensorEntry], ...]]:
        """The pieces of each file in order of position, which is also the order of their checksums."""
        grouped: dict[str, list[tuple[Piece, TensorEntry]]] = {}
        for entry in self.tensors.values():
            for piece in entry.pieces:
                grouped.setdefault(piece.file, []).append((piece, entry))
        return {
            file: tuple(sorted(pieces, key=lambda pair: (pair[0].start, pair[0].nbytes)))
            for file, pieces in grouped.items()
        }

    def first_blocks(self, file: str, block: int) -> dict[int, int]:
        """For each position at which a piece of this file starts, the number of its first checksum."""
        count, first = 0, {}
        for piece, _ in self.pieces_by_file.get(file, ()):
            if piece.nbytes:
                first[piece.start] = count
                count += -(-piece.nbytes // block)
        return first

    def block_count(self, file: str, block: int) -> int:
        """How many checksums this file has."""
        return sum(-(-piece.nbytes // block) for piece, _ in self.pieces_by_file.get(file, ()))


def encode_index(tensors: Iterable[TensorEntry], aliases: Mapping[str, str]) -> bytes:
    """The bytes of ``index.json``."""
    entries = list(tensors)
    files = sorted({piece.file for entry in entries for piece in entry.pieces})
    number = {file: i for i, file in enumerate(files)}
    body = {
        "files": files,
        "aliases": dict(aliases),
        "tensors": {
            entry.name: {
                "dtype": entry.dtype_name,
                "shape": entry.shape,
                "pieces": [[p.box.offset, p.box.size, number[p.file], p.start] for p in entry.pieces],
            }
            for entry in entries
        },
    }
    return (json.dumps(body, separators=(",", ":")) + "\n").encode()


def decode_index(raw: bytes, manifest: Manifest, *, source: str) -> Index:
    """Parse ``index.json``, whose digest was checked before, and check every claim it makes.

    Args:
        raw: Its bytes.
        manifest: Which files there are, how long they are and where their data starts.
        source: Its path, for messages.

    Raises:
        CheckpointError: Something in it cannot be true.
    """
    try:
        body = json.loads(raw)
        files = [str(name) for name in body["files"]]
        tensors = {name: _entry(name, value, files) for name, value in body["tensors"].items()}
        index = Index(tensors, {str(a): str(b) for a, b in body["aliases"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise _inconsistent(source, f"malformed entry ({error!r})") from error
    for entry in tensors.values():
        fault = find_fault(entry.shape, entry.copies)
        if fault:
            raise _inconsistent(source, f"tensor '{entry.name}': {fault}")
    for alias, target in index.aliases.items():
        if target not in tensors or alias in tensors:
            raise _inconsistent(source, f"alias '{alias}' of '{target}'")
    for file, pieces in index.pieces_by_file.items():
        _check_positions(file, [piece for piece, _ in pieces], manifest, source)
    return index


def _entry(name: str, value: dict[str, Any], files: list[str]) -> TensorEntry:
    shape, dtype = _sizes(value["shape"]), value["dtype"]
    itemsize = DTYPES[dtype].itemsize
    pieces = []
    for offset, size, number, start in value["pieces"]:
        if type(number) is not int or type(start) is not int or number < 0 or start < 0:
            raise ValueError(f"piece of {name!r}")
        box = Box(_sizes(offset), _sizes(size))
        pieces.append(Piece(box, files[number], start, box.numel * itemsize))
    return TensorEntry(name, shape, dtype, tuple(pieces))


def _sizes(values: list[int]) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"not extents: {values!r}")
    return tuple(values)


def _check_positions(file: str, pieces: list[Piece], manifest: Manifest, source: str) -> None:
    """The pieces of a file must fill it from the end of its header to its last byte."""
    entry = manifest.files.get(file)
    if entry is None or f"{file.rsplit('.', 1)[0]}.sums" not in manifest.files:
        raise _inconsistent(source, f"'{file}' or its checksums are not in the manifest")
    position = entry.digested
    for piece in pieces:
        if piece.start != position:
            raise _inconsistent(source, f"a piece in '{file}' starts at {piece.start}, not at {position}")
        position += piece.nbytes
    if position != entry.size:
        raise _inconsistent(source, f"the pieces of '{file}' end at {position} of {entry.size} bytes")


def _inconsistent(source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{source}' contradicts itself: {why}.",
        remedy="Resume from another checkpoint; this one was not written by a working nnx.",
    )

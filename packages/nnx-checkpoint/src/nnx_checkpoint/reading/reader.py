"""Reading a checkpoint: an interface for all formats, our own format behind it, and only the bytes asked for.

Everything above storage (resuming, converting, inspecting) sees `Checkpoint` only, so a format that can be
opened can be resumed from, merged and converted. `nnx_checkpoint.foreign` opens others than our own;
`nnx_checkpoint.reading.formats` finds out which one a path holds. Nothing here communicates, and no pickle is
executed unless the caller allows it.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.format.codec import decode
from nnx_checkpoint.format.index import Index, Piece, TensorEntry
from nnx_checkpoint.format.manifest import Manifest, load_json, objects_file, rank_file
from nnx_checkpoint.format.rankfile import cut, ranges_of, strides_of
from nnx_checkpoint.format.source import Source
from nnx_checkpoint.storage import Location, Reader
from nnx_checkpoint.storage.locations import place_of
from nnx_checkpoint.unpickling.cost import refuse_swollen
from nnx_checkpoint.unpickling.torch_file import refuse_endless

__all__ = ["Checkpoint", "Fetcher", "NativeCheckpoint", "PlainFiles", "Wanted", "open_native"]


# --- an opened checkpoint, whatever its format ----------------------------------------------------


class Checkpoint(ABC):
    """What a checkpoint holds, under the logical names of `nnx_checkpoint.reading.naming`.

    Attributes:
        path: The path that was opened.
        format: Name of its format, as in ``nnx ckpt convert --to``.
    """

    path: Any
    format: str

    def __repr__(self) -> str:
        ranks = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return f"<{self.format} checkpoint {str(self.path)!r}: {len(self.tensors)} tensors, saved by {ranks}>"

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Every logical tensor by name, those lifted out of objects included."""

    @property
    @abstractmethod
    def aliases(self) -> Mapping[str, str]:
        """Tied names, mapped to the name under which the data is stored."""

    @cached_property
    def objects(self) -> Any:
        """Everything else: ``{"trainer": ..., "optim": ..., "extra": ...}``, with its tensors."""
        return self.tree(None, self.read)

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks wrote the checkpoint."""

    @property
    @abstractmethod
    def provenance(self) -> Mapping[str, Any]:
        """Where it comes from, for people."""

    def rank_objects(self, rank: int) -> Any | None:
        """The tree that one rank saved for itself; None if it saved none."""
        return self.tree(rank, self.read)

    @abstractmethod
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        """The objects of one rank, or the common ones, without their tensors.

        Args:
            rank: None for the common ones.
            tensor: Called with the logical name of each tensor in the tree; gives what stands in its place.

        Returns:
            The tree; None if the rank saved none.
        """

    @abstractmethod
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        """Copy stored data into memory; every box lies inside its tensor."""

    def entry(self, name: str) -> TensorEntry:
        """The tensor of a name, which may be an alias.

        Raises:
            CheckpointError: There is none.
        """
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            raise self._missing([name])
        return found

    def fill(self, shards: Mapping[str, Shard]) -> None:
        """Copy stored data into shards, in place.

        Each rank fills its own and reads only the bytes it needs, whatever world wrote them. After an
        error some of the shards may be filled and others not.

        Args:
            shards: The shards to fill, by name or alias.

        Raises:
            CheckpointError: A name is missing, a shape or dtype differs, or a file is damaged.
        """
        missing = [name for name in shards if self.aliases.get(name, name) not in self.tensors]
        if missing:
            raise self._missing(missing)
        wanted: list[Wanted] = []
        for name, shard in shards.items():
            entry = self.entry(name)
            self._require_same(entry, name, shard)
            wanted += [
                Wanted(entry, box, view)
                for box, view in zip(shard.boxes, shard.data, strict=True)
                if box.numel
            ]
        self._fetch(wanted)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read one tensor, or one box of it, into new memory on the CPU."""
        entry = self.entry(name)
        box = box or Box.whole(entry.shape)
        try:
            tensor = torch.empty(box.size, dtype=entry.dtype)
        except (
            RuntimeError,
            TypeError,
            OverflowError,
        ) as error:  # too much, or too large a number
            raise CheckpointError(
                f"tensor '{name}' of checkpoint '{self.path}' has shape {entry.shape}, of which "
                f"{box.size} cannot be allocated here.",
                remedy="Read a part of it, or use a machine with more memory.",
            ) from error
        self.fill({name: Shard(entry.shape, entry.dtype, (box,), (tensor,))})
        return tensor

    def _missing(self, names: list[str]) -> CheckpointError:
        shown = ", ".join(f"'{name}'" for name in names[:10]) + (", ..." if len(names) > 10 else "")
        return CheckpointError(
            f"checkpoint '{self.path}' has no tensor {shown} ({len(names)} missing).",
            remedy="Check that it belongs to this model; `nnx ckpt inspect` lists what it holds.",
        )

    def _require_same(self, entry: TensorEntry, name: str, shard: Shard) -> None:
        if entry.shape != tuple(shard.shape):
            raise CheckpointError(
                f"tensor '{name}' has shape {entry.shape} in checkpoint '{self.path}', "
                f"but shape {tuple(shard.shape)} in the model.",
                remedy="Build the model with the same sizes as the one that was saved.",
            )
        if entry.dtype != shard.dtype:
            raise CheckpointError(
                f"tensor '{name}' is {entry.dtype} in checkpoint '{self.path}', "
                f"but {shard.dtype} in the model.",
                remedy="Load with the precision that was saved, and convert the model afterwards.",
            )
        for box in shard.boxes:
            if any(a + n > full for a, n, full in zip(box.offset, box.size, entry.shape, strict=True)):
                raise CheckpointError(
                    f"{box} lies outside tensor '{name}' of shape {entry.shape}.",
                    remedy="Ask for a box inside.",
                )


# --- fetching boxes -------------------------------------------------------------------------------
# From stored pieces into memory, by the shortest way: what is contiguous on both sides is read straight
# into place; the rest goes through a small buffer. Where the source has checksums, every block of data is
# compared with its own, in place where it was read in place. Reads are spread over threads, in order of
# position. This part owns no format and no file: it asks a `PieceSource` for both.


_READ = 4 << 20
"""Bytes of one verified read; small enough that checksums are computed while they are in the cache."""
_TASK = 16 << 20
"""Bytes that one thread takes at a time."""
_SCRATCH = 4 << 20
"""Most bytes that are read into a buffer at once to copy parts of them."""


class PieceSource(Protocol):
    """What the fetcher must know of a checkpoint's files."""

    @property
    def block(self) -> int | None:
        """Bytes under one checksum, counted from the start of each piece; None where there are none."""

    def where(self, file: str) -> str:
        """The path of a file, for messages."""

    def reader(self, file: str) -> Reader:
        """Open a file."""

    def sums(self, file: str) -> memoryview:
        """Every xxh3-64 checksum of a file; never asked for where `block` is None."""


class PlainFiles:
    """The files of another program, which have no checksums: a piece names its file by path or URL.

    Args:
        directory: The directory that relative names start from.
    """

    block = None

    def __init__(self, directory: Location = "") -> None:
        self._directory = os.fspath(directory)

    def where(self, file: str) -> str:
        """The path or URL of a file."""
        is_complete = not self._directory or file.startswith("/") or "://" in file
        return file if is_complete else f"{self._directory}/{file}"

    def reader(self, file: str) -> Reader:
        """Open a file."""
        return place_of(self.where(file)).reader()

    def sums(self, file: str) -> memoryview:
        """There are none."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A box of a stored tensor and the memory that it goes into."""

    entry: TensorEntry
    box: Box
    view: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Part of one piece to read: a range of its bytes straight into memory, or a region of it."""

    entry: TensorEntry
    piece: Piece
    start: int
    stop: int
    into: memoryview | None
    region: Box
    view: Tensor


class Fetcher:
    """Reads boxes out of one checkpoint."""

    def __init__(self, source: PieceSource) -> None:
        self._source = source
        self._own_file = rank_file(dist.get_rank() if dist.is_initialized() else 0)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fill every view.

        Raises:
            CheckpointError: A file cannot be read or is damaged.
        """
        chosen = [part for want in wanted for part in self._pieces(want)]
        with ExitStack() as files:
            readers: dict[str, Reader] = {}
            for name in sorted({piece.file for _, piece, _, _ in chosen}):
                readers[name] = self._source.reader(name)
                files.callback(readers[name].close)
            worker = _Worker(self._source, readers)
            tasks = sorted(
                (task for part in chosen for task in worker.tasks(*part)),
                key=lambda task: (task.piece.file, task.piece.start, task.start),
            )
            self._run(tasks, readers)

    def _pieces(self, want: Wanted) -> Iterator[tuple[TensorEntry, Piece, Box, Tensor]]:
        """For each stored box that overlaps: where to read it, and the region in its coordinates."""
        for piece in want.entry.overlapping(want.box, prefer=self._own_file):
            common = piece.box.intersection(want.box)
            if common is not None:
                view = want.view.detach()[common.relative_to(want.box).slices]
                yield want.entry, piece, common.relative_to(piece.box), view

    def _run(self, tasks: Sequence[_Task], readers: dict[str, Reader]) -> None:
        work = _Shared(tasks)
        count = min(len(tasks), max((reader.parallel for reader in readers.values()), default=1))
        threads = []
        for _ in range(count - 1):
            thread = threading.Thread(target=work.run, args=(_Worker(self._source, readers),))
            with contextlib.suppress(RuntimeError):  # no memory is left for one: fewer are slower, not wrong
                thread.start()
                threads.append(thread)
        work.run(_Worker(self._source, readers))
        for thread in threads:
            thread.join()
        if work.error is not None:
            raise work.error


class _Shared:
    """Tasks that several threads take one after the other, until one fails."""

    def __init__(self, tasks: Sequence[_Task]) -> None:
        self.error: BaseException | None = None
        self._tasks = iter(tasks)
        self._lock = threading.Lock()

    def run(self, worker: _Worker) -> None:
        while self.error is None:
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                return
            try:
                worker.do(task)
            except BaseException as error:  # raised again by the thread that asked
                self.error = error


class _Worker:
    """What one thread needs: it keeps the last block that was read only in part."""

    def __init__(self, source: PieceSource, readers: Mapping[str, Reader]) -> None:
        self._source = source
        self._readers = readers
        self._block = source.block
        self._edge: tuple[Piece | None, int, bytearray] = (None, -1, bytearray())

    def tasks(self, entry: TensorEntry, piece: Piece, region: Box, view: Tensor) -> Iterator[_Task]:
        """What there is to do to fill a view from a piece."""
        ranges = ranges_of(region, piece.box.size, entry.itemsize, self._gap(piece))
        if ranges.count == 1 and ranges.gapless and _in_place(view):
            memory, start, stop = _bytes_of(view), ranges.first, ranges.first + ranges.span
            for first in range(start - start % _TASK, stop, _TASK):
                a, b = max(start, first), min(stop, first + _TASK)
                yield _Task(entry, piece, a, b, memory[a - start : b - start], region, view)
            return
        for part, part_view, ranges in cut(region, view, piece.box.size, gap=self._gap(piece), limit=_TASK):
            yield _Task(entry, piece, ranges.first, ranges.first + ranges.span, None, part, part_view)

    def do(self, task: _Task) -> None:
        if task.into is not None:
            self._read(task.entry, task.piece, task.start, task.stop, task.into)
            return
        outer, gap = task.piece.box.size, self._gap(task.piece)
        for _, view, ranges in cut(task.region, task.view, outer, gap=gap, limit=_SCRATCH):
            if ranges.gapless:
                target = view if _in_place(view) else torch.empty(view.shape, dtype=view.dtype)
                memory = _bytes_of(target)
                for number, start in enumerate(ranges.starts()):
                    part = memory[number * ranges.span : (number + 1) * ranges.span]
                    self._read(task.entry, task.piece, start, start + ranges.span, part)
                if target is not view:
                    view.copy_(target)
            else:
                scratch = torch.empty(ranges.span, dtype=torch.uint8)
                start = ranges.first
                self._read(task.entry, task.piece, start, start + ranges.span, _bytes_of(scratch))
                view.copy_(scratch.view(view.dtype).as_strided(view.shape, strides_of(outer)))

    def _gap(self, piece: Piece) -> int:
        """Ranges nearer than a block share blocks, which are verified as a whole."""
        return max(self._readers[piece.file].gap, self._block or 0)

    def _read(self, entry: TensorEntry, piece: Piece, start: int, stop: int, into: memoryview) -> None:
        """Read, and verify if that is possible, bytes [start, stop) of a piece."""
        if self._block is None:
            self._readers[piece.file].read_into(piece.start + start, into)
            return
        position, size = start, self._block
        while position < stop:
            block = position // size
            block_stop = min((block + 1) * size, piece.nbytes)
            if position == block * size and stop >= block_stop:
                last = stop if stop == piece.nbytes else stop - stop % size
                last = min(last, position + max(_READ - _READ % size, size))
                target = into[position - start : last - start]
                self._readers[piece.file].read_into(piece.start + position, target)
                self._verify(entry, piece, block, target)
            else:
                last = min(stop, block_stop)
                data = self._edge_block(entry, piece, block, block_stop - block * size)
                inside = position - block * size
                into[position - start : last - start] = data[inside : inside + last - position]
            position = last

    def _edge_block(self, entry: TensorEntry, piece: Piece, block: int, length: int) -> memoryview:
        if self._edge[0] is not piece or self._edge[1] != block:
            data = bytearray(length)
            self._readers[piece.file].read_into(piece.start + block * (self._block or 0), memoryview(data))
            self._verify(entry, piece, block, memoryview(data))
            self._edge = (piece, block, data)
        return memoryview(self._edge[2])

    def _verify(self, entry: TensorEntry, piece: Piece, block: int, data: memoryview) -> None:
        """Compare consecutive blocks with their checksums."""
        size = self._block or len(data)
        sums = self._source.sums(piece.file)
        number = piece.first_block + block
        for begin in range(0, len(data), size):
            part = data[begin : begin + size]
            if xxhash.xxh3_64_intdigest(part) != sums[number]:
                first = piece.start + block * size + begin
                raise CheckpointError(
                    f"'{self._source.where(piece.file)}' is damaged: bytes {first}-{first + len(part)} "
                    f"(block {number}, tensor '{entry.name}') do not match their checksum.",
                    remedy="Restore it from a backup, or resume from another checkpoint; "
                    "`nnx ckpt verify` lists all damage.",
                )
            number += 1


def _in_place(view: Tensor) -> bool:
    return view.device.type == "cpu" and view.is_contiguous() and not view.is_conj() and not view.is_neg()


def _bytes_of(view: Tensor) -> memoryview:
    flat = view.as_strided((view.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


# --- our own format -------------------------------------------------------------------------------
# Opening checks the manifest, that every file is there with its length, and the index. Filling copies the
# intersections of stored boxes and wanted boxes straight into the caller's memory, each verified before it
# counts.


def open_native(path: Location, *, weights_only: bool = True) -> NativeCheckpoint:
    """Open a checkpoint of our own format and check all that can be checked without reading tensor data.

    Args:
        path: Its directory, or a link to it.
        weights_only: With False, objects that were saved with ``opaque="pickle"`` may run any code that
            whoever wrote the checkpoint put there. True restricts them to what torch knows to be safe.

    Returns:
        A handle that reads on demand.

    Raises:
        CheckpointError: There is no checkpoint, it is of a newer format, or a file is missing, truncated
            or damaged.
    """
    return NativeCheckpoint(Source.open(path), weights_only=weights_only)


class NativeCheckpoint(Checkpoint):
    """A committed checkpoint of our own format; made by `open_native`."""

    format = "nnx"

    def __init__(self, source: Source, *, weights_only: bool) -> None:
        self._source = source
        self._weights_only = weights_only

    @property
    @override
    def path(self) -> Path | str:
        """The directory that was opened, or its URL."""
        return self._source.path.location

    @property
    def manifest(self) -> Manifest:
        """Who wrote the checkpoint, when, and its files."""
        return self._source.manifest

    @property
    def index(self) -> Index:
        """Where every tensor is stored."""
        return self._source.index

    @property
    @override
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self.index.tensors

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return self.index.aliases

    @property
    @override
    def world_size(self) -> int:
        return int(self.manifest.writer.get("world_size", 1))

    @property
    @override
    def provenance(self) -> Mapping[str, Any]:
        return self.manifest.provenance

    @override
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        Fetcher(self._source).fetch(wanted)

    @override
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        name = objects_file(rank)
        if rank is not None and name not in self.manifest.files:
            return None
        place = str(self._source.directory / name)
        try:
            tree = load_json(self._source.read_file(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"'{place}' is malformed: {error}.") from error
        opaque = _Opaque(self._source, f"{name.rsplit('.', 1)[0]}.bin", self._weights_only)
        return decode(tree, tensor=tensor, opaque=opaque, source=place)


class _Opaque:
    """Objects that were stored by pickle, unpickled on first use."""

    def __init__(self, source: Source, name: str, weights_only: bool) -> None:
        self._source, self._name, self._weights_only = source, name, weights_only
        self._objects: dict[str, Any] | None = None

    def __call__(self, place: str) -> Any:
        if self._objects is None:
            raw, source = self._source.read_file(self._name), str(self._source.directory / self._name)
            if self._weights_only:
                refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=source)
            try:
                loaded = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=self._weights_only)
            except Exception as error:  # whatever the pickle makes it raise
                raise self._refusal(place, error) from error
            refuse_endless(loaded, nbytes=len(raw), source=source)
            self._objects = loaded
        assert self._objects is not None
        return self._objects[place]

    def _refusal(self, place: str, error: Exception) -> CheckpointError:
        reason = str(error).strip().split("\n")[0]
        return CheckpointError(
            f"'{self._source.directory / self._name}' holds the object at '{place}' as a pickle that was "
            f"not loaded: {type(error).__name__}: {reason}",
            remedy="If you trust whoever wrote the checkpoint, pass weights_only=False.",
        )

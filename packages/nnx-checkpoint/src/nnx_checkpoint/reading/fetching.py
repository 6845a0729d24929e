"""Fetch boxes of tensors from files.

Data that is contiguous in the file and in memory is read straight into place; other data goes through a
small buffer. If the source has checksums, every block is compared with its own, in the memory that it was
read into. Threads share the reads, in order of position. This module owns no format and no file: it gets both
from a `PieceSource`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from nnx_base.box import Box
from nnx_base.dtypes import as_bytes
from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.index import Piece, TensorEntry
from nnx_checkpoint.format.manifest import rank_file
from nnx_checkpoint.format.rankfile import cut, ranges_of, strides_of
from nnx_checkpoint.storage import Location, Reader
from nnx_checkpoint.storage.locations import place_of

_READ = 4 << 20
"""Bytes of one verified read; small enough to compute checksums while the bytes are in the cache."""


_TASK = 16 << 20
"""Bytes of one task of a thread."""


_SCRATCH = 4 << 20
"""Largest buffer in bytes for data that is not contiguous."""


class PieceSource(Protocol):
    """The facts about a checkpoint's files that the fetcher needs."""

    @property
    def block(self) -> int | None:
        """Bytes under one checksum, counted from the start of each piece; None without checksums."""

    def where(self, file: str) -> str:
        """Return the path of a file, for messages."""

    def reader(self, file: str) -> Reader:
        """Open a file."""

    def sums(self, file: str) -> memoryview:
        """Return every xxh3-64 checksum of a file (not called if `block` is None)."""


class PlainFiles:
    """Files of another program, without checksums; a piece names its file by path or URL.

    Args:
        directory: The base directory of relative names.
    """

    block = None

    def __init__(self, directory: Location = "") -> None:
        self._directory = os.fspath(directory)

    def where(self, file: str) -> str:
        """Return the path or URL of a file."""
        is_complete = not self._directory or file.startswith("/") or "://" in file
        return file if is_complete else f"{self._directory}/{file}"

    def reader(self, file: str) -> Reader:
        """Open a file."""
        return place_of(self.where(file)).reader()

    def sums(self, file: str) -> memoryview:
        """Return nothing: the files have no checksums."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A box of a stored tensor and the memory that it goes into."""

    entry: TensorEntry
    box: Box
    view: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A read from one piece: a range of its bytes straight into memory, or a region through a buffer."""

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
        """Yield each overlapping stored piece, the region to read (in its coordinates) and the view."""
        for piece in want.entry.overlapping(want.box, prefer=self._own_file):
            if piece.box == want.box:  # most pieces: spare the arithmetic
                yield want.entry, piece, Box.whole(want.box.size), want.view.detach()
                continue
            common = piece.box.intersection(want.box)
            if common is not None:
                view = want.view.detach()[common.relative_to(want.box).slices]
                yield want.entry, piece, common.relative_to(piece.box), view

    def _run(self, tasks: Sequence[_Task], readers: dict[str, Reader]) -> None:
        work = _TaskQueue(tasks)
        count = min(len(tasks), max((reader.parallel for reader in readers.values()), default=1))
        threads = []
        for _ in range(count - 1):
            thread = threading.Thread(target=work.run, args=(_Worker(self._source, readers),))
            with contextlib.suppress(RuntimeError):  # out of memory for a thread: read with fewer
                thread.start()
                threads.append(thread)
        work.run(_Worker(self._source, readers))
        for thread in threads:
            thread.join()
        if work.error is not None:
            raise work.error


class _TaskQueue:
    """A queue of tasks for several threads, which ends at the first error."""

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
            except BaseException as error:  # raised again by the thread that called `fetch`
                self.error = error


class _Worker:
    """The state of one thread, with the last block that was needed only partly."""

    def __init__(self, source: PieceSource, readers: Mapping[str, Reader]) -> None:
        self._source = source
        self._readers = readers
        self._block = source.block
        self._edge: tuple[Piece | None, int, bytearray] = (None, -1, bytearray())

    def tasks(self, entry: TensorEntry, piece: Piece, region: Box, view: Tensor) -> Iterator[_Task]:
        """Yield the reads and copies that fill a view from a piece."""
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
            else:  # one read over the gaps and one strided copy: cheaper than a read for each range
                scratch = torch.empty(ranges.span, dtype=torch.uint8)
                start = ranges.first
                self._read(task.entry, task.piece, start, start + ranges.span, _bytes_of(scratch))
                view.copy_(scratch.view(view.dtype).as_strided(view.shape, strides_of(outer)))

    def _gap(self, piece: Piece) -> int:
        """Return the bytes between ranges below which one read covers both (a checksum covers a block)."""
        return max(self._readers[piece.file].gap, self._block or 0)

    def _read(self, entry: TensorEntry, piece: Piece, start: int, stop: int, into: memoryview) -> None:
        """Read bytes [start, stop) of a piece, and verify them if the source has checksums.

        Complete blocks are read straight into place. A block at an edge is read and verified completely in a
        buffer, because its checksum also covers bytes outside the range; neighbouring reads reuse it.
        """
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
    return memoryview(as_bytes(view).numpy())  # type: ignore[arg-type] # no copy of what is `_in_place`

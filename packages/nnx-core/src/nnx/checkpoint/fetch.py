"""Fetching boxes: from stored pieces into memory, by the shortest way.

What is contiguous on both sides is read straight into place; the rest goes through a small buffer. Every
block of data is compared with its checksum, in place where it was read in place. Reads are spread over
two threads, in order of position. This module owns no format: it asks the source for checksums.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from nnx.checkpoint.files import explained
from nnx.checkpoint.index import Piece, TensorEntry
from nnx.checkpoint.shardfile import rank_file
from nnx.checkpoint.source import Source
from nnx.errors import CheckpointError
from nnx.layout import Box

__all__ = ["Fetcher", "Wanted"]

_THREADS = 2
_READ = 4 << 20
"""Bytes of one read; small enough that their checksums are computed while they are in the cache."""
_TASK = 16 << 20
"""Bytes of contiguous data that one thread takes at a time."""
_SCRATCH = 4 << 20
"""Most bytes that are read into a buffer at once to copy parts of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A box of a stored tensor and the memory that it goes into."""

    entry: TensorEntry
    box: Box
    view: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Part of one piece to read: a range of its bytes, or a box of it that is not one range."""

    entry: TensorEntry
    piece: Piece
    start: int
    stop: int
    into: memoryview | None
    region: Box
    view: Tensor


class Fetcher:
    """Reads boxes out of one checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._own_file = rank_file(dist.get_rank() if dist.is_initialized() else 0)

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fill every view.

        Raises:
            CheckpointError: A file cannot be read or is damaged.
        """
        tasks = sorted(
            (task for want in wanted for task in self._tasks(want)),
            key=lambda task: (task.piece.file, task.piece.start, task.start),
        )
        with ExitStack() as files:
            descriptors = {name: self._open(name, files) for name in {task.piece.file for task in tasks}}
            work = _Shared(tasks)
            readers = [_Reader(self._source, descriptors) for _ in range(_THREADS)]
            threads = [threading.Thread(target=work.run, args=(reader,)) for reader in readers[1:]]
            for thread in threads if len(tasks) > 1 else ():
                thread.start()
            work.run(readers[0])
            for thread in threads if len(tasks) > 1 else ():
                thread.join()
        if work.error is not None:
            raise work.error

    def _open(self, name: str, files: ExitStack) -> int:
        self._source.sums(name)
        path = self._source.directory / name
        with explained("read", path):
            descriptor = os.open(path, os.O_RDONLY)
        files.callback(os.close, descriptor)
        return descriptor

    def _tasks(self, want: Wanted) -> Iterator[_Task]:
        for box, copies in want.entry.copies.items():
            common = box.intersection(want.box)
            if common is None:
                continue
            piece = next((copy for copy in copies if copy.file == self._own_file), copies[0])
            view = want.view.detach()[common.relative_to(want.box).slices]
            region = common.relative_to(box)
            start, stop = _span(region, box, want.entry.itemsize)
            if stop - start == region.numel * want.entry.itemsize and _in_place(view):
                memory = _bytes_of(view)
                for first in range(start - start % _TASK, stop, _TASK):
                    a, b = max(start, first), min(stop, first + _TASK)
                    yield _Task(want.entry, piece, a, b, memory[a - start : b - start], region, view)
            else:
                yield _Task(want.entry, piece, start, stop, None, region, view)


class _Shared:
    """Tasks that several threads take one after the other, until one fails."""

    def __init__(self, tasks: Sequence[_Task]) -> None:
        self.error: BaseException | None = None
        self._tasks = iter(tasks)
        self._lock = threading.Lock()

    def run(self, reader: _Reader) -> None:
        while self.error is None:
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                return
            try:
                reader.do(task)
            except BaseException as error:  # raised again by the thread that asked
                self.error = error


class _Reader:
    """What one thread needs: it keeps the last block that was read only in part."""

    def __init__(self, source: Source, descriptors: dict[str, int]) -> None:
        self._source = source
        self._descriptors = descriptors
        self._size = source.manifest.block
        self._edge: tuple[Piece | None, int, bytearray] = (None, -1, bytearray())

    def do(self, task: _Task) -> None:
        if task.into is not None:
            self._read(task.entry, task.piece, task.start, task.stop, task.into)
        else:
            self._copy(task.entry, task.piece, task.region, task.view)

    def _copy(self, entry: TensorEntry, piece: Piece, region: Box, view: Tensor) -> None:
        """Copy a box through a buffer, cutting it until what has to be read at once is small."""
        start, stop = _span(region, piece.box, entry.itemsize)
        wanted = region.numel * entry.itemsize
        if stop - start == wanted and _in_place(view):
            self._read(entry, piece, start, stop, _bytes_of(view))
            return
        # Gaps are read as well where that is cheaper than many small reads.
        affordable = _SCRATCH if stop - start <= 4 * wanted else 2 * self._size
        if stop - start > affordable and region.numel > 1:
            for part, part_view in _halves(region, view):
                self._copy(entry, piece, part, part_view)
            return
        scratch = torch.empty(stop - start, dtype=torch.uint8)
        self._read(entry, piece, start, stop, _bytes_of(scratch))
        view.copy_(scratch.view(entry.dtype).as_strided(region.size, _strides(piece.box.size)))

    def _read(self, entry: TensorEntry, piece: Piece, start: int, stop: int, into: memoryview) -> None:
        """Read and verify bytes [start, stop) of a piece."""
        position, size = start, self._size
        while position < stop:
            block = position // size
            block_stop = min((block + 1) * size, piece.nbytes)
            if position == block * size and stop >= block_stop:
                last = stop if stop == piece.nbytes else stop - stop % size
                last = min(last, position + max(_READ - _READ % size, size))
                target = into[position - start : last - start]
                self._read_at(piece, position, target)
                self._verify(entry, piece, block, target)
                position = last
            else:
                last = min(stop, block_stop)
                data = self._edge_block(entry, piece, block, block_stop - block * size)
                inside = position - block * size
                into[position - start : last - start] = data[inside : inside + last - position]
                position = last

    def _edge_block(self, entry: TensorEntry, piece: Piece, block: int, length: int) -> memoryview:
        if self._edge[0] is not piece or self._edge[1] != block:
            data = bytearray(length)
            self._read_at(piece, block * self._size, memoryview(data))
            self._verify(entry, piece, block, memoryview(data))
            self._edge = (piece, block, data)
        return memoryview(self._edge[2])

    def _read_at(self, piece: Piece, position: int, target: memoryview) -> None:
        path = self._source.directory / piece.file
        done = 0
        with explained("read", path):
            while done < len(target):
                count = os.preadv(
                    self._descriptors[piece.file], [target[done:]], piece.start + position + done
                )
                if count == 0:
                    raise CheckpointError(
                        f"'{path}' ended while it was read.", remedy="Nobody may change it meanwhile."
                    )
                done += count

    def _verify(self, entry: TensorEntry, piece: Piece, block: int, data: memoryview) -> None:
        """Compare consecutive blocks with their checksums."""
        sums = self._source.sums(piece.file)
        number = self._source.first_blocks(piece.file)[piece.start] + block
        for begin in range(0, len(data), self._size):
            part = data[begin : begin + self._size]
            if xxhash.xxh3_64_intdigest(part) != sums[number]:
                first = piece.start + block * self._size + begin
                raise CheckpointError(
                    f"'{self._source.directory / piece.file}' is damaged: bytes {first}-{first + len(part)} "
                    f"(block {number}, tensor '{entry.name}') do not match their checksum.",
                    remedy="Restore it from a backup, or resume from another checkpoint; "
                    "`nnx ckpt verify` lists all damage.",
                )
            number += 1


def _span(region: Box, outer: Box, itemsize: int) -> tuple[int, int]:
    """The range of bytes, in a piece with the extents of `outer`, from the region's first to its last."""
    strides = _strides(outer.size)
    first = sum(offset * stride for offset, stride in zip(region.offset, strides, strict=True))
    length = sum((extent - 1) * stride for extent, stride in zip(region.size, strides, strict=True)) + 1
    return first * itemsize, (first + length) * itemsize


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for extent in reversed(size):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def _halves(region: Box, view: Tensor) -> Iterator[tuple[Box, Tensor]]:
    dim = next(d for d, extent in enumerate(region.size) if extent > 1)
    half = region.size[dim] // 2
    for start, extent in ((0, half), (half, region.size[dim] - half)):
        offset = (*region.offset[:dim], region.offset[dim] + start, *region.offset[dim + 1 :])
        size = (*region.size[:dim], extent, *region.size[dim + 1 :])
        yield Box(offset, size), view.narrow(dim, start, extent)


def _in_place(view: Tensor) -> bool:
    return view.device.type == "cpu" and view.is_contiguous() and not view.is_conj() and not view.is_neg()


def _bytes_of(view: Tensor) -> memoryview:
    flat = view.as_strided((view.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]

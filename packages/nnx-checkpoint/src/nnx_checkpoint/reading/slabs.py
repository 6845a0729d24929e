"""Read a checkpoint slab by slab, and write files atomically, for the writers of all formats.

A writer gets the bytes of tensors in the order of its file, a few megabytes at a time, read ahead by a
thread. So memory is bounded for tensors and checkpoints of any size. The writer fills a temporary file beside
the target, and renames it to the target when it is complete. This module knows no format.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.format.index import TensorEntry
from nnx_checkpoint.reading.formats import Progress
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.survey import PARTIAL
from nnx_checkpoint.storage.files import explained, make_directories, sync_directory
from nnx_checkpoint.storage.locations import LocalPlace, place_of
from nnx_checkpoint.storage.streams import DirectFile, StreamWriter

__all__ = ["SLAB", "new_directory", "new_file", "read_in_order", "refuse_existing", "row_boxes", "stream_to"]

SLAB = 4 << 20
"""Bytes of one slab; two slabs exist at a time."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive bytes of one tensor, in row-major order.

    Attributes:
        name: The tensor.
        data: The bytes; valid until the next iteration.
    """

    name: str
    data: memoryview


def row_boxes(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Box]:
    """Split a tensor into boxes of consecutive elements in row-major order, each of at most `limit` bytes.

    Example:
        >>> [box.size for box in row_boxes((5, 4), itemsize=1, limit=8)]
        [(2, 4), (2, 4), (1, 4)]
        >>> [box.size for box in row_boxes((2, 4), itemsize=1, limit=3)]
        [(1, 3), (1, 1), (1, 3), (1, 1)]
    """
    whole = Box.whole(shape)
    if whole.numel * itemsize <= limit or not shape:
        yield whole
        return
    rows, inner = shape[0], tuple(shape[1:])
    count = limit // (whole.numel // rows * itemsize)
    if count:
        for start in range(0, rows, count):
            yield Box((start, *(0,) * len(inner)), (min(count, rows - start), *inner))
        return
    for row in range(rows):
        for box in row_boxes(inner, itemsize, limit):
            yield Box((row, *box.offset), (1, *box.size))


def read_in_order(
    checkpoint: Checkpoint, names: Iterable[str], *, progress: Progress = lambda done, total: None
) -> Iterator[Part]:
    """Read tensors one after the other, in slabs.

    Args:
        checkpoint: A checkpoint of any format.
        names: The tensors, distinct.
        progress: Function of the bytes yielded so far and the total of all tensors.

    Yields:
        The bytes of each tensor in turn: at least one item, which is empty for a tensor without elements.
    """
    entries = [checkpoint.entry(name) for name in names]
    total, done = sum(entry.nbytes for entry in entries), 0
    progress(0, total)
    for parts in _read_ahead(checkpoint, entries):
        yield from parts
        done += sum(len(part.data) for part in parts)
        progress(done, total)


def _read_ahead(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> Iterator[list[Part]]:
    # Anonymous maps: small objects beside slabs in malloc's heap would keep it from returning the memory.
    slabs = itertools.cycle([torch.frombuffer(mmap(-1, SLAB), dtype=torch.uint8) for _ in range(2)])
    pending: Future[list[Part]] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="nnx-read") as reader:
        try:
            reader.submit(int)
        except RuntimeError:  # out of memory for a thread: read without read-ahead
            for batch in _batches(entries):
                yield _load(checkpoint, batch, next(slabs))
            return
        for batch, slab in zip(_batches(entries), slabs, strict=False):
            # The consumer uses the other slab now, and is done with this one.
            following = reader.submit(_load, checkpoint, batch, slab)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def _batches(entries: Iterable[TensorEntry]) -> Iterator[list[tuple[TensorEntry, Box]]]:
    """Yield lists of boxes that fit into one slab, with at most one box of each tensor."""
    batch: list[tuple[TensorEntry, Box]] = []
    room = SLAB
    for entry in entries:
        for box in row_boxes(entry.shape, entry.itemsize, SLAB):
            needed = _padded(box.numel * entry.itemsize)
            if needed > room or (batch and batch[-1][0] is entry):
                yield batch
                batch, room = [], SLAB
            batch.append((entry, box))
            room -= needed
    if batch:
        yield batch


def _load(checkpoint: Checkpoint, batch: Sequence[tuple[TensorEntry, Box]], slab: torch.Tensor) -> list[Part]:
    shards, parts, start = {}, [], 0
    memory = memoryview(slab.numpy())  # type: ignore[arg-type]
    for entry, box in batch:
        nbytes = box.numel * entry.itemsize
        view = slab[start : start + nbytes].view(entry.dtype).view(box.size)
        shards[entry.name] = Shard(entry.shape, entry.dtype, (box,), (view,))
        parts.append(Part(entry.name, memory[start : start + nbytes]))
        start += _padded(nbytes)
    checkpoint.fill(shards)
    return parts


def _padded(nbytes: int) -> int:
    """Return a length rounded up, so that the next view is aligned for its element type."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that yields a temporary path, and renames it to `path` if the block succeeds.

    The block must fsync the file (by `StreamWriter.finish` or `write_file`): after a crash the name must
    never stand for incomplete data.

    Raises:
        CheckpointError: `path` exists already.
    """
    with _renamed_when_complete(_local(path)) as temporary:
        yield temporary


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager like `new_file` for a directory, which is created empty."""
    with _renamed_when_complete(_local(path)) as temporary:
        with explained("create", temporary):
            temporary.mkdir()
        yield temporary
        sync_directory(temporary)


def _local(path: str | os.PathLike[str]) -> Path:
    place = place_of(path)
    if not isinstance(place, LocalPlace):
        raise CheckpointError(
            f"cannot write '{place}': files of other formats are written to paths, not to URLs.",
            remedy="Write to a path, and upload the result.",
        )
    return place.path


@contextlib.contextmanager
def _renamed_when_complete(path: Path) -> Iterator[Path]:
    refuse_existing(path)
    make_directories(path.parent)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}{PARTIAL}"
    try:
        yield temporary
        refuse_existing(path)  # again: another process may have written it during the block
        with explained("create", path):
            temporary.rename(path)
    except BaseException:
        _remove(temporary)
        raise
    sync_directory(path.parent)


def stream_to(path: Path, *, size: int) -> StreamWriter:
    """Create a file of a known length, to write from its beginning to its end."""
    return StreamWriter(DirectFile(path), size=size)


def refuse_existing(path: Path) -> None:
    """Raise a `CheckpointError` if the path exists, even as a broken link."""
    if os.path.lexists(path):
        raise CheckpointError(
            f"cannot write '{path}': it exists already.",
            remedy="Choose a new path, or remove the existing one first.",
        )


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()

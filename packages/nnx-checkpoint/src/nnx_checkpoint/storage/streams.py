"""Write large files at the speed of their storage, in bounded memory.

The caller fills page-aligned buffers, and a thread writes each to a `Sink` meanwhile. On a local disk this
uses direct I/O: the page cache is slower, and would evict pages that training needs. If the file system
refuses direct I/O, the same code writes through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Protocol

from nnx_checkpoint.storage.files import explained, open_file

ALIGNMENT = 4096
"""Alignment of positions, lengths and memory for direct I/O (the largest of known file systems)."""


_BUFFER = 8 << 20


_BUFFERS = 3


_spare: list[mmap.mmap] = []
"""Used without a lock, by atomic steps only: a signal's handler may save between any two of them."""


class Sink(Protocol):
    """A new file that is written from beginning to end; its errors are `CheckpointError`."""

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Add bytes.

        Args:
            buffer: Page-aligned memory that starts with the bytes; memory after them may be overwritten.
            length: The number of bytes.
            position: The offset of the bytes in the file, right after the last ones.
        """

    def finish(self, size: int) -> None:
        """Make the file durable, with this length."""

    def close(self) -> None:
        """Close the file; an unfinished file may disappear."""


class StreamWriter:
    """Append bytes to a new file, which is durable after `finish`.

    As a context manager it stops the thread and closes the file if the block raises.

    Args:
        sink: The file.
        size: The final length in bytes.

    Raises:
        CheckpointError: The file cannot be written. Errors of the thread surface in the next `append` or
            in `finish`.
    """

    def __init__(self, sink: Sink, *, size: int) -> None:
        self.position = 0
        self._sink = sink
        self._size = size
        self._error: BaseException | None = None
        self._free: queue.Queue[mmap.mmap] = queue.Queue()
        self._full: queue.Queue[tuple[mmap.mmap, int, int] | None] = queue.Queue()
        for buffer in _take_buffers():
            self._free.put(buffer)
        self._buffer = self._free.get()
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._thread = threading.Thread(target=self._drain, name="nnx-save", daemon=True)
        self._is_alone = False
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12 starts no thread for a background save after the program's end
            self._is_alone = True

    def append(self, data: memoryview) -> memoryview:
        """Add bytes to the file.

        Returns:
            The copy of the bytes in the write buffer if it is contiguous, else the bytes themselves. A
            checksum of it is cheap, because it is in the processor's cache. It is valid until the next call.
        """
        if len(data) <= _BUFFER - self._filled:
            return self._put(data)
        rest = data
        while rest:
            part = rest[: _BUFFER - self._filled or _BUFFER]
            self._put(part)
            rest = rest[len(part) :]
        return data

    def finish(self) -> None:
        """Write the remaining bytes and fsync the file."""
        self._submit(last=True)
        self._stop()
        if self._error is not None:
            raise self._error
        self._sink.finish(self._size)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._view.release()
        buffers = [self._buffer]
        with contextlib.suppress(queue.Empty):
            while True:
                buffers.append(self._free.get_nowait())
        _keep_buffers(buffers)
        self._sink.close()

    def _put(self, data: memoryview) -> memoryview:
        if self._filled == _BUFFER:
            self._submit(last=False)
        place = self._view[self._filled : self._filled + len(data)]
        place[:] = data
        self._filled += len(data)
        self.position += len(data)
        return place

    def _submit(self, *, last: bool) -> None:
        if self._error is not None:
            raise self._error
        self._view.release()
        self._full.put((self._buffer, self.position - self._filled, self._filled))
        if self._is_alone:
            self._full.put(None)
            self._drain()
        self._buffer = self._free.get()
        self._view = memoryview(self._buffer)
        self._filled = 0
        if last:
            self._full.put(None)

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()

    def _drain(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, position, length = item
            if self._error is None:
                try:
                    with memoryview(buffer) as view:
                        self._sink.write(view, length, position)
                except BaseException as error:  # raised by the next `append` or `finish`
                    self._error = error
            self._free.put(buffer)


class DirectFile:
    """A file on a mounted file system, written around the page cache if possible.

    Args:
        path: The file, which must not exist.
        root: See `nnx_checkpoint.storage.files.parent_directory`.

    Raises:
        CheckpointError: The file cannot be created.
    """

    def __init__(self, path: Path, *, root: Path | None = None) -> None:
        self._path = path
        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root=root, doing="write")
        _enter_direct(self._fd)

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Write full pages; `finish` truncates the excess."""
        padded = -(-length // ALIGNMENT) * ALIGNMENT
        buffer[length:padded] = bytes(padded - length)
        data = buffer[:padded]
        with explained("write", self._path):
            while data:
                try:
                    written = os.pwrite(self._fd, data, position)
                except OSError as error:
                    if error.errno != errno.EINVAL or not _leave_direct(self._fd):
                        raise
                    continue
                data, position = data[written:], position + written

    def finish(self, size: int) -> None:
        """Truncate the file to its length and fsync it."""
        with explained("write", self._path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a network file system may report a failed write only now."""
        with explained("write", self._path):
            os.close(self._fd)


def _enter_direct(fd: int) -> None:
    """Write around the page cache, if the file system supports it."""
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))


def _leave_direct(fd: int) -> bool:
    """Switch to the page cache; return False if it was in use already."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


def _take_buffers() -> list[mmap.mmap]:
    buffers: list[mmap.mmap] = []
    with contextlib.suppress(IndexError):
        while len(buffers) < _BUFFERS:
            buffers.append(_spare.pop())
    # Private maps: a forked process would otherwise write into the buffers of its parent and siblings.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return buffers + [mmap.mmap(-1, _BUFFER, flags=flags) for _ in range(_BUFFERS - len(buffers))]


def _keep_buffers(buffers: list[mmap.mmap]) -> None:
    """Keep one set of buffers for the next save: allocating memory costs more than writing it."""
    _spare.extend(buffers)
    del _spare[_BUFFERS:]

"""Files that are written once: created exclusively, forced to disk, and never touched again.

This module owns errors of the operating system: each becomes a `CheckpointError` with path and remedy. It
also keeps a checkpoint from leading elsewhere: below its root directory nothing is opened through a link, and
nothing but regular files is read or written. It has the lock that keeps two runs from saving to one path, and
the stream that writes one large file at the speed of its storage with a bounded amount of memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from nnx_base.errors import CheckpointError

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EROFS}
"""What file systems answer that cannot force the names of a directory to disk, and need not."""

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
"""How a system says that a name leads to nothing; all else, such as a failing disk, says nothing about it."""

_FORBIDDEN = "Make the directory writable for this user, or save elsewhere."
_LOOKING = {"read", "list", "look at"}
_REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere.",
    errno.EDQUOT: "Free space within the quota, or save elsewhere.",
    errno.EFBIG: "Raise the file size limit (`ulimit -f`), or save elsewhere.",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "Save to a file system that is mounted writable.",
    errno.ENOENT: "Every rank must see the same directory, and nobody may remove it meanwhile.",
    errno.EEXIST: "Let only one run save to this path.",
    errno.ENOTDIR: "Choose a path below directories only.",
    errno.EIO: "Check the disk, and save elsewhere.",
    errno.ESTALE: "Check that the network file system is still mounted, and save again.",
    errno.ELOOP: "A checkpoint holds no links: copy it with what they lead to (`cp -rL`), or remove them.",
}


@contextlib.contextmanager
def explained(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the operating system into one that says what failed, where and what helps.

    Args:
        doing: A verb that says what was being done, such as ``"write"``.
        path: The file or directory.
    """
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code else str(error)
        remedy = _REMEDIES.get(code, "Check the path and the file system.")
        if remedy == _FORBIDDEN and doing in _LOOKING:
            remedy = "Make it readable for this user, or choose another path."
        raise CheckpointError(f"cannot {doing} '{os.fspath(path)}': {reason}.", remedy=remedy) from error


@contextlib.contextmanager
def parent_directory(path: Path, root: Path | None) -> Iterator[int | None]:
    """A descriptor of the directory that a path lies in, reached from a root without following links.

    Args:
        path: The path, somewhere below the root.
        root: The directory that the user named, which may be a link; None where the path itself was named,
            and the system finds its way.

    Yields:
        The descriptor; None where no directory between root and path could be a link. See `name_within`.
    """
    if root is None or path.parent == root:
        yield None
        return
    first, *others = path.parent.relative_to(root).parts
    descriptors = [_open_directory(root / first, None)]
    try:
        for name in others:
            descriptors.append(_open_directory(name, descriptors[-1]))
        yield descriptors[-1]
    finally:
        for descriptor in descriptors:
            close_quietly(descriptor)


def close_quietly(fd: int) -> None:
    """Close what nothing was written through: an error loses nothing, and the descriptor is gone."""
    with contextlib.suppress(OSError):
        os.close(fd)


def name_within(parent: int | None, path: Path) -> str | Path:
    """What to call a path beside what `parent_directory` gave."""
    return path if parent is None else path.name


def _open_directory(name: str | Path, parent: int | None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def open_file(path: Path, flags: int, *, root: Path | None = None, doing: str = "read") -> int:
    """Open a regular file; never a link below the root, and never a pipe, a socket or a device.

    Args:
        path: The file.
        flags: As for ``os.open``.
        root: See `parent_directory`.
        doing: A verb for the message of an error, such as ``"write"``.

    Returns:
        Its descriptor.
    """
    inside = os.O_NOFOLLOW if root is not None else 0
    with explained(doing, path), parent_directory(path, root) as parent:
        # Without O_NONBLOCK a pipe would be waited for.
        fd = os.open(
            name_within(parent, path), flags | inside | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=parent
        )
        try:
            is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:
            close_quietly(fd)
            raise
    if not is_regular:
        close_quietly(fd)
        raise CheckpointError(
            f"cannot {doing} '{path}': it is no regular file.",
            remedy="A checkpoint holds plain files and directories only; remove it.",
        )
    return fd


def look(path: Path, root: Path | None) -> os.stat_result | None:
    """What is at a path, links below the root not followed; None if nothing is.

    Raises:
        CheckpointError: The disk fails, so that nobody knows.
    """
    with explained("look at", path), contextlib.suppress(ValueError):
        try:
            with parent_directory(path, root) as parent:
                return os.stat(name_within(parent, path), dir_fd=parent, follow_symlinks=root is None)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
    return None


def is_file(path: Path) -> bool:
    """Whether a regular file is there; also for names that the system could not even look up."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def write_file(path: Path, data: bytes, *, root: Path | None = None) -> None:
    """Create a file that does not exist yet and force it to disk."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root=root, doing="write")
    with explained("write", path):
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to disk, so that they survive a crash of the machine."""
    with explained("sync", path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            close_quietly(fd)


def make_directories(path: Path) -> None:
    """Make a directory and those above it, and force the name of each new one to disk."""
    with explained("create", path):
        new = [place for place in (path, *path.parents) if not os.path.lexists(place)]
        path.mkdir(parents=True, exist_ok=True)
    sync_directory(path.parent)
    for place in new[1:]:
        if os.access(place.parent, os.R_OK):  # else nobody can force its names to disk
            sync_directory(place.parent)


class FileReader:
    """An open file that several threads read at the same time.

    Args:
        path: The file.
        root: See `parent_directory`.
    """

    gap = 4096
    """Unwanted bytes between two wanted ones that cost less to read than to leave out: less than a page."""
    parallel = 2
    """How many threads read faster than fewer."""

    def __init__(self, path: str | os.PathLike[str], *, root: Path | None = None) -> None:
        self._path = os.fspath(path)
        self._fd = open_file(Path(path), os.O_RDONLY, root=root)

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill memory with the bytes from a position on; all of them must be there."""
        done = 0
        with explained("read", self._path):
            while done < len(target):
                count = os.preadv(self._fd, [target[done:]], position + done)
                if count == 0:
                    raise truncated(self._path, position + done, position + len(target))
                done += count

    def close(self) -> None:
        """Close the file."""
        close_quietly(self._fd)


def read_exactly(path: Path, size: int, *, start: int = 0, root: Path | None = None) -> bytes:
    """Read bytes that must be there."""
    fd = open_file(path, os.O_RDONLY, root=root)
    parts, position = [], start
    with explained("read", path):
        try:
            while position < start + size:
                part = os.pread(fd, min(start + size - position, 1 << 26), position)
                if not part:
                    raise truncated(path, position, start + size)
                parts.append(part)
                position += len(part)
        finally:
            close_quietly(fd)
    return b"".join(parts)


def truncated(path: str | os.PathLike[str], position: int, expected: int) -> CheckpointError:
    """The error for a file that ends too early."""
    return CheckpointError(
        f"'{os.fspath(path)}' is truncated: it ends at byte {position}, {expected} were expected.",
        remedy="Restore it from a backup, or resume from another checkpoint.",
    )


# --- what a directory may lead to -----------------------------------------------------------------
# A directory of another program's may lead to itself, and in Hugging Face's cache to its repository. Those
# programs write no links, but people make them, and pass directories on. A link that stays in the directory
# is followed; one that leaves it, a pipe, a socket or a device is refused before anything is read.


_DEPTH = 2
"""Formats look into a directory and those directly in it,"""
_ZERO = "zero"
"""and DeepSpeed's universal one into a folder of this name with a folder for each parameter."""


def require_enclosed(directory: Path) -> None:
    """Refuse a directory of which a part that a format looks at lies elsewhere or is no regular file.

    Raises:
        CheckpointError: With the name of what is refused.
    """
    _check(directory, directory, _DEPTH)


def require_inside(path: Path, directory: Path) -> None:
    """Refuse what is not a regular file or a directory, or leads out of the checkpoint.

    A snapshot in Hugging Face's cache, ``models--*/snapshots/*``, is made of links to files in ``blobs``
    beside ``snapshots``; these are its own.

    Args:
        path: Something in the checkpoint, which need not exist.
        directory: The checkpoint.

    Raises:
        CheckpointError: With its name.
    """
    try:
        target, root = path.resolve(), directory.resolve()
        kind = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:  # such as links in circles
        raise CheckpointError(f"cannot read '{path}': {error}.", remedy=_REMEDY) from error
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise CheckpointError(f"'{path}' is neither a file nor a directory.", remedy="Remove it.")
    homes = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        homes.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"'{path}' is a link that leads out of the checkpoint.", remedy=_REMEDY)


def _check(directory: Path, root: Path, depth: int) -> None:
    with explained("list", directory), os.scandir(directory) as listed:
        entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_file(follow_symlinks=False):
            continue
        if entry.is_symlink() or not entry.is_dir():
            require_inside(path, root)
        if entry.is_symlink() and depth < _DEPTH and entry.is_dir():
            raise CheckpointError(f"'{path}' is a link to a directory.", remedy=_REMEDY)
        if entry.is_dir() and (depth > 1 or _ZERO in (entry.name, directory.name)):
            _check(path, root, depth - 1)


_REMEDY = "Copy the checkpoint with what its links lead to (`cp -rL`), or open a directory without them."


# --- the lock of a save ---------------------------------------------------------------------------
# It keeps two runs from saving to one path at the same time. It is `flock` on a hidden file, so the kernel
# releases it however the process ends, and the file that a killed process leaves behind locks nothing.
# Where the file system has no such locks there is none.


LOCK = ".saving.lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Lock:
    """A lock that this process holds; made by `acquire`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd: int | None = fd
        self._owner = os.getpid()

    @classmethod
    def acquire(cls, directory: Path) -> Lock | None:
        """Lock a directory.

        Returns:
            The lock; None where the file system has no locks.

        Raises:
            CheckpointError: Somebody else holds it, or the directory cannot be written to.
        """
        path = directory / LOCK
        while True:
            fd = _open(path, directory)
            if fd is None:
                return None
            try:
                if not _flock(fd, directory):
                    with contextlib.suppress(OSError):
                        path.unlink()
                    close_quietly(fd)
                    return None
                if _is_current(path, fd):
                    _sign(fd)
                    return cls(path, fd)
            except CheckpointError:
                close_quietly(fd)
                raise
            close_quietly(fd)  # the run that held it removed the file meanwhile

    def release(self) -> None:
        """Let others save again; does nothing the second time."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if os.getpid() == self._owner:  # and not a forked child, of which it is not the lock
            # A new file is a new lock, so it does not matter that a forked child still has this one open.
            with contextlib.suppress(OSError):
                self._path.unlink()
        close_quietly(fd)

    def __del__(self) -> None:
        self.release()


def _open(path: Path, directory: Path) -> int | None:
    """The lock's file, made if it is not there; None where a full disk has no room for one.

    Raises:
        CheckpointError: Something else stands in its place, or the directory cannot be written to.
    """
    try:
        fd = open_file(path, os.O_RDWR | os.O_CREAT, root=directory, doing="write to")
    except CheckpointError as error:
        if getattr(error.__cause__, "errno", None) in _FULL:
            return None
        raise
    try:
        with explained("lock", directory):
            names = os.fstat(fd).st_nlink
    except CheckpointError:
        close_quietly(fd)
        raise
    if names > 1:
        close_quietly(fd)
        raise CheckpointError(
            f"cannot lock '{directory}': '{path.name}' has a second name elsewhere, which no save gives it.",
            remedy=f"Remove '{path}'.",
        )
    return fd


def _flock(fd: int, directory: Path) -> bool:
    """Take the lock; false where the file system has none.

    Raises:
        CheckpointError: Somebody else holds it.
    """
    with explained("lock", directory):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(
                    f"cannot save to '{directory}': another run is saving to it now ({_owner(fd)}).",
                    remedy="Give every run a path of its own.",
                ) from error
            if error.errno not in _UNSUPPORTED:
                raise
            return False
    return True


def _sign(fd: int) -> None:
    """Write down who holds the lock. That is for people: a full disk may have no place for it."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _owner(fd: int) -> str:
    with contextlib.suppress(OSError):
        return _printable(os.pread(fd, 200, 0)) or "another process"
    return "another process"


def _printable(raw: bytes) -> str:
    """What a file that anybody may have written says, without what would steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in raw.decode(errors="replace"))


def _is_current(path: Path, fd: int) -> bool:
    with explained("lock", path.parent), contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    return False


# --- streams --------------------------------------------------------------------------------------
# Bytes are collected in a few page-aligned buffers that a thread hands to a `Sink` while the caller fills
# the next one. On a local disk that is direct I/O, which avoids the page cache: that is slower and would
# push out what training needs. Where the file system refuses it, the same code writes through the cache.


ALIGNMENT = 4096
"""Direct I/O needs positions, lengths and memory aligned to this (at most, on known file systems)."""

_BUFFER = 8 << 20
_BUFFERS = 3

_spare: list[mmap.mmap] = []
"""Used without a lock, by steps that are whole in themselves: a signal's handler may save in between."""


class Sink(Protocol):
    """A new file that is written from its beginning to its end; errors are `CheckpointError`."""

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Add bytes.

        Args:
            buffer: Page-aligned memory that begins with them; what follows may be overwritten.
            length: The number of bytes that count.
            position: The offset in the file where they belong, after those before.
        """

    def finish(self, size: int) -> None:
        """Make the file last, with this length."""

    def close(self) -> None:
        """Let go of it; what was not finished need not be there."""


class StreamWriter:
    """Append bytes to a new file, which is there to stay after `finish`.

    Used as a context manager: leaving it by an exception stops the thread and closes the file.

    Args:
        sink: The file.
        size: The length in bytes that it will have.

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
        for buffer in _borrow():
            self._free.put(buffer)
        self._buffer = self._free.get()
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._thread = threading.Thread(target=self._drain, name="nnx-save", daemon=True)
        self._is_alone = False
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12 starts none for a background save that outlasts the program
            self._is_alone = True

    def append(self, data: memoryview) -> memoryview:
        """Add bytes to the file.

        Returns:
            The copy of the bytes that will be written, if it is in one piece, else the bytes themselves.
            It is fresh in the processor's cache, and valid until the next call.
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
        """Write what is left and make the file last."""
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
        _give_back(buffers)
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
                except BaseException as error:  # handed to the caller
                    self._error = error
            self._free.put(buffer)


class DirectFile:
    """A file on a mounted file system, written around the page cache where that is possible.

    Args:
        path: The file, which must not exist.
        root: See `nnx_checkpoint.storage.files.parent_directory`.

    Raises:
        CheckpointError: It cannot be created.
    """

    def __init__(self, path: Path, *, root: Path | None = None) -> None:
        self._path = path
        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root=root, doing="write")
        _enter_direct(self._fd)

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Write whole pages; what is too much is cut off again by `finish`."""
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
        """Cut the file to its length and force it to disk."""
        with explained("write", self._path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close it; a network's file system may tell only now that it could not write."""
        with explained("write", self._path):
            os.close(self._fd)


def _enter_direct(fd: int) -> None:
    """Write around the page cache, where the file system can."""
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))


def _leave_direct(fd: int) -> bool:
    """Continue through the page cache; false if that is what happened already."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


def _borrow() -> list[mmap.mmap]:
    buffers: list[mmap.mmap] = []
    with contextlib.suppress(IndexError):
        while len(buffers) < _BUFFERS:
            buffers.append(_spare.pop())
    # Private, because a forked process would otherwise write into the buffers of its parent and siblings.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return buffers + [mmap.mmap(-1, _BUFFER, flags=flags) for _ in range(_BUFFERS - len(buffers))]


def _give_back(buffers: list[mmap.mmap]) -> None:
    """Keep one set for the next save: fresh memory costs more than writing to it."""
    _spare.extend(buffers)
    del _spare[_BUFFERS:]

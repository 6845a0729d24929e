"""Lock a checkpoint against a second run that saves to the same path.

The lock is `flock` on a hidden file. The kernel releases it however the process ends, so a kill leaves a file
but no lock. A file system without `flock` has no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from nnx_base.errors import CheckpointError
from nnx_checkpoint.storage.files import close_quietly, explained, open_file

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
            The lock; None if the file system has no locks.

        Raises:
            CheckpointError: Another run holds the lock, or the directory is not writable.
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
            close_quietly(fd)  # its last owner removed the file: this lock protects nothing

    def release(self) -> None:
        """Release the lock (no effect the second time)."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if os.getpid() == self._owner:  # not in a forked child, which does not own it
            # The next run creates a new file, so a forked child that still has this one open locks nothing.
            with contextlib.suppress(OSError):
                self._path.unlink()
        close_quietly(fd)

    def __del__(self) -> None:
        self.release()


def _open(path: Path, directory: Path) -> int | None:
    """Open or create the lock's file; return None if a full disk has no space for it.

    Raises:
        CheckpointError: The path is not a lock's file, or the directory is not writable.
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
    """Take the lock; return False if the file system has none.

    Raises:
        CheckpointError: Another run holds the lock.
    """
    with explained("lock", directory):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(
                    f"cannot save to '{directory}': another run is saving to it now ({_owner(fd)}).",
                    remedy="Give every run its own path.",
                ) from error
            if error.errno not in _UNSUPPORTED:
                raise
            return False
    return True


def _sign(fd: int) -> None:
    """Write the lock's owner into the file, for error messages (ignore a full disk)."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _owner(fd: int) -> str:
    with contextlib.suppress(OSError):
        return _printable(os.pread(fd, 200, 0)) or "another process"
    return "another process"


def _printable(raw: bytes) -> str:
    """Return the text of an untrusted file without terminal control characters."""
    return "".join(char if char.isprintable() else "?" for char in raw.decode(errors="replace"))


def _is_current(path: Path, fd: int) -> bool:
    with explained("lock", path.parent), contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    return False

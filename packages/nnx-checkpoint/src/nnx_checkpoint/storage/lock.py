"""The lock of a save.

It keeps two runs from saving to one path at the same time. It is `flock` on a hidden file, so the kernel
releases it however the process ends, and the file that a killed process leaves behind locks nothing.
Where the file system has no such locks there is none.
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
    """Return the text of an untrusted file without terminal control characters."""
    return "".join(char if char.isprintable() else "?" for char in raw.decode(errors="replace"))


def _is_current(path: Path, fd: int) -> bool:
    with explained("lock", path.parent), contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    return False

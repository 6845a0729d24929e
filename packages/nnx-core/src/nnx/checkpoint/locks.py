"""The lock that keeps two runs from saving to one path at the same time.

It is `flock` on a hidden file, so the kernel releases it however the process ends, and the file that a
killed process leaves behind locks nothing. Where the file system has no such locks there is none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from nnx.checkpoint.files import explained
from nnx.errors import CheckpointError

__all__ = ["LOCK", "Lock"]

LOCK = ".saving.lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}


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
            with explained("write to", directory):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_current(path, fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                    return cls(path, fd)
            except OSError as error:
                owner = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
                os.close(fd)
                if error.errno in _UNSUPPORTED:
                    path.unlink(missing_ok=True)
                    return None
                if error.errno not in _TAKEN:
                    raise
                raise CheckpointError(
                    f"cannot save to '{directory}': another run is saving to it now ({owner}).",
                    remedy="Give every run a path of its own; what was saved there is intact.",
                ) from error
            os.close(fd)  # who held it removed the file meanwhile

    def release(self) -> None:
        """Let others save again; does nothing the second time."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if os.getpid() == self._owner:  # and not a forked child, of which it is not the lock
            # A new file is a new lock, so it does not matter that a forked child still has this one open.
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(fd)

    def __del__(self) -> None:
        self.release()


def _is_current(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False

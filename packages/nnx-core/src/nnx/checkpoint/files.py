"""Files that are written once: created exclusively, forced to disk, and never touched again.

This module owns errors of the operating system: each becomes a `CheckpointError` with path and remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from nnx.errors import CheckpointError

__all__ = ["FileReader", "explained", "read_exactly", "sync_directory", "truncated", "write_file"]

_REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere.",
    errno.EDQUOT: "Free space within the quota, or save elsewhere.",
    errno.EFBIG: "Raise the file size limit (`ulimit -f`), or save elsewhere.",
    errno.EACCES: "Make the directory writable for this user, or save elsewhere.",
    errno.EPERM: "Make the directory writable for this user, or save elsewhere.",
    errno.EROFS: "Save to a file system that is mounted writable.",
    errno.ENOENT: "Every rank must see the same directory, and nobody may remove it meanwhile.",
    errno.EEXIST: "Let only one run save to this path.",
    errno.ENOTDIR: "Choose a path below directories only.",
    errno.EIO: "Check the disk, and save elsewhere.",
}


@contextlib.contextmanager
def explained(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the operating system into one that says what failed, where and what helps.

    Args:
        doing: What was being done, such as ``"write"``.
        path: The file or directory.
    """
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        reason = os.strerror(code) if code else str(error)
        raise CheckpointError(
            f"cannot {doing} '{os.fspath(path)}': {reason}.",
            remedy=_REMEDIES.get(code, "Check the path and the file system."),
        ) from error


def write_file(path: Path, data: bytes) -> None:
    """Create a file that does not exist yet and force it to disk."""
    with explained("write", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
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
            with contextlib.suppress(OSError):  # some network file systems cannot, and need not
                os.fsync(fd)
        finally:
            os.close(fd)


class FileReader:
    """An open file that several threads read at the same time.

    Args:
        path: The file.
    """

    gap = 4096
    """Unwanted bytes between two wanted ones that cost less to read than to leave out: less than a page."""
    parallel = 2
    """How many threads read faster than fewer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        with explained("read", path):
            self._fd = os.open(path, os.O_RDONLY)

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
        os.close(self._fd)


def read_exactly(path: Path, size: int, *, start: int = 0) -> bytes:
    """Read bytes that must be there."""
    with explained("read", path), path.open("rb", buffering=0) as file:
        parts, position = [], start
        while position < start + size:
            part = os.pread(file.fileno(), min(start + size - position, 1 << 26), position)
            if not part:
                raise truncated(path, position, start + size)
            parts.append(part)
            position += len(part)
    return b"".join(parts)


def truncated(path: str | os.PathLike[str], position: int, expected: int) -> CheckpointError:
    """The error for a file that ends too early."""
    return CheckpointError(
        f"'{os.fspath(path)}' is truncated: it ends at byte {position}, {expected} were expected.",
        remedy="Restore it from a backup, or resume from another checkpoint.",
    )

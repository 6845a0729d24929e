"""Read and write files of a checkpoint, each created exclusively, fsynced, and never changed again.

This module converts errors of the operating system into a `CheckpointError` with path and remedy. It also
confines a checkpoint to its root directory: below that it opens nothing through a link, and reads and writes
regular files only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nnx_base.errors import CheckpointError

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EROFS}
"""Errors of file systems that cannot fsync a directory, and need not."""

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
"""Errors that mean "the name does not exist"; others, such as a failing disk, leave that open."""

_FORBIDDEN = "Make the directory writable for this user, or save elsewhere."
_LOOKING = {"read", "list", "look at"}
_REMEDIES = {
    errno.ENOSPC: "Free space there, or save elsewhere.",
    errno.EDQUOT: "Free space within the quota, or save elsewhere.",
    errno.EFBIG: "Raise the file size limit (`ulimit -f`), or save elsewhere.",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "Save to a file system that is mounted writable.",
    errno.ENOENT: "Every rank must see the same directory, and no process may remove it during a save.",
    errno.EEXIST: "Let only one run save to this path.",
    errno.ENOTDIR: "Choose a path below directories only.",
    errno.EIO: "Check the disk, and save elsewhere.",
    errno.ESTALE: "Check that the network file system is still mounted, and save again.",
    errno.ELOOP: "A checkpoint holds no links: copy it with their targets (`cp -rL`), or remove them.",
}


@contextlib.contextmanager
def explained(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager that converts an error of the operating system into one with path and remedy.

    Args:
        doing: The verb of the failed operation, such as ``"write"``.
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
    """Open the parent directory of a path, following no links below a root.

    Args:
        path: A path below the root.
        root: The directory that the user named, which may be a link; None if the user named the path itself,
            which may then contain links.

    Yields:
        The descriptor; None if no directory between root and path can be a link. See `name_within`.
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
    """Close a descriptor that nothing was written through, and ignore errors (no data can be lost)."""
    with contextlib.suppress(OSError):
        os.close(fd)


def name_within(parent: int | None, path: Path) -> str | Path:
    """Return the name of a path relative to the descriptor of `parent_directory`."""
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
    """Open a regular file; refuse a link below the root, a pipe, a socket or a device.

    Args:
        path: The file.
        flags: Flags of ``os.open``.
        root: The root of `parent_directory`.
        doing: A verb for the message of an error, such as ``"write"``.

    Returns:
        The descriptor.
    """
    inside = os.O_NOFOLLOW if root is not None else 0
    with explained(doing, path), parent_directory(path, root) as parent:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
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
            f"cannot {doing} '{path}': it is not a regular file.",
            remedy="A checkpoint holds plain files and directories only; remove it.",
        )
    return fd


def look(path: Path, root: Path | None) -> os.stat_result | None:
    """Return the status of a path without following links below the root; None if it does not exist.

    Raises:
        CheckpointError: The disk failed, so the answer is unknown.
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
    """Return True if a regular file exists (False for invalid names)."""
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
    """Fsync a directory, so that its names survive a crash of the machine."""
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
    """Create a directory and its parents, and fsync the name of each new one."""
    with explained("create", path):
        new = [place for place in (path, *path.parents) if not os.path.lexists(place)]
        path.mkdir(parents=True, exist_ok=True)
    sync_directory(path.parent)
    for place in new[1:]:
        if os.access(place.parent, os.R_OK):  # an unreadable directory cannot be fsynced
            sync_directory(place.parent)


class FileReader:
    """An open file that several threads read at the same time.

    Args:
        path: The file.
        root: The root of `parent_directory`.
    """

    gap = 4096
    """Bytes between two ranges that cost less to read than a second request: less than a page."""
    parallel = 2
    """The number of threads that read fastest."""

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
    """Return the error for a file that ends too early."""
    return CheckpointError(
        f"'{os.fspath(path)}' is truncated: it ends at byte {position}, {expected} were expected.",
        remedy="Restore it from a backup, or resume from another checkpoint.",
    )


# A directory of another program may contain links: people make them, and Hugging Face's cache links into its
# repository. A link that stays inside the directory is followed. One that leaves it, a pipe, a socket or a
# device is refused before any read: otherwise a received checkpoint could read the user's other files.


_DEPTH = 2
"""Formats search a directory and its direct subdirectories,"""
_ZERO = "zero"
"""and DeepSpeed's universal format searches a folder of this name with a folder for each parameter."""


def require_enclosed(directory: Path) -> None:
    """Refuse a directory with a link that leaves it, or a special file, where a format searches.

    Raises:
        CheckpointError: The message names the refused path.
    """
    _check(directory, directory, _DEPTH)


def require_inside(path: Path, directory: Path) -> None:
    """Refuse anything but regular files and directories, and paths that lead out of the checkpoint.

    A snapshot in Hugging Face's cache, ``models--*/snapshots/*``, is made of links to files in ``blobs``
    beside ``snapshots``; these are its own.

    Args:
        path: A path in the checkpoint, which need not exist.
        directory: The checkpoint.

    Raises:
        CheckpointError: The message names the refused path.
    """
    try:
        target, root = path.resolve(), directory.resolve()
        kind = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:  # links in a cycle, for example
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


_REMEDY = "Copy the checkpoint with the targets of its links (`cp -rL`), or open one without links."

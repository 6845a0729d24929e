"""Places: directories and files that a checkpoint lies in, on this machine's file systems or far away.

Everything of a checkpoint is read and written through a `Place`, so that what is above need not know
whether it is a path or a URL. This module owns the interface and its local half; `nnx.checkpoint.urls` is
the other half, imported only when a URL is used. Neither knows what a checkpoint is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

from typing_extensions import override

from nnx.checkpoint.files import (
    FileReader,
    close_quietly,
    explained,
    look,
    name_within,
    open_file,
    parent_directory,
    read_exactly,
    sync_directory,
    write_file,
)
from nnx.checkpoint.locks import Lock
from nnx.errors import CheckpointError

if TYPE_CHECKING:
    from nnx.checkpoint.stream import StreamWriter

__all__ = ["LocalPlace", "Location", "Place", "Reader", "place_of"]

Location = str | os.PathLike[str]
"""A path, or a URL such as ``s3://bucket/run/last.ckpt``."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::.*)?://")
_SQUEEZED_URL = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|hdfs|https?|memory):/[^/]")


class Reader(Protocol):
    """An open file that several threads read at the same time."""

    gap: int
    """Unwanted bytes between two wanted ones that cost less to read than to leave out."""
    parallel: int
    """How many threads read faster than fewer."""

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill memory with the bytes from a position on; all of them must be there."""

    def close(self) -> None:
        """Close the file."""


def place_of(location: Location | Place) -> Place:
    """The place at a path or a URL; nothing has to be there.

    Raises:
        CheckpointError: Nothing can open URLs of this kind, or the package that does is missing.

    Example:
        >>> str(place_of("runs/last.ckpt") / "manifest.json")
        'runs/last.ckpt/manifest.json'
    """
    if isinstance(location, Place):
        return location
    text = os.fspath(location)
    for local in ("file://", "local://"):
        text = text.removeprefix(local)
    if _URL.match(text):
        from nnx.checkpoint.urls import UrlPlace

        return UrlPlace.of(text)
    if _SQUEEZED_URL.match(text):
        raise CheckpointError(
            f"'{text}' was a URL, of which pathlib removed a slash.",
            remedy="Pass URLs as strings, not as pathlib.Path.",
        )
    return LocalPlace(Path(text))


class Place(ABC):
    """A file, a directory, or nothing yet, below which ``/`` leads to others.

    Everything raises `CheckpointError` with the place and a remedy.
    """

    @property
    @abstractmethod
    def location(self) -> Path | str:
        """What Python's other libraries take: a `pathlib.Path`, or a URL."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its last part."""

    @abstractmethod
    def __truediv__(self, name: str) -> Place: ...

    @override
    def __str__(self) -> str:
        return str(self.location)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    # --- looking ---------------------------------------------------------------------------------

    @abstractmethod
    def kind(self) -> Literal["file", "directory", "other"] | None:
        """What is there; ``other`` for what is neither, such as a link inside a directory that was named."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in the directory, sorted; nothing if there is none."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Lengths of those of these files that are in the directory."""

    def size(self) -> int:
        """Length of the file."""
        with self.explained("read"):
            return self._size()

    # --- reading ---------------------------------------------------------------------------------

    @abstractmethod
    def reader(self) -> Reader:
        """Open the file for many reads."""

    @abstractmethod
    def read(self, size: int, *, start: int = 0) -> bytes:
        """Read bytes that must be there."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """The file as Python's file object, for libraries that want one."""

    # --- writing ---------------------------------------------------------------------------------

    @abstractmethod
    def make(self) -> None:
        """Make the directory and those above it."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Create a file that does not exist yet and force it to disk."""

    @abstractmethod
    def stream(self, size: int) -> StreamWriter:
        """Create a file that does not exist yet, to be written part by part in bounded memory."""

    @abstractmethod
    def replace(self, data: bytes, *, temporary: str) -> None:
        """Replace the file, or create it, in one step: a reader sees the old or the new, never a mixture.

        Args:
            data: The new contents.
            temporary: A name beside it that may be used meanwhile.

        Raises:
            CheckpointError: It failed; the new contents may be there all the same, if not for good.
        """

    @abstractmethod
    def sync(self) -> None:
        """Force the names in the directory to disk."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the file, or the directory with all in it; nothing happens where there is none."""

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Remove the directory unless something is in it; never fails."""

    @abstractmethod
    def lock(self) -> Lock | None:
        """Keep every other run from saving here, until it is released or this process ends.

        Returns:
            The lock; None where there is no way to have one.

        Raises:
            CheckpointError: Another run has it.
        """

    @abstractmethod
    def explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Turn errors of the system into `CheckpointError`."""

    @abstractmethod
    def _size(self) -> int: ...


class LocalPlace(Place):
    """A path on a mounted file system.

    Args:
        path: The path.
        root: The place that was named, and from which ``/`` led here. It may be a link; what lies below is
            never reached through one.
    """

    def __init__(self, path: Path, *, root: Path | None = None) -> None:
        self.path = path
        self._root = root

    @property
    @override
    def location(self) -> Path:
        return self.path

    @property
    @override
    def name(self) -> str:
        return self.path.name

    @override
    def __truediv__(self, name: str) -> LocalPlace:
        return LocalPlace(self.path / name, root=self._root or self.path)

    @override
    def kind(self) -> Literal["file", "directory", "other"] | None:
        found = look(self.path, self._root)  # one look: another run may make it between two
        if found is None:
            return None
        if stat.S_ISDIR(found.st_mode):
            return "directory"
        return "file" if stat.S_ISREG(found.st_mode) else "other"

    @override
    def names(self) -> list[str]:
        with self.explained("list"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.path))  # noqa: PTH208
        return []

    @override
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        inside = self.path / "any name"
        with (
            self.explained("read"),
            contextlib.suppress(FileNotFoundError),
            parent_directory(inside, self._root or self.path) as directory,
        ):
            for name in names:
                file = self.path / name
                with explained("read", file), contextlib.suppress(FileNotFoundError):
                    at = name_within(directory, file)
                    found[name] = os.stat(at, dir_fd=directory, follow_symlinks=False).st_size
        return found

    @override
    def _size(self) -> int:
        fd = open_file(self.path, os.O_RDONLY, root=self._root)
        try:
            return os.fstat(fd).st_size
        finally:
            close_quietly(fd)

    @override
    def reader(self) -> FileReader:
        return FileReader(self.path, root=self._root)

    @override
    def read(self, size: int, *, start: int = 0) -> bytes:
        return read_exactly(self.path, size, start=start, root=self._root)

    @override
    def open(self) -> BinaryIO:
        return os.fdopen(open_file(self.path, os.O_RDONLY, root=self._root), "rb")

    @override
    def make(self) -> None:
        with self.explained("create"):
            self.path.mkdir(parents=True, exist_ok=True)
        sync_directory(self.path.parent)

    @override
    def write(self, data: bytes) -> None:
        write_file(self.path, data, root=self._root)

    @override
    def stream(self, size: int) -> StreamWriter:
        from nnx.checkpoint.stream import DirectFile, StreamWriter

        return StreamWriter(DirectFile(self.path, root=self._root), size=size)

    @override
    def replace(self, data: bytes, *, temporary: str) -> None:
        write_file(self.path.with_name(temporary), data, root=self._root)
        with self.explained("replace"), parent_directory(self.path, self._root) as parent:
            names = (name_within(parent, path) for path in (self.path.with_name(temporary), self.path))
            os.replace(*names, src_dir_fd=parent, dst_dir_fd=parent)
        sync_directory(self.path.parent)

    @override
    def sync(self) -> None:
        sync_directory(self.path)

    @override
    def remove(self) -> None:
        with (
            self.explained("remove"),
            contextlib.suppress(FileNotFoundError),
            parent_directory(self.path, self._root) as parent,
        ):
            name = name_within(parent, self.path)
            if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(self.path)  # which does not follow links either
            else:
                os.unlink(name, dir_fd=parent)

    @override
    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @override
    def lock(self) -> Lock | None:
        return Lock.acquire(self.path)

    @override
    def explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return explained(doing, self.path)

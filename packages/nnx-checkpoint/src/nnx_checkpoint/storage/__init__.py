"""Define the storage interface of checkpoints: a `Place` is a file or directory, local or behind a URL.

All files of a checkpoint are read and written through this interface, so the layers above treat paths and
URLs alike. `nnx_checkpoint.storage.locations` implements it for mounted file systems, and chooses the
implementation of a location. `nnx_checkpoint.storage.remote` implements it for URLs.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from typing_extensions import override

from nnx_checkpoint.storage.lock import Lock
from nnx_checkpoint.storage.streams import StreamWriter

__all__ = ["Location", "Place", "Reader"]

Location = str | os.PathLike[str]
"""A path, or a URL such as ``s3://bucket/run/last.ckpt``."""


class Reader(Protocol):
    """An open file that several threads read at the same time."""

    gap: int
    """Bytes between two ranges that cost less to read than a second request."""
    parallel: int
    """The number of threads that read fastest."""

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill memory with the bytes from a position on (raise if the file is shorter)."""

    def close(self) -> None:
        """Close the file."""


class Place(ABC):
    """A file or directory, which need not exist; ``/`` gives the places below it.

    All methods raise `CheckpointError` with the place and a remedy.
    """

    @property
    @abstractmethod
    def location(self) -> Path | str:
        """The form for other Python libraries: a `pathlib.Path`, or a URL."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last component of the path."""

    @abstractmethod
    def __truediv__(self, name: str) -> Place: ...

    @override
    def __str__(self) -> str:
        return str(self.location)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @abstractmethod
    def kind(self) -> Literal["file", "directory", "other"] | None:
        """Return the kind of the place; ``other`` for a link inside the opened directory, for example."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names in the directory, sorted; none if it does not exist."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the lengths of the named files that exist in the directory."""

    def size(self) -> int:
        """Return the length of the file."""
        with self.explained("read"):
            return self._size()

    @abstractmethod
    def reader(self) -> Reader:
        """Open the file for many reads."""

    @abstractmethod
    def read(self, size: int, *, start: int = 0) -> bytes:
        """Read bytes (raise if the file is shorter)."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Return a Python file object, for libraries that require one."""

    @abstractmethod
    def make(self) -> None:
        """Make the directory and those above it."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Create a file, which must not exist, and fsync it."""

    @abstractmethod
    def stream(self, size: int) -> StreamWriter:
        """Create a file, which must not exist, to write in bounded memory."""

    @abstractmethod
    def replace(self, data: bytes, *, temporary: str) -> None:
        """Replace or create the file atomically: a reader sees the old or the new content, never a mixture.

        Args:
            data: The new content.
            temporary: A name beside the file that may be used meanwhile.

        Raises:
            CheckpointError: The replacement failed. The new content may be visible all the same, but a crash
                of the machine may undo it.
        """

    @abstractmethod
    def sync(self) -> None:
        """Fsync the directory, so that its names survive a crash."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the file, or the directory with its content, if it exists."""

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Remove the directory if it is empty; never raise."""

    @abstractmethod
    def lock(self) -> Lock | None:
        """Lock the directory against saves of other runs, until the release or the end of this process.

        Returns:
            The lock; None if the storage has no locks.

        Raises:
            CheckpointError: Another run holds the lock.
        """

    @abstractmethod
    def explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Context manager that converts errors of the system into `CheckpointError`."""

    @abstractmethod
    def _size(self) -> int: ...

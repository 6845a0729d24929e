"""The storage interface of checkpoints: a `Place` is a file or a directory, local or behind a URL.

Everything of a checkpoint is read and written through this interface, so that what is above need not know
whether it is a path or a URL. `nnx_checkpoint.storage.locations` has the half for this machine's file systems
and finds the right one; `nnx_checkpoint.storage.remote` is the other half. Neither knows what a checkpoint
is.
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
    """Unwanted bytes between two wanted ones that cost less to read than to leave out."""
    parallel: int
    """How many threads read faster than fewer."""

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill memory with the bytes from a position on; all of them must be there."""

    def close(self) -> None:
        """Close the file."""


class Place(ABC):
    """A file, a directory, or nothing yet, below which ``/`` leads to others.

    Everything raises `CheckpointError` with the place and a remedy.
    """

    @property
    @abstractmethod
    def location(self) -> Path | str:
        """The form for other Python libraries: a `pathlib.Path`, or a URL."""

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

    @abstractmethod
    def kind(self) -> Literal["file", "directory", "other"] | None:
        """Return the kind of the place; ``other`` for e.g. a link inside a directory that was named."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names in the directory, sorted; none if it does not exist."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Lengths of those of these files that are in the directory."""

    def size(self) -> int:
        """Length of the file."""
        with self.explained("read"):
            return self._size()

    @abstractmethod
    def reader(self) -> Reader:
        """Open the file for many reads."""

    @abstractmethod
    def read(self, size: int, *, start: int = 0) -> bytes:
        """Read bytes that must be there."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """The file as Python's file object, for libraries that want one."""

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

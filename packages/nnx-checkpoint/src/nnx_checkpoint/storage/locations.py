"""Implement `nnx_checkpoint.storage` for mounted file systems, and find the place of a path or URL.

`nnx_checkpoint.storage.remote` is imported only when a URL is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal

from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.storage import Location, Place
from nnx_checkpoint.storage.files import (
    FileReader,
    close_quietly,
    explained,
    look,
    make_directories,
    name_within,
    open_file,
    parent_directory,
    read_exactly,
    sync_directory,
    write_file,
)
from nnx_checkpoint.storage.lock import Lock
from nnx_checkpoint.storage.streams import DirectFile, StreamWriter

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::.*)?://")
_SQUEEZED_URL = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|hdfs|https?|memory):/[^/]")


def place_of(location: Location | Place) -> Place:
    """Return the place at a path or a URL, which need not exist.

    Raises:
        CheckpointError: The protocol of the URL is unknown, or its package is not installed.

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
        from nnx_checkpoint.storage.remote import UrlPlace

        return UrlPlace.of(text)
    if _SQUEEZED_URL.match(text):
        raise CheckpointError(
            f"'{text}' was a URL, and pathlib removed a slash of it.",
            remedy="Pass URLs as strings, not as pathlib.Path.",
        )
    return LocalPlace(Path(text))


class LocalPlace(Place):
    """A path on a mounted file system.

    Args:
        path: The path.
        root: The path that the user named and that ``/`` started from. It may be a link; no link below it is
            followed.
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
        found = look(self.path, self._root)  # one `stat`: another run may create it between two
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
        make_directories(self.path)

    @override
    def write(self, data: bytes) -> None:
        write_file(self.path, data, root=self._root)

    @override
    def stream(self, size: int) -> StreamWriter:
        return StreamWriter(DirectFile(self.path, root=self._root), size=size)

    @override
    def replace(self, data: bytes, *, temporary: str) -> None:
        # The order commits: the content is on disk before the rename shows it, and the rename is atomic. The
        # fsync of the directory comes last: without it a crash could undo the rename after the collection of
        # old saves.
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
                shutil.rmtree(self.path)  # does not follow links either
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

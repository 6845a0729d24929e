"""A committed save on disk: its manifest and index, and its files read with their digests checked.

Nothing below trusts the disk: every byte that leaves this module was compared with a digest first.
It imports neither torch nor Lightning, so that a checkpoint can be inspected and verified quickly.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nnx.checkpoint.files import FileReader, explained, read_exactly
from nnx.checkpoint.index import INDEX, Index, decode_index
from nnx.checkpoint.manifest import MANIFEST, Manifest, decode_manifest, digest
from nnx.errors import CheckpointError

__all__ = ["Source", "is_checkpoint", "read_manifest"]

_MAX_MANIFEST = 1 << 30


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether this path looks like an nnx checkpoint, damaged or not."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at a path.

    Raises:
        CheckpointError: There is no checkpoint, or its manifest is damaged or of a newer format.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(
            f"'{path}' is not an nnx checkpoint: {_why_not(path)}.",
            remedy="Check the path; a checkpoint is a directory with a file 'manifest.json'.",
        )
    with explained("read", manifest):
        size = manifest.stat().st_size
    if size > _MAX_MANIFEST:
        raise CheckpointError(f"'{manifest}' is damaged: it has {size} bytes.", remedy="Check the path.")
    return decode_manifest(read_exactly(manifest, size), source=str(manifest))


def _why_not(path: Path) -> str:
    if not path.exists():
        return "there is no such directory"
    if not path.is_dir():
        return "it is a file"
    return f"it has no {MANIFEST}; a first save that was interrupted leaves none"


@dataclass
class Source:
    """An opened save.

    Attributes:
        path: The checkpoint's directory.
        manifest: Its manifest.
    """

    path: Path
    manifest: Manifest
    _checked: dict[str, memoryview] = field(default_factory=dict)
    _blocks: dict[str, dict[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path) -> Source:
        """Check the manifest, every file's length, and the index."""
        source = cls(path, read_manifest(path))
        for name, entry in source.manifest.files.items():
            source.check_size(name, entry.size)
        source.index  # noqa: B018 - decoding it checks it
        return source

    @property
    def directory(self) -> Path:
        """Where the save's files are."""
        return self.path / self.manifest.save_id

    @property
    def block(self) -> int:
        """Bytes of tensor data under one checksum."""
        return self.manifest.block

    def where(self, file: str) -> str:
        """The path of one of the save's files."""
        return str(self.directory / file)

    def reader(self, file: str) -> FileReader:
        """Open a rank file, after checking its header and its checksums."""
        self.sums(file)
        return FileReader(self.directory / file)

    @cached_property
    def index(self) -> Index:
        """What is stored where."""
        if INDEX not in self.manifest.files:
            raise CheckpointError(f"'{self.path / MANIFEST}' lists no {INDEX}.", remedy="Check the path.")
        raw = self.read_file(INDEX)
        return decode_index(raw, self.manifest, source=str(self.directory / INDEX))

    def check_size(self, name: str, size: int) -> None:
        """Compare a file's length with the manifest."""
        path = self.directory / name
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"'{path}' is missing.", remedy=_RESTORE) from None
        except OSError as error:
            raise CheckpointError(f"cannot read '{path}': {error.strerror}.", remedy=_RESTORE) from error
        if found != size:
            kind = "truncated" if found < size else "too long"
            raise CheckpointError(f"'{path}' is {kind}: {found} bytes, expected {size}.", remedy=_RESTORE)

    def read_file(self, name: str) -> bytes:
        """The part of a file that its digest covers: the whole, or the header of a rank file.

        Raises:
            CheckpointError: The file is missing, too short or damaged.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise CheckpointError(f"'{self.path / MANIFEST}' does not list '{name}'.", remedy=_RESTORE)
        raw = read_exactly(self.directory / name, entry.digested)
        if digest(raw) != entry.digest:
            raise CheckpointError(
                f"'{self.directory / name}' is damaged: bytes 0-{entry.digested} do not match their digest.",
                remedy=_RESTORE,
            )
        return raw

    def first_blocks(self, file: str) -> dict[int, int]:
        """For each position at which a piece of a rank file starts, the number of its first checksum."""
        if file not in self._blocks:
            self._blocks[file] = self.index.first_blocks(file, self.manifest.block)
        return self._blocks[file]

    def sums(self, file: str) -> memoryview:
        """The checksums of a rank file's blocks, after checking that file's header too."""
        with self._lock:
            if file not in self._checked:
                self.read_file(file)
                name = f"{file.rsplit('.', 1)[0]}.sums"
                raw = self.read_file(name)
                count = self.index.block_count(file, self.manifest.block)
                if len(raw) != 8 * count:
                    raise CheckpointError(
                        f"'{self.directory / name}' has {len(raw)} bytes, expected {8 * count}.",
                        remedy=_RESTORE,
                    )
                self._checked[file] = memoryview(struct.pack(f"={count}Q", *struct.unpack(f"<{count}Q", raw)))
            return self._checked[file].cast("Q")


_RESTORE = "Restore it from a backup, or resume from another checkpoint; `nnx ckpt verify` lists all damage."

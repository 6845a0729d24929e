"""Open a committed save: its manifest and index, and its files with their digests checked.

The module never trusts the disk: it compares every byte with a digest before returning it.
It imports neither torch nor Lightning, so that a checkpoint can be inspected and verified quickly.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.index import INDEX, Index, decode_index
from nnx_checkpoint.format.inflight import wait_until_saved
from nnx_checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    begins_as_ours,
    decode_manifest,
    digest,
    is_save_id,
)
from nnx_checkpoint.format.rankfile_header import Offsets
from nnx_checkpoint.storage import Location, Place, Reader
from nnx_checkpoint.storage.locations import place_of

_MAX_MANIFEST = 1 << 30
_HEAD_BYTES = 1024


def is_checkpoint(path: Location) -> bool:
    """Return True if this path looks like an nnx checkpoint, damaged or not."""
    place = place_of(path)
    wait_until_saved(str(place))
    manifest = place / MANIFEST
    if manifest.kind() != "file":
        return False
    return is_our_manifest(manifest) or any(is_save_id(name) for name in place.names())


def is_our_manifest(manifest: Place) -> bool:
    """Return True if a manifest starts like one of nnx, damaged or not (other programs use the same name).

    Raises:
        CheckpointError: The file exists and cannot be read.
    """
    if manifest.kind() != "file":
        return False
    return begins_as_ours(manifest.read(min(manifest.size(), _HEAD_BYTES)))


def read_manifest(path: Place) -> Manifest:
    """Read and check the manifest of the checkpoint at a path.

    Raises:
        CheckpointError: The checkpoint does not exist, or its manifest is damaged or has a newer format.
    """
    wait_until_saved(str(path))
    manifest = path / MANIFEST
    if manifest.kind() != "file":
        raise CheckpointError(
            f"'{path}' is not an nnx checkpoint: {_why_not(path)}.",
            remedy="Check the path; a checkpoint is a directory with a file 'manifest.json'.",
        )
    while True:
        size = manifest.size()
        if size > _MAX_MANIFEST:
            raise CheckpointError(f"'{manifest}' is damaged: it has {size} bytes.", remedy="Check the path.")
        try:
            return decode_manifest(manifest.read(size), source=str(manifest))
        except CheckpointError:
            if manifest.size() == size:  # and no writer replaced it meanwhile
                raise


def is_replaced(path: Place, manifest: Manifest) -> bool:
    """Return True if another save was committed meanwhile, which may have removed this one's files."""
    try:
        return read_manifest(path).save_id != manifest.save_id
    except CheckpointError:
        return False


def _why_not(path: Place) -> str:
    kind = path.kind()
    if kind != "directory":
        return "it is a file" if kind else "there is no such directory"
    return f"it has no {MANIFEST}; a first save that was interrupted leaves none"


@dataclass
class Source:
    """An opened save.

    Attributes:
        path: The checkpoint's directory.
        manifest: Its manifest.
    """

    path: Place
    manifest: Manifest
    _sums: dict[str, memoryview] = field(default_factory=dict)
    _offsets: dict[str, Offsets] = field(default_factory=dict)
    _alike: dict[bytes, Offsets] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def open(cls, path: Location) -> Source:
        """Check the manifest, every file's length, and the index (again if a writer commits meanwhile)."""
        place = place_of(path)
        while True:
            source = cls(place, read_manifest(place))
            try:
                source._check()
            except CheckpointError:
                if is_replaced(place, source.manifest):
                    continue
                raise
            return source

    def _check(self) -> None:
        fault = next(self.faults(), None)
        if fault is not None:
            raise fault[1]
        self.index  # noqa: B018 - decoding the index checks it

    @property
    def directory(self) -> Place:
        """The directory of the save's files."""
        return self.path / self.manifest.save_id

    @property
    def block(self) -> int:
        """Bytes of tensor data under one checksum."""
        return self.manifest.block

    def where(self, file: str) -> str:
        """Return the path of one of the save's files."""
        return str(self.directory / file)

    def reader(self, file: str) -> Reader:
        """Open a rank file after checking its header and its checksums."""
        self.sums(file)
        return (self.directory / file).reader()

    @cached_property
    def index(self) -> Index:
        """The positions of all stored data."""
        if INDEX not in self.manifest.files:
            raise CheckpointError(f"'{self.path / MANIFEST}' lists no {INDEX}.", remedy="Check the path.")
        raw = self.read_file(INDEX)
        return decode_index(raw, self.manifest, source=str(self.directory / INDEX), offsets=self.offsets)

    def faults(self) -> Iterator[tuple[str, CheckpointError]]:
        """Yield every file that is missing or differs in length from the manifest."""
        sizes = self.directory.sizes(self.manifest.files)
        for name, entry in self.manifest.files.items():
            path, found = self.directory / name, sizes.get(name)
            if found is None:
                yield name, CheckpointError(f"'{path}' is missing.", remedy=_RESTORE)
            elif found != entry.size:
                kind = "truncated" if found < entry.size else "too long"
                yield (
                    name,
                    CheckpointError(
                        f"'{path}' is {kind}: {found} bytes, expected {entry.size}.", remedy=_RESTORE
                    ),
                )

    def read_file(self, name: str) -> bytes:
        """Return the bytes that a file's digest covers: all bytes, or the header of a rank file.

        Raises:
            CheckpointError: The file is missing, too short or damaged.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise CheckpointError(f"'{self.path / MANIFEST}' does not list '{name}'.", remedy=_RESTORE)
        raw = (self.directory / name).read(entry.digested)
        if digest(raw) != entry.digest:
            raise CheckpointError(
                f"'{self.directory / name}' is damaged: bytes 0-{entry.digested} do not match their digest.",
                remedy=_RESTORE,
            )
        return raw

    def offsets(self, file: str) -> Offsets:
        """Return the positions of a rank file's entries, after checking its header."""
        with self._lock:
            if file not in self._offsets:
                found = self.index.read_offsets(file, self.read_file(file), self.block)
                # Ranks with shards of equal size write files with equal offsets: keep one copy.
                self._offsets[file] = self._alike.setdefault(found.key, found)
            return self._offsets[file]

    def sums(self, file: str) -> memoryview:
        """Return the checksums of a rank file's blocks, after checking its header too."""
        with self._lock:
            if file not in self._sums:
                count = self.offsets(file).block_count
                name = f"{file.rsplit('.', 1)[0]}.sums"
                raw = self.read_file(name)
                if len(raw) != 8 * count:
                    raise CheckpointError(
                        f"'{self.directory / name}' has {len(raw)} bytes, expected {8 * count}.",
                        remedy=_RESTORE,
                    )
                self._sums[file] = memoryview(struct.pack(f"={count}Q", *struct.unpack(f"<{count}Q", raw)))
            return self._sums[file].cast("Q")


_RESTORE = "Restore it from a backup, or resume from another checkpoint; `nnx ckpt verify` lists all damage."

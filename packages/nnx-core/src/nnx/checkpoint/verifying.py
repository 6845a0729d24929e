"""Verifying: every byte of every file against its digest or checksum.

Imports neither torch nor Lightning. Damage is reported, not raised, so that one run lists all of it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from nnx.checkpoint.files import read_exactly
from nnx.checkpoint.index import INDEX, Index
from nnx.checkpoint.manifest import MANIFEST, DamagedManifestError, FileEntry
from nnx.checkpoint.source import Source, read_manifest
from nnx.errors import CheckpointError

__all__ = ["Damage", "verify"]

_READ = 16 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place.

    Attributes:
        file: The file, relative to the checkpoint's directory.
        start: First byte of the range that does not match.
        stop: One past its last byte.
        problem: What is wrong, for people.
    """

    file: str
    start: int
    stop: int
    problem: str


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Damage]:
    """Read every byte of a checkpoint and compare it with what was written.

    Args:
        path: The checkpoint's directory, or a link to it.
        progress: Called with the bytes read so far and their total.

    Returns:
        Every damaged place; empty if the checkpoint is whole.

    Raises:
        CheckpointError: There is no checkpoint at this path, or it is of a newer format.
    """
    root = Path(path)
    try:
        manifest = read_manifest(root)
    except DamagedManifestError as error:
        return [Damage(MANIFEST, 0, (root / MANIFEST).stat().st_size, error.message)]
    return _Verification(Source(root, manifest), progress).run()


class _Verification:
    """One run over all files."""

    def __init__(self, source: Source, progress: Callable[[int, int], None]) -> None:
        self.source = source
        self.found: list[Damage] = []
        self._progress = progress
        self._done = 0
        self._total = sum(entry.size for entry in source.manifest.files.values())

    def run(self) -> list[Damage]:
        files = self.source.manifest.files
        whole = {name for name, entry in files.items() if self._check_digested(name, entry)}
        self._check_copy()
        index = self._index()
        for name, entry in files.items():
            if entry.digested < entry.size:
                self._check_blocks(name, entry, index, whole)
        return self.found

    def _report(self, name: str, start: int, stop: int, problem: str) -> None:
        self.found.append(Damage(f"{self.source.manifest.save_id}/{name}", start, stop, problem))

    def _advance(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)

    def _check_digested(self, name: str, entry: FileEntry) -> bool:
        """Check what a file's digest covers; whether that was all right."""
        try:
            self.source.check_size(name, entry.size)
            self.source.read_file(name)
        except CheckpointError as error:
            self._report(name, 0, entry.digested, error.message)
            return False
        finally:
            self._advance(entry.digested)
        return True

    def _check_copy(self) -> None:
        path = self.source.directory / MANIFEST
        expected = (self.source.path / MANIFEST).read_bytes()
        try:
            same = path.read_bytes() == expected
        except OSError as error:
            self._report(MANIFEST, 0, len(expected), f"'{path}' cannot be read: {error.strerror}.")
            return
        if not same:
            self._report(MANIFEST, 0, len(expected), f"'{path}' differs from the checkpoint's manifest.")

    def _index(self) -> Index | None:
        if any(damage.file.endswith(f"/{INDEX}") for damage in self.found):
            return None
        try:
            return self.source.index
        except CheckpointError as error:
            self._report(INDEX, 0, 0, error.message)
            return None

    def _check_blocks(self, name: str, entry: FileEntry, index: Index | None, whole: set[str]) -> None:
        sums_name = f"{name.rsplit('.', 1)[0]}.sums"
        length = entry.size - entry.digested
        if index is None or sums_name not in whole:
            cause = "the index" if index is None else f"'{sums_name}'"
            self._report(name, entry.digested, entry.size, f"cannot be checked, because {cause} is damaged.")
            self._advance(length)
            return
        path = self.source.directory / name
        if not path.is_file() or path.stat().st_size != entry.size:
            self._advance(length)  # reported already
            return
        self._compare(name, index, self.source.read_file(sums_name))

    def _compare(self, name: str, index: Index, raw: bytes) -> None:
        size = self.source.manifest.block
        sums = struct.unpack(f"<{len(raw) // 8}Q", raw)
        if len(raw) != 8 * index.block_count(name, size):
            self._report(name, 0, 0, f"its {len(raw) // 8} checksums are not as many as its blocks.")
            return
        path, number = self.source.directory / name, 0
        for piece, tensor in index.pieces_by_file.get(name, ()):
            for start in range(0, piece.nbytes, max(size, _READ - _READ % size)):
                length = min(max(size, _READ - _READ % size), piece.nbytes - start)
                data = memoryview(read_exactly(path, length, start=piece.start + start))
                for begin in range(0, length, size):
                    part = data[begin : begin + size]
                    if xxhash.xxh3_64_intdigest(part) != sums[number]:
                        at = piece.start + start + begin
                        self._report(
                            name, at, at + len(part), f"block {number} of tensor '{tensor.name}' is damaged."
                        )
                    number += 1
                self._advance(length)

"""Verifying: every byte of every file against its digest or checksum, and headers against the index.

Imports neither torch nor Lightning. Damage is reported, not raised, so that one run lists all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from nnx.checkpoint.headers import find_contradiction
from nnx.checkpoint.index import INDEX, Index, Piece, TensorEntry
from nnx.checkpoint.manifest import MANIFEST, DamagedManifestError, FileEntry
from nnx.checkpoint.places import place_of
from nnx.checkpoint.source import Source, is_replaced, read_manifest
from nnx.checkpoint.storage import Location, Reader
from nnx.errors import CheckpointError

__all__ = ["Damage", "verify"]

_READ = 8 << 20


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
    path: Location, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Damage]:
    """Read every byte of a checkpoint and compare it with what was written.

    Args:
        path: The checkpoint's directory, or a link to it, or its URL.
        progress: Called with the bytes read so far and their total.

    Returns:
        Every damaged place; empty if the checkpoint is whole.

    A save that is replaced meanwhile is no damage: the one that replaced it is read.

    Raises:
        CheckpointError: There is no checkpoint at this path, or it is of a newer format.
    """
    root = place_of(path)
    while True:
        try:
            manifest = read_manifest(root)
        except DamagedManifestError as error:
            return [Damage(MANIFEST, 0, (root / MANIFEST).size(), error.message)]
        try:
            found = _Verification(Source(root, manifest), progress).run()
        except CheckpointError:
            if not is_replaced(root, manifest):
                raise
        else:
            if not found or not is_replaced(root, manifest):
                return found


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
        broken = dict(self.source.faults())
        for name, error in broken.items():
            self._report(name, 0, files[name].size, error.message)
            self._advance(files[name].size)
        whole = {name for name, entry in files.items() if name not in broken and self._is_whole(name, entry)}
        self._check_copy()
        index = self._index()
        for name, entry in files.items():
            if entry.digested < entry.size and name not in broken:
                self._check_blocks(name, entry, index, whole)
        return self.found

    def _report(self, name: str, start: int, stop: int, problem: str) -> None:
        self.found.append(Damage(f"{self.source.manifest.save_id}/{name}", start, stop, problem))

    def _advance(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)

    def _is_whole(self, name: str, entry: FileEntry) -> bool:
        """Check what a file's digest covers; whether that was all right."""
        try:
            self.source.read_file(name)
        except CheckpointError as error:
            self._report(name, 0, entry.digested, error.message)
            return False
        finally:
            self._advance(entry.digested)
        return True

    def _check_copy(self) -> None:
        copy, manifest = self.source.directory / MANIFEST, self.source.path / MANIFEST
        expected = manifest.read(manifest.size())
        try:
            same = copy.read(copy.size()) == expected
        except CheckpointError as error:
            self._report(MANIFEST, 0, len(expected), error.message)
            return
        if not same:
            self._report(MANIFEST, 0, len(expected), f"'{copy}' differs from the checkpoint's manifest.")

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
        if index is None or sums_name not in whole:
            cause = "the index" if index is None else f"'{sums_name}'"
            self._report(name, entry.digested, entry.size, f"cannot be checked, because {cause} is damaged.")
            self._advance(entry.size - entry.digested)
            return
        pieces = index.pieces_of(name)
        contradiction = find_contradiction(self.source.read_file(name), pieces) if name in whole else ""
        if contradiction:
            self._report(name, 0, entry.digested, contradiction)
        self._compare(name, index.block_count(name), pieces, self.source.read_file(sums_name))

    def _compare(
        self, name: str, count: int, pieces: Sequence[tuple[Piece, TensorEntry]], raw: bytes
    ) -> None:
        size = self.source.manifest.block
        sums = struct.unpack(f"<{len(raw) // 8}Q", raw)
        if len(raw) != 8 * count:
            self._report(name, 0, 0, f"its {len(raw) // 8} checksums are not as many as its blocks.")
            return
        entry = self.source.manifest.files[name]
        blocks = (
            (tensor.name, min(size, piece.nbytes - start))
            for piece, tensor in pieces
            for start in range(0, piece.nbytes, size)
        )
        with (
            contextlib.closing((self.source.directory / name).reader()) as reader,
            ThreadPoolExecutor(reader.parallel) as pool,
        ):
            data, at = _ReadAhead(reader, pool, entry.digested, entry.size, self._advance), entry.digested
            for number, (tensor, length) in enumerate(blocks):
                if xxhash.xxh3_64_intdigest(data.take(length)) != sums[number]:
                    problem = f"block {number} of tensor '{tensor}' is damaged."
                    self._report(name, at, at + length, problem)
                at += length


class _ReadAhead:
    """A file's data from front to back; its next parts are read while this one is looked at.

    Args:
        reader: The file.
        pool: Where to read.
        start: Position of the first byte.
        stop: One past the last.
        advance: Told how many bytes have arrived.
    """

    def __init__(
        self,
        reader: Reader,
        pool: ThreadPoolExecutor,
        start: int,
        stop: int,
        advance: Callable[[int], None],
    ) -> None:
        self._reader, self._pool, self._advance = reader, pool, advance
        self._starts = iter(range(start, stop, _READ))
        self._stop = stop
        self._waiting: deque[Future[memoryview]] = deque()
        self._rest = memoryview(b"")

    def take(self, length: int) -> memoryview:
        """The next bytes."""
        parts = []
        while length > len(self._rest):
            parts.append(self._rest)
            length -= len(self._rest)
            self._rest = self._next()
        parts.append(self._rest[:length])
        self._rest = self._rest[length:]
        return memoryview(b"".join(parts)) if len(parts) > 1 else parts[0]

    def _next(self) -> memoryview:
        for start in itertools.islice(self._starts, self._reader.parallel + 1 - len(self._waiting)):
            self._waiting.append(self._pool.submit(self._read, start))
        data = self._waiting.popleft().result()
        self._advance(len(data))
        return data

    def _read(self, start: int) -> memoryview:
        data = memoryview(bytearray(min(_READ, self._stop - start)))
        self._reader.read_into(start, data)
        return data

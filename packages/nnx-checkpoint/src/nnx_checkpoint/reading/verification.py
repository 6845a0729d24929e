"""Verify every byte of every file against its digest or checksum, and headers against the index.

Other formats have no checksums of their own: their structure is checked instead. Damage is returned, not
raised, so that one run lists all of it. This module imports neither torch nor Lightning, except to open a
checkpoint of another format.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.index import INDEX, Index, Piece, TensorEntry
from nnx_checkpoint.format.manifest import MANIFEST, DamagedManifestError, FileEntry, load_json
from nnx_checkpoint.format.source import Source, is_replaced, read_manifest
from nnx_checkpoint.reading.formats import Progress, open_checkpoint
from nnx_checkpoint.reading.survey import files_below
from nnx_checkpoint.storage import Location, Place, Reader
from nnx_checkpoint.storage.locations import place_of

__all__ = ["Damage", "check_structure", "verify"]

_READ = 8 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged range of a file.

    Attributes:
        file: The file, relative to the checkpoint's directory.
        start: First byte of the range that does not match.
        stop: One past its last byte.
        problem: One sentence that describes the damage.
    """

    file: str
    start: int
    stop: int
    problem: str


def verify(
    path: Location, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Damage]:
    """Read every byte of a checkpoint and compare it with its checksums.

    Args:
        path: The checkpoint's directory, or a link to it, or its URL.
        progress: Function of the bytes read so far and their total.

    Returns:
        All damage; empty if the checkpoint is intact.

    A save that is replaced meanwhile is no damage: the new save is verified instead.

    Raises:
        CheckpointError: No checkpoint exists at this path, or it has a newer format.
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
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "start new thread" not in str(error):
                raise
            raise CheckpointError(
                f"cannot verify '{root}': out of memory ({error or 'MemoryError'}).",
                remedy="Free memory, or raise the limit (`ulimit -v`); about 64 MB are enough.",
            ) from error
        else:
            if not found or not is_replaced(root, manifest):
                return found


def verify_files(source: Source, names: Iterable[str]) -> list[Damage]:
    """Read every byte of some files of a save and compare it with its checksums.

    Args:
        source: The save; its index and the headers of the files must be there.
        names: The files.
    """
    return _Verification(source, lambda done, total: None).check(set(names))


class _Verification:
    """One verification of all files."""

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
        self._check_copy()
        return self.check(files.keys() - broken.keys())

    def check(self, names: Set[str]) -> list[Damage]:
        """Check files that are there and have the right length."""
        files = {name: entry for name, entry in self.source.manifest.files.items() if name in names}
        whole = {name for name, entry in files.items() if self._is_whole(name, entry)}
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

    def _is_whole(self, name: str, entry: FileEntry) -> bool:
        """Check the bytes that a file's digest covers; return True if they match."""
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
        if index is None or sums_name not in whole or name not in whole:
            cause = "the index" if index is None else f"'{sums_name}'" if name in whole else "its header"
            self._report(name, entry.digested, entry.size, f"cannot be checked, because {cause} is damaged.")
            self._advance(entry.size - entry.digested)
            return
        try:
            pieces = index.pieces_of(name)
        except CheckpointError as error:
            self._report(name, 0, entry.digested, error.message)
            self._advance(entry.size - entry.digested)
            return
        problem = find_header_fault(self.source.read_file(name))
        if problem:
            self._report(name, 0, entry.digested, problem)
        count = self.source.offsets(name).block_count
        self._compare(name, count, pieces, self.source.read_file(sums_name))

    def _compare(self, name: str, count: int, pieces: Sequence[tuple[str, Piece]], raw: bytes) -> None:
        size = self.source.manifest.block
        if len(raw) != 8 * count:
            self._report(name, 0, 0, f"its {len(raw) / 8:g} checksums do not match its {count} blocks.")
            return
        sums = struct.unpack(f"<{count}Q", raw)
        entry = self.source.manifest.files[name]
        blocks = (
            (tensor, min(size, piece.nbytes - start))
            for tensor, piece in pieces
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
    """A file's data from front to back, with read-ahead.

    Args:
        reader: The file.
        pool: The threads that read.
        start: Position of the first byte.
        stop: One past the last.
        advance: Function of the number of bytes read.
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
        """Return the next bytes."""
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


# nnx compares the fields that it reads with the index on each use. Other programs read further fields.


def find_header_fault(raw: bytes) -> str:
    """Return the first fault of a rank file's header for other programs; empty if it has none.

    Args:
        raw: The file's bytes before its data, which agree with the index.
    """
    try:
        entries = load_json(raw[8:])
        metadata = entries.pop("__metadata__")
        origins, offsets = (load_json(metadata[key].encode()) for key in ("nnx", "DCP_SHARDING_INFO"))
        if metadata["format"] != "pt":
            return f"its header is malformed: format {metadata['format']!r}."
        if origins.keys() - entries.keys() or offsets.keys() != entries.keys():
            return "its header is malformed: its metadata describe other entries."
        for key, entry in entries.items():
            extents = entry["shape"]
            origin = origins.get(key, {"offset": [0] * len(extents)})
            if offsets[key]["saved_offsets"] != [*origin["offset"], *[0] * len(extents)][: len(extents)]:
                return f"its header is malformed: entry {key!r} has two offsets."
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its header is malformed: {type(error).__name__}: {error}."
    return ""


# The files must be readable, every tensor must lie inside its file, and the CRC-32 of every entry of a zip
# archive must match. Files of ``torch.save`` are zip archives, and torch never checks their CRC-32.


_ARCHIVE_READ = 4 << 20


@dataclass
class Structure:
    """The coverage and the findings of a check of a checkpoint's structure.

    Attributes:
        format: Name of the format; empty if the checkpoint could not be opened.
        damage: All damage.
        tensors: The number of tensors inside their files.
        archives: The number of zip archives with correct CRC-32 sums.
        files: The number of files.
    """

    format: str = ""
    damage: list[Damage] = field(default_factory=list)
    tensors: int = 0
    archives: int = 0
    files: int = 0


def check_structure(
    path: Location, *, weights_only: bool = True, progress: Progress = lambda done, total: None
) -> Structure:
    """Check the structure of a checkpoint without checksums.

    Args:
        path: A checkpoint of any format.
        weights_only: False executes code that the author of the checkpoint may have put there.
        progress: Function of the bytes of the files checked so far and their total.

    Raises:
        CheckpointError: The path does not exist, or has an unknown format.
    """
    found = Structure()
    place = place_of(path)
    files = files_below(place)
    if place.kind() is not None:
        _check_archives(place, files, found, progress)
    try:
        opened = open_checkpoint(path, weights_only=weights_only)
    except CheckpointError as error:
        if not found.damage:
            raise
        found.damage.append(Damage(place.name, 0, sum(files.values()), error.message))
        return found
    found.format = opened.format
    _check_lengths(opened.tensors, found)
    return found


def _check_archives(place: Place, files: Mapping[str, int], found: Structure, progress: Progress) -> None:
    done, total = 0, sum(files.values())
    progress(0, total)
    for name, size in files.items():
        file = place if place.kind() == "file" else place / name
        _check_archive(file, name, size, found)
        found.files += 1
        done += size
        progress(done, total)


def _check_archive(place: Place, name: str, size: int, found: Structure) -> None:
    with place.open() as file:
        if not zipfile.is_zipfile(file):
            return
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                bad = [entry for entry in entries if not _is_whole(archive, entry)]
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            found.damage.append(Damage(name, 0, size, f"it is not a readable zip archive: {error}."))
            return
    for entry in bad:
        start, stop = entry.header_offset, entry.header_offset + entry.compress_size
        found.damage.append(Damage(name, start, stop, f"entry '{entry.filename}' does not match its CRC-32."))
    found.archives += not bad


def _is_whole(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as data:
            while data.read(_ARCHIVE_READ):
                pass  # zipfile compares the sum at the end of the entry
    except (zipfile.BadZipFile, EOFError, zlib.error):
        return False
    return True


def _check_lengths(tensors: Mapping[str, TensorEntry], found: Structure) -> None:
    """Report pieces that end after the end of their file."""
    sizes: dict[str, int] = {}
    for name, entry in tensors.items():
        whole = True
        for piece in entry.pieces:
            if piece.file not in sizes:
                place = place_of(piece.file)
                sizes[piece.file] = place.size() if place.kind() == "file" else 0
            if piece.start + piece.nbytes > sizes[piece.file]:
                problem = f"tensor '{name}' ends after the end of the file."
                found.damage.append(Damage(piece.file, piece.start, piece.start + piece.nbytes, problem))
                whole = False
        found.tensors += whole

"""Checking checkpoints of other formats, which have no checksums of their own, as far as that goes.

The files must be readable as what they are, every tensor must lie inside its file, and in zip archives, which
files of ``torch.save`` are, the CRC-32 of every entry must match; torch itself never looks at it.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from nnx.checkpoint.formats import Progress, files_below, open_checkpoint
from nnx.checkpoint.index import TensorEntry
from nnx.checkpoint.places import place_of
from nnx.checkpoint.storage import Location, Place
from nnx.checkpoint.verifying import Damage
from nnx.errors import CheckpointError

__all__ = ["Structure", "check_structure"]

_READ = 4 << 20


@dataclass
class Structure:
    """What a check of a checkpoint's structure covered, and what it found.

    Attributes:
        format: Name of the format; empty if the checkpoint could not be opened.
        damage: Every damaged place.
        tensors: How many tensors were found to lie inside their files.
        archives: How many zip archives have correct sums.
        files: How many files there are.
    """

    format: str = ""
    damage: list[Damage] = field(default_factory=list)
    tensors: int = 0
    archives: int = 0
    files: int = 0


def check_structure(
    path: Location, *, weights_only: bool = True, progress: Progress = lambda done, total: None
) -> Structure:
    """Check what can be checked of a checkpoint without checksums.

    Args:
        path: A checkpoint of any format.
        weights_only: As for `nnx.checkpoint.open_checkpoint`.
        progress: Told the bytes of the files seen so far and their total.

    Raises:
        CheckpointError: Nothing is there, or its format is unknown.
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
            found.damage.append(Damage(name, 0, size, f"it is no readable zip archive: {error}."))
            return
    for entry in bad:
        start, stop = entry.header_offset, entry.header_offset + entry.compress_size
        found.damage.append(Damage(name, start, stop, f"entry '{entry.filename}' does not match its CRC-32."))
    found.archives += not bad


def _is_whole(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as data:
            while data.read(_READ):
                pass  # the end of the entry is where the sum is compared
    except (zipfile.BadZipFile, EOFError, zlib.error):
        return False
    return True


def _check_lengths(tensors: Mapping[str, TensorEntry], found: Structure) -> None:
    """Every piece must end before its file does."""
    sizes: dict[str, int] = {}
    for name, entry in tensors.items():
        whole = True
        for piece in entry.pieces:
            if piece.file not in sizes:
                place = place_of(piece.file)
                sizes[piece.file] = place.size() if place.kind() == "file" else 0
            if piece.start + piece.nbytes > sizes[piece.file]:
                problem = f"tensor '{name}' ends behind the end of the file."
                found.damage.append(Damage(piece.file, piece.start, piece.start + piece.nbytes, problem))
                whole = False
        found.tensors += whole

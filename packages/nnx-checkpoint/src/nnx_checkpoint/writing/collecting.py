"""Collect garbage on request.

What a running save or conversion is writing is never touched: the lock of saves tells, or on places without
locks the order of saves. `cp -r` and rsync hold no lock, so conversions, and what is newer than the
committed save, are left alone while they change. Neither is a committed save touched, nor any complete one
unless the caller says how many to keep.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.manifest import MANIFEST
from nnx_checkpoint.format.source import read_manifest
from nnx_checkpoint.reading.survey import PARTIAL, files_below, survey
from nnx_checkpoint.storage import Location, Place
from nnx_checkpoint.writing.transaction import _remove, candidates

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that no checkpoint needs.

    Attributes:
        path: The path of it.
        kind: ``unfinished save``, ``previous save``, ``temporary manifest`` or ``unfinished conversion``.
        nbytes: Bytes of its files.
    """

    path: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Spared:
    """Something that was left alone.

    Attributes:
        path: The path of it.
        why: The reason, for people.
    """

    path: str
    why: str


@dataclass(slots=True)
class Collected:
    """What a collection did, or would do.

    Attributes:
        removed: The files and directories that were removed.
        spared: The paths that looked like garbage and were left alone.
        failed: The paths that could not be looked at or removed, and why.
    """

    removed: list[Garbage] = field(default_factory=list)
    spared: list[Spared] = field(default_factory=list)
    failed: list[Spared] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that were freed."""
        return sum(item.nbytes for item in self.removed)


def collect_garbage(
    location: Location, *, keep_previous: int | None = None, min_age: float = _HOUR, dry_run: bool = False
) -> Collected:
    """Remove what no checkpoint needs, in a checkpoint or in all below a directory.

    An error at one path is noted in `Collected.failed`, and the others are collected.

    Args:
        location: A checkpoint of our own format, or a directory with checkpoints.
        keep_previous: The number of earlier complete saves of each checkpoint to keep, newest first; None
            keeps all of them.
        min_age: Seconds since the last change of an unfinished save or conversion that make sure nobody
            writes or copies it.
        dry_run: Only find out what would be removed.

    Raises:
        CheckpointError: Nothing is at the location, or it cannot be listed.
    """
    job = _Collecting(keep_previous, min_age, dry_run)
    for found in list(survey(location, job.note)):
        with job.noting(found.place):
            if found.kind == "partial":
                job.unfinished(found.place, "unfinished conversion", "a conversion may be writing it")
            elif found.format == "nnx":
                job.saves(found.place)
    return job.collected


class _Collecting:
    """One call of `collect_garbage`; its arguments are those."""

    def __init__(self, keep_previous: int | None, min_age: float, dry_run: bool) -> None:
        self.collected = Collected()
        self._keep_previous = keep_previous
        self._min_age = min_age
        self._dry_run = dry_run

    def note(self, place: Place, why: str) -> None:
        """Say that something failed, and continue."""
        self.collected.failed.append(Spared(str(place), why))

    @contextlib.contextmanager
    def noting(self, place: Place) -> Iterator[None]:
        """Continue after an error in the block."""
        try:
            yield
        except CheckpointError as error:
            self.note(place, error.message)
        except RecursionError:
            self.note(place, "its directories are nested too deeply; remove it by hand")

    def saves(self, place: Place) -> None:
        """Collect in one checkpoint of our own format."""
        try:
            with _locked(place) as locked:
                committed = _committed(place)
                for name, kind in candidates(place, committed, self._keep_previous):
                    with self.noting(place / name):
                        self._save(place / name, kind, committed, locked)
        except _LeaveAloneError as error:
            self._spare(place, error.message)
            return
        if not committed and not self._dry_run:
            place.remove_if_empty()

    def _save(self, place: Place, kind: str, committed: str, locked: bool) -> None:
        why = _reason_to_spare(place.name, kind, committed, locked)
        if why:
            self._spare(place, why)
        elif _is_older(place.name, committed):
            self._discard(place, kind)
        else:
            self.unfinished(place, kind, "it may be in the middle of being copied here")

    def unfinished(self, place: Place, kind: str, danger: str) -> None:
        """Remove what nobody has changed for a while."""
        age = _seconds_unchanged(place)
        if age < self._min_age:
            self._spare(place, f"it was changed {age:.0f} seconds ago, so {danger}")
        else:
            self._discard(place, kind)

    def _spare(self, place: Place, why: str) -> None:
        self.collected.spared.append(Spared(str(place), why))

    def _discard(self, place: Place, kind: str) -> None:
        nbytes = sum(files_below(place).values())
        if not self._dry_run:
            _remove(place)
        self.collected.removed.append(Garbage(str(place), kind, nbytes))


class _LeaveAloneError(CheckpointError):
    """Nothing may be touched here."""


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[bool]:
    """Keep others from saving; false where there are no locks."""
    try:
        lock = place.lock()
    except CheckpointError as error:
        raise _LeaveAloneError(error.message) from error
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _committed(place: Place) -> str:
    """The save that is the checkpoint; empty if there is none."""
    if (place / MANIFEST).kind() != "file":
        return ""
    try:
        return read_manifest(place).save_id
    except CheckpointError as error:
        raise _LeaveAloneError(error.message) from error


def _reason_to_spare(name: str, kind: str, committed: str, locked: bool) -> str:
    if kind == "link":
        return "it is no directory but a link or the like, which no save makes; remove it by hand"
    if kind == "previous save" and not committed:
        return f"it is complete, and the checkpoint has no {MANIFEST}: copy this save's to restore it"
    if not locked and not _is_older(name, committed):
        return "it may be a save in progress: this place has no locks, and nothing newer is committed"
    return ""


def _is_older(name: str, committed: str) -> bool:
    """Return True if a save, or a manifest's temporary file, is of before the committed save."""
    return name.removeprefix(f".{MANIFEST}.") < committed


def _seconds_unchanged(place: Place) -> float:
    """Seconds since anything in it was last changed; for a URL only its order among saves tells that.

    Raises:
        CheckpointError: It cannot be looked at.
    """
    path = place.location
    if not isinstance(path, Path):
        return 0.0 if place.name.endswith(PARTIAL) else math.inf
    with place.explained("look at"):
        newest = path.lstat().st_mtime
    for directory, directories, files in os.walk(path):  # which does not follow links
        for name in (*directories, *files):
            with place.explained("look at"), contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime)  # noqa: PTH118
    return max(0.0, time.time() - newest)  # negative where the clock was set back

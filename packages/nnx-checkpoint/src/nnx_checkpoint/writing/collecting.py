"""Collect garbage on request.

Collection never removes files of a running save: it takes the lock of saves, or without locks compares the
order of saves. `cp -r` and rsync hold no lock, so it keeps conversions and saves newer than the committed one
while they still change. It never removes the committed save, and removes other complete saves only if the
caller limits their number.
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
from nnx_checkpoint.writing.transaction import candidates, remove

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file or directory that no checkpoint needs.

    Attributes:
        path: Its path.
        kind: ``unfinished save``, ``previous save``, ``temporary manifest`` or ``unfinished conversion``.
        nbytes: Bytes of its files.
    """

    path: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Spared:
    """A file or directory that looked like garbage and was kept.

    Attributes:
        path: Its path.
        why: The reason as text.
    """

    path: str
    why: str


@dataclass(slots=True)
class Collected:
    """The result of a collection or of a dry run.

    Attributes:
        removed: The files and directories that were removed.
        spared: The paths that looked like garbage and were kept.
        failed: The paths that could not be inspected or removed, with the reason.
    """

    removed: list[Garbage] = field(default_factory=list)
    spared: list[Spared] = field(default_factory=list)
    failed: list[Spared] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The freed bytes."""
        return sum(item.nbytes for item in self.removed)


def collect_garbage(
    location: Location, *, keep_previous: int | None = None, min_age: float = _HOUR, dry_run: bool = False
) -> Collected:
    """Remove files that no checkpoint needs, in one checkpoint or in all below a directory.

    An error at one path is added to `Collected.failed`, and collection continues.

    Args:
        location: A checkpoint of our own format, or a directory with checkpoints.
        keep_previous: The number of earlier complete saves of each checkpoint to keep, newest first; None
            keeps all of them.
        min_age: Seconds without a change after which an unfinished save or conversion counts as abandoned.
        dry_run: True lists the garbage and removes nothing.

    Raises:
        CheckpointError: The location does not exist or cannot be listed.
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
    """The state of one call of `collect_garbage`, with the same arguments."""

    def __init__(self, keep_previous: int | None, min_age: float, dry_run: bool) -> None:
        self.collected = Collected()
        self._keep_previous = keep_previous
        self._min_age = min_age
        self._dry_run = dry_run

    def note(self, place: Place, why: str) -> None:
        """Add a failure to the result."""
        self.collected.failed.append(Spared(str(place), why))

    @contextlib.contextmanager
    def noting(self, place: Place) -> Iterator[None]:
        """Context manager that adds an error of the block to the result, and continues."""
        try:
            yield
        except CheckpointError as error:
            self.note(place, error.message)
        except RecursionError:
            self.note(place, "its directories are nested too deeply; remove it by hand")

    def saves(self, place: Place) -> None:
        """Collect garbage in one checkpoint of our own format."""
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
            self.unfinished(place, kind, "a program may be copying it here")

    def unfinished(self, place: Place, kind: str, danger: str) -> None:
        """Remove a path that has not changed for `min_age` seconds."""
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
            remove(place)
        self.collected.removed.append(Garbage(str(place), kind, nbytes))


class _LeaveAloneError(CheckpointError):
    """Another run holds the lock: remove nothing here."""


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[bool]:
    """Hold the lock of saves; yield False if the place has no locks."""
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
    """Return the id of the committed save; empty if there is none."""
    if (place / MANIFEST).kind() != "file":
        return ""
    try:
        return read_manifest(place).save_id
    except CheckpointError as error:
        raise _LeaveAloneError(error.message) from error


def _reason_to_spare(name: str, kind: str, committed: str, locked: bool) -> str:
    if kind == "link":
        return "it is a link or a special file, which no save makes; remove it by hand"
    if kind == "previous save" and not committed:
        return f"it is complete, and the checkpoint has no {MANIFEST}: copy this save's to restore it"
    if not locked and not _is_older(name, committed):
        return "it may be a save in progress: this place has no locks, and no newer save is committed"
    return ""


def _is_older(name: str, committed: str) -> bool:
    """Return True if a save, or a manifest's temporary file, is older than the committed save."""
    return name.removeprefix(f".{MANIFEST}.") < committed


def _seconds_unchanged(place: Place) -> float:
    """Return the seconds since the last change of a directory tree.

    A URL has no such times: a conversion counts as just changed, and a save is judged by its order only.

    Raises:
        CheckpointError: The directory cannot be inspected.
    """
    path = place.location
    if not isinstance(path, Path):
        return 0.0 if place.name.endswith(PARTIAL) else math.inf
    with place.explained("look at"):
        newest = path.lstat().st_mtime
    for directory, directories, files in os.walk(path):  # does not follow links
        for name in (*directories, *files):
            with place.explained("look at"), contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime)  # noqa: PTH118
    return max(0.0, time.time() - newest)  # negative if the clock was set back

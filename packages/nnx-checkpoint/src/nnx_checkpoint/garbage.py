"""Collecting what no checkpoint needs: leftovers of killed saves and conversions, and old saves.

What a running save or conversion is writing is never touched: the lock of saves tells, or on places without
locks the order of saves, and for conversions their age. Neither is a committed save, nor any complete one
unless the caller says how many to keep. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.formats import files_below, survey
from nnx_checkpoint.manifest import MANIFEST, is_save_id
from nnx_checkpoint.source import read_manifest
from nnx_checkpoint.storage import Location, Place
from nnx_checkpoint.storage.files import LOCK

__all__ = ["collect_garbage"]

HOUR = 3600.0


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
    """

    removed: list[Garbage] = field(default_factory=list)
    spared: list[Spared] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that were freed."""
        return sum(item.nbytes for item in self.removed)


def collect_garbage(
    location: Location, *, keep_previous: int | None = None, min_age: float = HOUR, dry_run: bool = False
) -> Collected:
    """Remove what no checkpoint needs, in a checkpoint or in all below a directory.

    Args:
        location: A checkpoint of our own format, or a directory with checkpoints.
        keep_previous: The number of earlier complete saves of each checkpoint to keep, newest first; None
            keeps all of them.
        min_age: Seconds since the last change of an unfinished conversion that make sure nobody works on it.
        dry_run: Only find out what would be removed.

    Raises:
        CheckpointError: Nothing is at the location, or something cannot be removed.
    """
    collected = Collected()
    for found in list(survey(location)):
        if found.kind == "partial":
            _collect_partial(found.place, min_age, dry_run, collected)
        elif found.format == "nnx":
            _collect_saves(found.place, keep_previous, dry_run, collected)
    return collected


def _collect_saves(place: Place, keep_previous: int | None, dry_run: bool, collected: Collected) -> None:
    try:
        with _locked(place) as locked:
            committed = _committed(place)
            for name, kind in _candidates(place, committed, keep_previous):
                why = _reason_to_spare(name, kind, committed, locked)
                if why:
                    collected.spared.append(Spared(str(place / name), why))
                else:
                    _remove(place / name, kind, dry_run, collected)
    except _LeaveAloneError as error:
        collected.spared.append(Spared(str(place), error.message))
        return
    if not committed and not dry_run:
        place.remove_if_empty()


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


def _candidates(place: Place, committed: str, keep_previous: int | None) -> Iterator[tuple[str, str]]:
    """What is neither committed nor to be kept, newest save first."""
    kept = 0
    for name in reversed(place.names()):
        if name in (committed, LOCK):
            continue
        if name.startswith(f".{MANIFEST}.") and name.endswith(".tmp"):
            yield name, "temporary manifest"
        elif is_save_id(name) and (place / name).kind() == "other":
            yield name, "link"
        elif is_save_id(name) and (place / name / MANIFEST).kind() != "file":
            yield name, "unfinished save"
        elif is_save_id(name):
            kept += 1
            if keep_previous is not None and kept > keep_previous:
                yield name, "previous save"


def _reason_to_spare(name: str, kind: str, committed: str, locked: bool) -> str:
    if kind == "link":
        return "it is no directory but a link or the like, which no save makes; remove it by hand"
    if kind == "previous save" and not committed:
        return f"it is complete, and the checkpoint has no {MANIFEST}: copy this save's to restore it"
    if not locked and not name.lstrip(".").removeprefix(f"{MANIFEST}.") < committed:
        return "it may be a save in progress: this place has no locks, and nothing newer is committed"
    return ""


def _collect_partial(place: Place, min_age: float, dry_run: bool, collected: Collected) -> None:
    age = max(0.0, time.time() - _changed(place))  # negative where the clock was set back
    if age < min_age:
        why = f"it was changed {age:.0f} seconds ago, so a conversion may be writing it"
        collected.spared.append(Spared(str(place), why))
    else:
        _remove(place, "unfinished conversion", dry_run, collected)


def _changed(place: Place) -> float:
    """When anything in it was last changed; now, where that is not known."""
    path = place.location
    if not isinstance(path, Path):
        return time.time()
    with place.explained("read"):
        return max(inner.stat().st_mtime for inner in (path, *path.rglob("*")))


def _remove(place: Place, kind: str, dry_run: bool, collected: Collected) -> None:
    nbytes = sum(files_below(place).values())
    if not dry_run:
        if is_save_id(place.name):
            # The manifest's copy goes first, so that a half-removed save never looks complete.
            (place / MANIFEST).remove()
        place.remove()
    collected.removed.append(Garbage(str(place), kind, nbytes))

"""Committing a save, and collecting what no commit refers to, with each commit and on request.

A save writes into a directory of its own. Replacing the manifest makes it the checkpoint; until then
the previous one is untouched, afterwards it is collected. This module owns those names in the
checkpoint's directory, runs on the coordinator only, and imports neither torch nor Lightning.

Two runs must not save to one path at the same time. A lock keeps the second one out. Where there are no
locks, as on object stores, the manifest tells: who finds another one than at the beginning gives up, and
only what is older than that first one is collected, so never the other run's save in progress.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.index import INDEX, Index, decode_index, encode_index
from nnx_checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, digest, encode_manifest, is_save_id
from nnx_checkpoint.format.source import is_our_manifest
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.lock import LOCK, Lock

__all__ = [
    "Transaction",
    "begin",
]

_STAMP = "%Y%m%dT%H%M%S.%f"


def now() -> datetime:
    """The time in UTC."""
    return datetime.now(timezone.utc)


def begin(path: Place) -> Transaction:
    """Make the directory of a new save.

    Args:
        path: The checkpoint; a new or empty directory, or one that holds a checkpoint already.

    Returns:
        The save, to be committed or discarded.

    Raises:
        CheckpointError: Something else is there, another run is saving to it, or it cannot be written to.
    """
    kind = path.kind()
    if kind == "file":
        raise _refusal(path, "it is a file")
    # Asked for as a link: another run may have made the directory since.
    if kind is None and isinstance(path.location, Path) and path.location.is_symlink():
        raise _refusal(path, "it is a link that leads to nothing")
    foreign = [name for name in path.names() if not _is_ours(name)]
    if foreign and not _is_proven(path):
        if MANIFEST in foreign:
            raise _refusal(path, f"its '{MANIFEST}' is another program's")
        raise _refusal(path, f"it holds other things, such as {foreign[0]!r}")
    lock: Lock | None = None
    transaction: Transaction | None = None
    try:
        path.make()
        lock = path.lock()
        transaction = Transaction(path, lock, None if lock else _read_manifest(path), is_first=not foreign)
        transaction.directory.make()
    except BaseException:
        if transaction is not None:
            transaction.discard()
        elif lock is not None:
            lock.release()
        path.remove_if_empty()  # only if this save made it: it is not empty otherwise
        raise
    return transaction


def _is_proven(path: Place) -> bool:
    """Whether the manifest, or its copy in a save, is ours by its content: the name alone proves nothing."""
    saves = (path / name for name in path.names() if is_save_id(name))
    return any(is_our_manifest(place / MANIFEST) for place in (path, *saves))


def _refusal(path: Place, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot save to '{path}': {why}.",
        remedy="Choose a new path, an empty directory, or an nnx checkpoint to replace.",
    )


def _read_manifest(path: Place) -> bytes | None:
    manifest = path / MANIFEST
    return manifest.read(manifest.size()) if manifest.kind() == "file" else None


class Transaction:
    """A save in progress; made by `begin`.

    Attributes:
        save_id: Its id.
        directory: The directory of its files, named after the id.
    """

    def __init__(self, path: Place, lock: Lock | None, previous: bytes | None, *, is_first: bool) -> None:
        self.save_id = _new_id(path)
        self.directory = path / self.save_id
        self._path = path
        self._lock = lock
        self._previous = previous
        self._is_first = is_first
        self._is_replacing = False

    def finish(
        self,
        index: Index,
        files: Mapping[str, FileEntry],
        *,
        writer: Mapping[str, Any],
        provenance: Mapping[str, Any],
        keep_previous: int = 0,
    ) -> None:
        """Write the index and commit.

        Args:
            index: The tensors that were written.
            files: All files of the save except the index and the manifest.
            writer: The world size, and versions of libraries.
            provenance: Plain JSON that says where the checkpoint comes from.
            keep_previous: The number of earlier complete saves to keep beside it.

        Raises:
            CheckpointError: The index or the provenance cannot be written, or as for `commit`.
        """
        raw = encode_index(index)
        (self.directory / INDEX).write(raw)
        manifest = Manifest(
            save_id=self.save_id,
            created=now().isoformat(timespec="microseconds"),
            files={**files, INDEX: FileEntry(len(raw), digest(raw), len(raw))},
            writer=writer,
            provenance=provenance,
        )
        decode_index(raw, manifest, source=str(self.directory / INDEX))  # unreadable: not to be committed
        self.commit(manifest, keep_previous=keep_previous)

    def commit(self, manifest: Manifest, *, keep_previous: int) -> None:
        """Make the save, whose files are all there, the checkpoint at its path.

        Args:
            manifest: Describes the save.
            keep_previous: The number of earlier complete saves to keep beside it.

        Raises:
            CheckpointError: A file is not there as described, another run has committed meanwhile, or the
                manifest cannot be written. What was the checkpoint then stays, and so does all that belongs
                to it: a machine that crashes now may come back with the old manifest.
        """
        self._refuse_if_overtaken()
        _check_present(self.directory, manifest.files)
        data = encode_manifest(manifest)
        # The copy marks the save as complete, and outlives the next commit if the save is kept.
        (self.directory / MANIFEST).write(data)
        self.directory.sync()
        self._refuse_if_overtaken()
        self._is_replacing = True
        (self._path / MANIFEST).replace(data, temporary=f".{MANIFEST}.{self.save_id}.tmp")
        with contextlib.suppress(CheckpointError):  # what is committed stays committed
            _collect(
                self._path,
                self.save_id,
                keep_previous=keep_previous,
                until=None if self._lock else _newest_known(self._path, self._previous),
            )
        self.release()

    def _refuse_if_overtaken(self) -> None:
        if self._lock is None and _read_manifest(self._path) != self._previous:
            raise CheckpointError(
                f"cannot commit to '{self._path}': another run has saved to it meanwhile.",
                remedy="Give every run a path of its own; what the other run saved is intact.",
            )

    def discard(self) -> str:
        """Remove what a failed save left, as far as that is possible; never what was committed.

        Returns:
            What is at the path now, for people; empty where this would have been the first save.
        """
        standing = self._standing()
        if standing not in (_NEW, _UNKNOWN):
            for left in (self._path / f".{MANIFEST}.{self.save_id}.tmp", self.directory):
                with contextlib.suppress(CheckpointError):
                    _remove(left)
        self.release()
        self._path.remove_if_empty()  # only if this save made it: it is not empty otherwise
        return standing

    def _standing(self) -> str:
        """Which save is the checkpoint: a commit may come through although it seems to fail."""
        if self._is_replacing:
            try:
                manifest = _read_manifest(self._path) or b""
            except CheckpointError:
                return _UNKNOWN
            if self.save_id.encode() in manifest:
                return _NEW
        return "" if self._is_first else _PREVIOUS

    def release(self) -> None:
        """Let others save to this path; nothing else may be done afterwards."""
        if self._lock is not None:
            self._lock.release()


_PREVIOUS = "The checkpoint that was saved there before is whole."
_NEW = "The new checkpoint is there, whole, but a crash of the machine may bring the one before back."
_UNKNOWN = "The new checkpoint or the one before is there, whole."


def _new_id(path: Place) -> str:
    """An id behind those of all saves that are there, also after the clock has been set back."""
    stamp = now().replace(tzinfo=None)
    newest = max((name for name in path.names() if is_save_id(name)), default="")
    if newest:
        with contextlib.suppress(ValueError, OverflowError):  # a directory somebody named 99999999T...
            stamp = max(stamp, datetime.strptime(newest[:22], _STAMP) + timedelta(microseconds=1))
    return f"{stamp:{_STAMP}}-{secrets.token_hex(4)}"


def _check_present(directory: Place, files: Mapping[str, FileEntry]) -> None:
    sizes = directory.sizes(files)
    for name, entry in files.items():
        if name not in sizes:
            raise CheckpointError(f"cannot commit '{directory / name}': it is not there.", remedy=_SHARED)
        if sizes[name] != entry.size:
            raise CheckpointError(
                f"cannot commit '{directory / name}': it has {sizes[name]} bytes, {entry.size} were written.",
                remedy=_SHARED,
            )


_SHARED = "Every rank must write to one shared file system, and nobody may remove anything meanwhile."


def _collect(path: Place, save_id: str, *, keep_previous: int, until: str | None) -> None:
    """Remove saves and temporary manifests that no commit refers to.

    Args:
        path: The checkpoint.
        save_id: The committed save, which is never removed.
        keep_previous: The number of other complete saves to keep, newest first.
        until: Remove no save that began after the one of this id.

    Raises:
        CheckpointError: Something could not be removed.
    """
    for name, kind in candidates(path, save_id, keep_previous):
        if kind != "link" and (until is None or name.removeprefix(f".{MANIFEST}.") <= until):
            _remove(path / name)


def candidates(place: Place, committed: str, keep_previous: int | None) -> Iterator[tuple[str, str]]:
    """What is neither committed nor to be kept, newest save first."""
    kept = 0
    for name in reversed(place.names()):
        if name in (committed, LOCK):
            continue
        if _is_temporary(name):
            yield name, "temporary manifest"
        elif is_save_id(name) and (place / name).kind() == "other":
            yield name, "link"
        elif is_save_id(name) and (place / name / MANIFEST).kind() != "file":
            yield name, "unfinished save"
        elif is_save_id(name):
            kept += 1
            if keep_previous is not None and kept > keep_previous:
                yield name, "previous save"


def _newest_known(path: Place, previous: bytes | None) -> str:
    """The newest save that cannot be in progress: the one that the previous manifest named."""
    known = [name for name in path.names() if is_save_id(name) and name.encode() in (previous or b"")]
    return max(known, default="")


def _is_ours(name: str) -> bool:
    return is_save_id(name) or name == LOCK or _is_temporary(name)


def _is_temporary(name: str) -> bool:
    return name.startswith(f".{MANIFEST}.") and name.endswith(".tmp")


def _remove(place: Place) -> None:
    # The manifest's copy goes first, so that a half-removed save never looks complete.
    if is_save_id(place.name):
        (place / MANIFEST).remove()
    place.remove()

"""Commit a save, and collect the saves that no commit refers to.

A save writes into its own directory. Atomically replacing the manifest commits it. Until then the previous
save stays untouched; afterwards it is collected. This module owns those names in the checkpoint's directory,
runs on the coordinator only, and imports neither torch nor Lightning.

Two runs must not save to one path at the same time. A lock refuses the second run. Object stores have no
locks: there a run compares the manifest with its copy from the beginning, and gives up if another run
replaced it. It collects only saves older than that copy, so never the other run's save in progress.
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
    """Return the time in UTC."""
    return datetime.now(timezone.utc)


def begin(path: Place) -> Transaction:
    """Create the directory of a new save.

    Args:
        path: The checkpoint: a new or empty directory, or an existing checkpoint.

    Returns:
        The save, to be committed or discarded.

    Raises:
        CheckpointError: The path holds other files, another run is saving to it, or it is not writable.
    """
    kind = path.kind()
    if kind == "file":
        raise _refusal(path, "it is a file")
    # Test for a link again: another run may have created the directory after `kind`.
    if kind is None and isinstance(path.location, Path) and path.location.is_symlink():
        raise _refusal(path, "it is a broken link")
    foreign = [name for name in path.names() if not _is_ours(name)]
    if foreign and not _has_our_manifest(path):
        if MANIFEST in foreign:
            raise _refusal(path, f"its '{MANIFEST}' belongs to another program")
        raise _refusal(path, f"it holds other files, such as {foreign[0]!r}")
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
        path.remove_if_empty()  # a directory that this save did not create is not empty
        raise
    return transaction


def _has_our_manifest(path: Place) -> bool:
    """Return True if the manifest, or its copy in a save, has our content (its name proves nothing)."""
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
        save_id: The id of the save.
        directory: The directory of the save's files, named after the id.
    """

    def __init__(self, path: Place, lock: Lock | None, previous: bytes | None, *, is_first: bool) -> None:
        self.save_id = new_id(path)
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
            provenance: Plain JSON about the origin of the checkpoint.
            keep_previous: The number of earlier complete saves to keep beside it.

        Raises:
            CheckpointError: The index or the provenance cannot be written, or `commit` failed.
        """
        where = str(self.directory / INDEX)
        raw, manifest = describe_save(
            self.save_id, index, files, writer=writer, provenance=provenance, where=where
        )
        (self.directory / INDEX).write(raw)
        self.commit(manifest, keep_previous=keep_previous)

    def commit(self, manifest: Manifest, *, keep_previous: int) -> None:
        """Make the complete save the checkpoint at its path.

        Every file must be on disk before the manifest names it, and a kill at any line leaves a complete
        checkpoint: the previous one before `replace` renames, the new one after it.

        Args:
            manifest: The description of the save.
            keep_previous: The number of earlier complete saves to keep beside it.

        Raises:
            CheckpointError: A file is missing or has another size, another run committed meanwhile, or the
                manifest cannot be written. The previous save and its files then stay, because a machine
                that crashes now may restart with the old manifest.
        """
        self._refuse_if_replaced()
        _check_present(self.directory, manifest.files)
        data = encode_manifest(manifest)
        # The copy marks the save as complete, and stays after the next commit if the save is kept. Its fsync
        # must precede `replace`: a crash must never leave a manifest that names files not yet on disk.
        (self.directory / MANIFEST).write(data)
        self.directory.sync()
        self._refuse_if_replaced()  # again, because writing took time and a store has no lock
        self._is_replacing = True  # before `replace`: its rename may succeed and its fsync still raise
        (self._path / MANIFEST).replace(data, temporary=f".{MANIFEST}.{self.save_id}.tmp")
        with contextlib.suppress(CheckpointError):  # the commit stands even if collection fails
            _collect(
                self._path,
                self.save_id,
                keep_previous=keep_previous,
                until=None if self._lock else _newest_known(self._path, self._previous),
            )
        self.release()

    def _refuse_if_replaced(self) -> None:
        if self._lock is None and _read_manifest(self._path) != self._previous:
            raise CheckpointError(
                f"cannot commit to '{self._path}': another run has saved to it meanwhile.",
                remedy="Give every run its own path; the checkpoint of the other run is intact.",
            )

    def discard(self) -> str:
        """Remove the files of a failed save as far as possible, but never a committed save.

        Returns:
            A sentence about the checkpoint now at the path; empty if this was the first save.
        """
        outcome = self._outcome()
        if outcome not in (_NEW, _UNKNOWN):
            for left in (self._path / f".{MANIFEST}.{self.save_id}.tmp", self.directory):
                with contextlib.suppress(CheckpointError):
                    remove(left)
        self.release()
        self._path.remove_if_empty()  # a directory that this save did not create is not empty
        return outcome

    def _outcome(self) -> str:
        """Return a sentence about the committed save: a commit may succeed although it raised."""
        if self._is_replacing:
            try:
                manifest = _read_manifest(self._path) or b""
            except CheckpointError:
                return _UNKNOWN
            if self.save_id.encode() in manifest:
                return _NEW
        return "" if self._is_first else _PREVIOUS

    def release(self) -> None:
        """Release the lock, so that other runs may save here. This must be the last call."""
        if self._lock is not None:
            self._lock.release()


def describe_save(
    save_id: str,
    index: Index,
    files: Mapping[str, FileEntry],
    *,
    writer: Mapping[str, Any],
    provenance: Mapping[str, Any],
    where: str,
) -> tuple[bytes, Manifest]:
    """Return the index as bytes, and the manifest of a save that is about to be committed.

    Args:
        save_id: The id of the save.
        index: The tensors that were written.
        files: All files of the save except the index and the manifest.
        writer: The world size, and versions of libraries.
        provenance: Plain JSON about the origin of the checkpoint.
        where: The path of the index, for messages.

    Raises:
        CheckpointError: The index is not readable, so that the save must not be committed.
    """
    raw = encode_index(index)
    manifest = Manifest(
        save_id=save_id,
        created=now().isoformat(timespec="microseconds"),
        files={**files, INDEX: FileEntry(len(raw), digest(raw), len(raw))},
        writer=writer,
        provenance=provenance,
    )
    decode_index(raw, manifest, source=where)
    return raw, manifest


_PREVIOUS = "The previous checkpoint at this path is intact."
_NEW = "The new checkpoint is committed and intact, but a crash of the machine may restore the previous one."
_UNKNOWN = "Either the new or the previous checkpoint is at this path, intact."


def new_id(path: Place) -> str:
    """Return an id that sorts after those of all existing saves, even if the clock was set back."""
    stamp = now().replace(tzinfo=None)
    newest = max((name for name in path.names() if is_save_id(name)), default="")
    if newest:
        with contextlib.suppress(ValueError, OverflowError):  # a user's directory named 99999999T...
            stamp = max(stamp, datetime.strptime(newest[:22], _STAMP) + timedelta(microseconds=1))
    return f"{stamp:{_STAMP}}-{secrets.token_hex(4)}"


def _check_present(directory: Place, files: Mapping[str, FileEntry]) -> None:
    sizes = directory.sizes(files)
    for name, entry in files.items():
        if name not in sizes:
            raise CheckpointError(f"cannot commit '{directory / name}': it is missing.", remedy=_SHARED)
        if sizes[name] != entry.size:
            raise CheckpointError(
                f"cannot commit '{directory / name}': it has {sizes[name]} bytes, {entry.size} were written.",
                remedy=_SHARED,
            )


_SHARED = "Every rank must write to one shared file system, and no process may remove files during a save."


def _collect(path: Place, save_id: str, *, keep_previous: int, until: str | None) -> None:
    """Remove saves and temporary manifests that no commit refers to.

    Args:
        path: The checkpoint.
        save_id: The committed save, which is never removed.
        keep_previous: The number of other complete saves to keep, newest first.
        until: The newest save to remove; None removes saves of any age.

    Raises:
        CheckpointError: A file or directory could not be removed.
    """
    for name, kind in candidates(path, save_id, keep_previous):
        if kind != "link" and (until is None or name.removeprefix(f".{MANIFEST}.") <= until):
            remove(path / name)


def candidates(place: Place, committed: str, keep_previous: int | None) -> Iterator[tuple[str, str]]:
    """Yield the name and kind of files that are neither committed nor to be kept, newest save first."""
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
    """Return the newest save that cannot be in progress: the one that the previous manifest named."""
    known = [name for name in path.names() if is_save_id(name) and name.encode() in (previous or b"")]
    return max(known, default="")


def _is_ours(name: str) -> bool:
    return is_save_id(name) or name == LOCK or _is_temporary(name)


def _is_temporary(name: str) -> bool:
    return name.startswith(f".{MANIFEST}.") and name.endswith(".tmp")


def remove(place: Place) -> None:
    """Remove a save, or another file of a checkpoint."""
    # Remove the manifest's copy first: a kill in between must not leave a save that looks complete.
    if is_save_id(place.name):
        (place / MANIFEST).remove()
    place.remove()

"""Committing a save, and collecting what no commit refers to.

A save writes into a directory of its own. Replacing the manifest makes it the checkpoint; until then
the previous one is untouched, afterwards it is collected. This module owns those names in the
checkpoint's directory and runs on the coordinator only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from nnx.checkpoint.files import explained, sync_directory, write_file
from nnx.checkpoint.manifest import MANIFEST, FileEntry, Manifest, encode_manifest, is_save_id
from nnx.errors import CheckpointError

__all__ = ["begin", "collect", "commit", "discard", "now"]


def now() -> datetime:
    """The time in UTC."""
    return datetime.now(timezone.utc)


def begin(path: Path) -> str:
    """Make the directory of a new save.

    Args:
        path: The checkpoint; a new or empty directory, or one that holds a checkpoint already.

    Returns:
        The save's id, which is the directory's name.

    Raises:
        CheckpointError: Something else is there, or it cannot be written to.
    """
    with explained("create", path):
        if path.exists() and not path.is_dir():
            raise _refusal(path, "it is a file")
        if path.is_dir():
            _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
    save_id = f"{now():%Y%m%dT%H%M%S.%f}-{secrets.token_hex(4)}"
    directory = path / save_id
    with explained("create", directory):
        directory.mkdir()
    sync_directory(path)
    sync_directory(path.parent)
    return save_id


def _refuse_foreign(path: Path) -> None:
    if (path / MANIFEST).exists():
        return
    foreign = [name for name in sorted(os.listdir(path)) if not _is_ours(name)]  # noqa: PTH208
    if foreign:
        raise _refusal(path, f"it holds other things, such as '{foreign[0]}'")


def _refusal(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"cannot save to '{path}': {why}.",
        remedy="Choose a new path, an empty directory, or an nnx checkpoint to replace.",
    )


def commit(path: Path, manifest: Manifest, *, keep_previous: int) -> None:
    """Make a save whose files are on disk the checkpoint at this path.

    Args:
        path: The checkpoint.
        manifest: Describes the save.
        keep_previous: How many earlier complete saves to keep beside it.

    Raises:
        CheckpointError: A file is not there as described, or the manifest cannot be written. The
            previous checkpoint then stays.
    """
    directory = path / manifest.save_id
    _check_present(directory, manifest.files)
    data = encode_manifest(manifest)
    # The copy marks the save as complete, and outlives the next commit if the save is kept.
    write_file(directory / MANIFEST, data)
    sync_directory(directory)
    temporary = path / f".{MANIFEST}.{manifest.save_id}.tmp"
    write_file(temporary, data)
    with explained("replace", path / MANIFEST):
        temporary.replace(path / MANIFEST)
    with contextlib.suppress(CheckpointError):  # what is committed stays committed
        sync_directory(path)
    collect(path, manifest.save_id, keep_previous=keep_previous)


def _check_present(directory: Path, files: Mapping[str, FileEntry]) -> None:
    for name, entry in files.items():
        with explained("commit", directory / name):
            size = (directory / name).stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"cannot commit '{directory / name}': it has {size} bytes, {entry.size} were written.",
                remedy="Every rank must write to one shared file system, and only one run to this path.",
            )


def collect(path: Path, save_id: str, *, keep_previous: int) -> None:
    """Remove saves and temporary manifests that no commit refers to; never fails.

    Args:
        path: The checkpoint.
        save_id: The committed save, which is never removed.
        keep_previous: How many other complete saves to keep, newest first.
    """
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(path), reverse=True)  # noqa: PTH208
        kept = 0
        for name in names:
            if name == save_id or not _is_ours(name):
                continue
            if is_save_id(name) and kept < keep_previous and (path / name / MANIFEST).exists():
                kept += 1
                continue
            _remove(path / name)


def discard(path: Path, save_id: str) -> None:
    """Remove what a failed save left, as far as that is possible; never what was committed."""
    with contextlib.suppress(OSError):
        if save_id.encode() in (path / MANIFEST).read_bytes():
            return
    _remove(path / save_id)
    _remove(path / f".{MANIFEST}.{save_id}.tmp")
    with contextlib.suppress(OSError):
        path.rmdir()  # only if this save made it: it is not empty otherwise


def _is_ours(name: str) -> bool:
    return is_save_id(name) or (name.startswith(f".{MANIFEST}.") and name.endswith(".tmp"))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            # The manifest's copy goes first, so that a half-removed save never looks complete.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()

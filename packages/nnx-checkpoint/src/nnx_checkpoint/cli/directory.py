"""``nnx ckpt ls`` and ``nnx ckpt gc``: which checkpoints lie below a directory, and which can go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from nnx_checkpoint.cli.content import progress_of, read_content, read_objects
from nnx_checkpoint.cli.output import human_bytes, print_json, print_note, print_table, print_text
from nnx_checkpoint.errors import CheckpointError, ReaderNotInstalledError
from nnx_checkpoint.formats import Found, files_below, survey
from nnx_checkpoint.manifest import MANIFEST, Manifest, decode_manifest, is_save_id
from nnx_checkpoint.source import Source, read_manifest
from nnx_checkpoint.storage import Place
from nnx_checkpoint.transaction import Spared, collect_garbage

__all__ = [
    "run_gc",
    "run_ls",
]


# --- nnx ckpt ls ----------------------------------------------------------------------------------
# ``nnx ckpt ls``: the checkpoints below a directory, and the saves that each still has.


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a checkpoint, or an earlier save of one.

    Attributes:
        path: The path of the checkpoint, or the directory of an earlier save.
        format: Name of the format.
        state: ``whole``, ``incomplete``, ``damaged``, ``interrupted``, ``unfinished`` or ``unchecked``.
        epoch: The epoch, if the checkpoint says it.
        step: Optimizer steps so far.
        bytes: The size of all files.
        created: ISO 8601, or empty.
        detail: Says what is wrong, or where a link leads.
        previous: Earlier saves that are still there, newest first.
    """

    path: str
    format: str
    state: Literal["whole", "incomplete", "damaged", "interrupted", "unfinished", "unchecked"]
    epoch: int | None = None
    step: int | None = None
    bytes: int = 0
    created: str = ""
    detail: str = ""
    previous: list[Row] = field(default_factory=list)


class Listing(TypedDict):
    """What ``nnx ckpt ls --json`` prints."""

    path: str
    checkpoints: list[Row]


def run_ls(path: str, *, as_json: bool) -> int:
    """Print the list."""
    rows = [_row(found) for found in survey(path)]
    if as_json:
        content: Listing = {"path": path, "checkpoints": rows}
        print_json(content)
    elif rows:
        print_table(
            ("checkpoint", "format", "epoch", "step", "size", "created", "state"), list(_cells(rows, path))
        )
    else:
        print_note(f"There is no checkpoint below '{path}'.")
    return 0


def _cells(rows: list[Row], root: str) -> Iterator[list[str]]:
    for row in rows:
        yield _line(row, row.path.removeprefix(root).lstrip("/") or row.path)
        for save in row.previous:
            yield _line(save, f"  save {save.path.rsplit('/', 1)[-1]}")


def _line(row: Row, name: str) -> list[str]:
    return [
        name,
        row.format,
        "" if row.epoch is None else str(row.epoch),
        "" if row.step is None else str(row.step),
        human_bytes(row.bytes),
        row.created[:19].replace("T", " "),
        f"{row.state}: {row.detail}" if row.detail else row.state,
    ]


def _row(found: Found) -> Row:
    path, size = str(found.place), sum(files_below(found.place).values())
    if found.kind == "partial":
        return Row(
            path, "", "unfinished", bytes=size, detail="a conversion that was interrupted, or still runs"
        )
    if found.kind == "interrupted":
        detail = "its first save was never committed"
        return Row(path, "nnx", "interrupted", bytes=size, detail=detail, previous=_earlier(found.place, ""))
    try:
        return _own(found.place) if found.format == "nnx" else _foreign(found, size)
    except ReaderNotInstalledError as error:
        detail = f"its reader is not installed. {error.remedy}"
        return Row(path, found.format, "unchecked", bytes=size, created=_changed(found.place), detail=detail)
    except CheckpointError as error:
        return Row(path, found.format, "damaged", bytes=size, detail=error.message)


def _own(place: Place) -> Row:
    manifest = read_manifest(place)
    row = _save(place, manifest, str(place), _link(place))
    return Row(**{**_shallow(row), "previous": _earlier(place, manifest.save_id)})


def _shallow(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


def _save(place: Place, manifest: Manifest, path: str, detail: str = "") -> Row:
    """Look at one save: are its files there, and how far was the run?"""
    source = Source(place, manifest)
    size = sum(entry.size for entry in manifest.files.values())
    row = Row(path, "nnx", "whole", bytes=size, created=manifest.created, detail=detail)
    faults = [error.message for _, error in source.faults()]
    if faults:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        return Row(**{**_shallow(row), "state": "incomplete", "detail": faults[0].rstrip(".") + more})
    objects = read_objects(source)
    epoch, step = progress_of((objects.get("trainer") or {}) if isinstance(objects, dict) else {})
    return Row(**{**_shallow(row), "epoch": epoch, "step": step})


def _earlier(place: Place, committed: str) -> list[Row]:
    """Other complete saves of a checkpoint."""
    rows = []
    for name in reversed(place.names()):
        if is_save_id(name) and name != committed:
            rows.append(_earlier_save(place, name))
    return rows


def _earlier_save(place: Place, name: str) -> Row:
    path = str(place / name)
    manifest = place / name / MANIFEST
    try:
        if manifest.kind() != "file":
            size = sum(files_below(place / name).values())
            return Row(path, "nnx", "interrupted", bytes=size, detail="`nnx ckpt gc` removes it")
        return _save(place, decode_manifest(manifest.read(manifest.size()), source=str(manifest)), path)
    except CheckpointError as error:
        return Row(path, "nnx", "damaged", detail=error.message)


def _foreign(found: Found, size: int) -> Row:
    content = read_content(str(found.place))
    epoch, step = progress_of(content.trainer)
    return Row(
        str(found.place),
        found.format,
        "unchecked",
        epoch=epoch,
        step=step,
        bytes=size,
        created=_changed(found.place),
        detail=_link(found.place),
    )


def _link(place: Place) -> str:
    path = place.location
    return f"link to {path.readlink()}" if isinstance(path, Path) and path.is_symlink() else ""


def _changed(place: Place) -> str:
    path = place.location
    if not isinstance(path, Path):
        return ""
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat()


# --- nnx ckpt gc ----------------------------------------------------------------------------------
# ``nnx ckpt gc``: removing what no checkpoint needs.


class Removed(TypedDict):
    """Something that no checkpoint needs."""

    path: str
    kind: str
    bytes: int


class Collection(TypedDict):
    """What ``nnx ckpt gc --json`` prints.

    Attributes:
        bytes: The bytes that were removed, or with --dry-run would be.
        spared: The paths that looked like garbage and were left alone.
    """

    path: str
    dry_run: bool
    bytes: int
    removed: list[Removed]
    spared: list[Spared]


def run_gc(path: str, *, keep_previous: int | None, min_age: float, dry_run: bool, as_json: bool) -> int:
    """Remove it, or with `dry_run` say what would be removed."""
    collected = collect_garbage(path, keep_previous=keep_previous, min_age=min_age, dry_run=dry_run)
    if as_json:
        content: Collection = {
            "path": path,
            "dry_run": dry_run,
            "bytes": collected.nbytes,
            "removed": [
                {"path": item.path, "kind": item.kind, "bytes": item.nbytes} for item in collected.removed
            ],
            "spared": collected.spared,
        }
        print_json(content)
        return 0
    if collected.removed:
        print_table(
            ("path", "kind", "size"),
            [(item.path, item.kind, human_bytes(item.nbytes)) for item in collected.removed],
        )
    for item in collected.spared:
        print_note(f"left alone: {item.path}: {item.why.rstrip('.')}.")
    verb = "would be removed" if dry_run else "removed"
    print_text(f"{len(collected.removed)} {verb}, {human_bytes(collected.nbytes)}.")
    return 0

"""Run ``nnx ckpt ls``, ``gc``, ``merge`` and ``convert``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import typer
from typing_extensions import TypedDict

from nnx_base.errors import CheckpointError, ReaderNotInstalledError
from nnx_checkpoint.cli.content import progress_of, read_content, read_objects
from nnx_checkpoint.cli.output import (
    INTERRUPTED,
    byte_progress,
    human_bytes,
    print_json,
    print_note,
    print_table,
    print_text,
)
from nnx_checkpoint.format.manifest import MANIFEST, Manifest, decode_manifest, is_save_id
from nnx_checkpoint.format.source import Source, read_manifest
from nnx_checkpoint.reading.survey import Found, files_below, survey
from nnx_checkpoint.storage import Place
from nnx_checkpoint.writing.collecting import Spared, collect_garbage

# ``nnx ckpt ls``: list the checkpoints below a directory, and the saves of each.


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the list: a checkpoint, or an earlier save of one.

    Attributes:
        path: The path of the checkpoint, or the directory of an earlier save.
        format: Name of the format.
        state: ``whole``, ``incomplete``, ``damaged``, ``interrupted``, ``unfinished`` or ``unchecked``.
        epoch: The epoch, if the checkpoint records it.
        step: Optimizer steps so far.
        bytes: The size of all files.
        created: ISO 8601, or empty.
        detail: The fault, or the target of a link.
        previous: Earlier saves on disk, newest first.
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
    """The output of ``nnx ckpt ls --json``."""

    path: str
    checkpoints: list[Row]


def run_ls(path: str, *, as_json: bool) -> int:
    """Print the checkpoints below a path; return the exit code."""
    rows = [_row(found) for found in survey(path)]
    if as_json:
        content: Listing = {"path": path, "checkpoints": rows}
        print_json(content)
    elif rows:
        print_table(
            ("checkpoint", "format", "epoch", "step", "size", "created", "state"), list(_cells(rows, path))
        )
    else:
        print_note(f"No checkpoint found below '{path}'.")
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
        row.created[:16].replace("T", " "),
        f"{row.state}: {row.detail}" if row.detail else row.state,
    ]


def _row(found: Found) -> Row:
    try:
        with found.place.explained("look at"):
            return _look_at(found, sum(files_below(found.place).values()))
    except CheckpointError as error:  # unreadable, or removed since the search found it
        return Row(str(found.place), found.format, "damaged", detail=error.message)
    except RecursionError:
        return Row(str(found.place), found.format, "damaged", detail="its directories are nested too deeply")


def _look_at(found: Found, size: int) -> Row:
    path = str(found.place)
    if found.kind == "partial":
        return Row(path, "", "unfinished", bytes=size, detail="a conversion, interrupted or still running")
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
    """Return the row of one save: its files' presence, epoch and step."""
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
    """Return the rows of other saves of a checkpoint, newest first."""
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


# ``nnx ckpt gc``: remove files that no checkpoint needs.


class Removed(TypedDict):
    """A file or directory that no checkpoint needs."""

    path: str
    kind: str
    bytes: int


class Collection(TypedDict):
    """The output of ``nnx ckpt gc --json``.

    Attributes:
        bytes: The bytes that were removed, or with --dry-run would be.
        spared: The paths that looked like garbage and were kept, or could not be removed.
    """

    path: str
    dry_run: bool
    bytes: int
    removed: list[Removed]
    spared: list[Spared]


def run_gc(path: str, *, keep_previous: int | None, min_age: float, dry_run: bool, as_json: bool) -> int:
    """Remove garbage, or with `dry_run` only list it; return the exit code."""
    collected = collect_garbage(path, keep_previous=keep_previous, min_age=min_age, dry_run=dry_run)
    spared, code = [*collected.spared, *collected.failed], 1 if collected.failed else 0
    if as_json:
        content: Collection = {
            "path": path,
            "dry_run": dry_run,
            "bytes": collected.nbytes,
            "removed": [
                {"path": item.path, "kind": item.kind, "bytes": item.nbytes} for item in collected.removed
            ],
            "spared": spared,
        }
        print_json(content)
        return code
    if collected.removed:
        print_table(
            ("path", "kind", "size"),
            [(item.path, item.kind, human_bytes(item.nbytes)) for item in collected.removed],
        )
    for item in spared:
        print_note(f"kept {item.path}: {item.why.rstrip('.')}.")
    verb = "would be removed" if dry_run else "removed"
    print_text(f"{len(collected.removed)} {verb}, {human_bytes(collected.nbytes)}.")
    return code


# ``nnx ckpt merge`` and ``convert``: write a checkpoint in another format.


class Written(TypedDict):
    """The output of ``nnx ckpt merge --json`` and ``nnx ckpt convert --json``.

    Attributes:
        bytes: The size of the files that were written.
    """

    source: str | list[str]
    target: str
    format: str
    bytes: int
    seconds: float


def run_merge(
    sources: Sequence[str],
    target: str,
    *,
    to: str | None,
    only_weights: bool,
    weights_only: bool,
    as_json: bool,
) -> int:
    """Merge a checkpoint into one file; return the exit code."""
    from nnx_checkpoint import merge

    _require_writable(to)
    source: Any = sources[0] if len(sources) == 1 else list(sources)
    chosen = {"to": to, "save_weights_only": only_weights or None, "weights_only": weights_only}
    return _write("merging", merge, source, target, chosen, as_json=as_json)


def run_convert(
    source: str,
    target: str,
    *,
    to: str | None,
    only_weights: bool,
    weights_only: bool,
    options: Sequence[str],
    as_json: bool,
    config: str | None = None,
    source_options: Sequence[str] = (),
) -> int:
    """Write a checkpoint in another format; return the exit code."""
    from nnx_checkpoint import convert

    _require_writable(to)
    chosen = {"to": to, "save_weights_only": only_weights or None, "weights_only": weights_only}
    options = [*options, *([] if config is None else [f"config={json.dumps(config)}"])]
    given = _options(options, _known_options(to))
    if source_options:
        given["source_options"] = _options(source_options, None)
    return _write("converting", convert, source, target, {**chosen, **given}, as_json=as_json)


def _write(
    doing: str, write: Callable[..., Any], source: Any, target: str, chosen: dict[str, Any], *, as_json: bool
) -> int:
    from nnx_checkpoint.reading.formats import find_format
    from nnx_checkpoint.storage.locations import place_of

    began = time.monotonic()
    try:
        with byte_progress(doing) as progress:
            write(source, target, progress=progress, **chosen)
    except KeyboardInterrupt:
        print_note(f"Interrupted: '{target}' was not written, and nothing else was changed.")
        raise SystemExit(INTERRUPTED) from None
    seconds = time.monotonic() - began
    nbytes, name = sum(files_below(place_of(target)).values()), find_format(target).name
    if as_json:
        content: Written = {
            "source": source,
            "target": target,
            "format": name,
            "bytes": nbytes,
            "seconds": round(seconds, 3),
        }
        print_json(content)
    else:
        print_text(f"{target}: {name}, {human_bytes(nbytes)} in {seconds:.1f} s.")
    return 0


def describe_writable() -> str:
    """Return the formats that `merge` and `convert` write, with their options, a paragraph each."""
    from nnx_checkpoint.reading.formats import get_format, specs, writable

    lines = ["Formats for --to, and their options for -o:"]
    for name in writable():
        options = ", ".join(get_format(name).options())
        lines.append(f"{name}: {specs()[name].description}{f' (-o {options})' if options else ''}")
    return "\n\n".join(lines)


def _require_writable(to: str | None) -> None:
    """Raise a usage error for a format that is unknown or read-only."""
    from nnx_checkpoint.reading.formats import get_format, writable

    if to is None:
        return
    try:
        chosen = get_format(to)
    except CheckpointError as error:
        known = f"{error.message} Use one of {', '.join(writable())}."
        raise typer.BadParameter(known, param_hint="'--to'") from error
    if not chosen.can_write:
        raise typer.BadParameter(
            f"format {to!r} can be read but not written. Use one of {', '.join(writable())}.",
            param_hint="'--to'",
        )


def _known_options(to: str | None) -> list[str] | None:
    """Return the names of a format's options; None if the target's name decides the format."""
    from nnx_checkpoint.reading.formats import get_format

    if to is None:
        return None
    return get_format(to).options()


def _options(given: Sequence[str], known: list[str] | None) -> dict[str, Any]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE.", param_hint="'-o'")
        if known is not None and name not in known:
            raise typer.BadParameter(
                f"unknown option {name!r}; the options of the format are: {', '.join(known) or 'none'}.",
                param_hint="'-o'",
            )
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    """Parse a value as JSON (a number, true, false, null, a list), else return the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text

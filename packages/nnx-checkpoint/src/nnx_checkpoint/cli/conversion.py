"""``nnx ckpt merge`` and ``nnx ckpt convert``: writing a checkpoint in another form."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import (
    INTERRUPTED,
    byte_progress,
    human_bytes,
    print_json,
    print_note,
    print_text,
)
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.formats import files_below


class Written(TypedDict):
    """What ``nnx ckpt merge --json`` and ``nnx ckpt convert --json`` print.

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
    """Merge into one file."""
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
) -> int:
    """Write in another format."""
    from nnx_checkpoint import convert

    _require_writable(to)
    chosen = {"to": to, "save_weights_only": only_weights or None, "weights_only": weights_only}
    given = _options(options, _known_options(to))
    return _write("converting", convert, source, target, {**chosen, **given}, as_json=as_json)


def _write(
    doing: str, write: Callable[..., Any], source: Any, target: str, chosen: dict[str, Any], *, as_json: bool
) -> int:
    from nnx_checkpoint.formats import find_format
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


def _require_writable(to: str | None) -> None:
    """A format that is unknown or can only be read is wrong usage."""
    from nnx_checkpoint.formats import get_format, writable

    if to is None:
        return
    try:
        chosen = get_format(to)
    except CheckpointError as error:
        raise typer.BadParameter(f"{error.message} {error.remedy}", param_hint="'--to'") from error
    if not chosen.can_write:
        raise typer.BadParameter(
            f"format {to!r} can be read but not written. Use one of {', '.join(writable())}.",
            param_hint="'--to'",
        )


def _known_options(to: str | None) -> list[str] | None:
    """Names of the options of a format; None where the target's name decides which it is."""
    from nnx_checkpoint.formats import get_format

    if to is None:
        return None
    parameters = inspect.signature(get_format(to).write).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "progress"]


def _options(given: Sequence[str], known: list[str] | None) -> dict[str, Any]:
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE.", param_hint="'-o'")
        if known is not None and name not in known:
            raise typer.BadParameter(
                f"there is no option {name!r}; the format's are: {', '.join(known) or 'none'}.",
                param_hint="'-o'",
            )
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    """As JSON where it is: a number, true, false, null, a list; else as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text

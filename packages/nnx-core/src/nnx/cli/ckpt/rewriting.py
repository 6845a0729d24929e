"""``nnx ckpt merge`` and ``nnx ckpt convert``: writing a checkpoint in another form."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import typer

from nnx.checkpoint.surveying import files_below
from nnx.cli.output import human_bytes, print_json, print_text
from nnx.cli.progress import byte_progress
from nnx.errors import CheckpointError

__all__ = ["run_convert", "run_merge"]


def run_merge(
    sources: Sequence[str], target: str, *, to: str | None, options: Sequence[str], as_json: bool
) -> int:
    """Merge into one file."""
    from nnx.checkpoint import merge

    source: Any = sources[0] if len(sources) == 1 else list(sources)
    given = _options(to, options)
    return _write("merging", merge, source, target, {"to": to, **given}, as_json=as_json)


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
    from nnx.checkpoint import convert

    given = _options(to, options)
    chosen = {"to": to, "only_weights": only_weights, "weights_only": weights_only, **given}
    return _write("converting", convert, source, target, chosen, as_json=as_json)


def _write(
    doing: str, write: Callable[..., Any], source: Any, target: str, chosen: dict[str, Any], *, as_json: bool
) -> int:
    from nnx.checkpoint.formats import find_format
    from nnx.checkpoint.places import place_of

    began = time.monotonic()
    with byte_progress(doing) as progress:
        write(source, target, progress=progress, **chosen)
    seconds = time.monotonic() - began
    nbytes, name = sum(files_below(place_of(target)).values()), find_format(target).name
    if as_json:
        print_json(
            {
                "source": source,
                "target": target,
                "format": name,
                "bytes": nbytes,
                "seconds": round(seconds, 3),
            }
        )
    else:
        speed = human_bytes(round(nbytes / max(seconds, 1e-9)))
        print_text(f"{target}: {name}, {human_bytes(nbytes)} in {seconds:.1f} s ({speed}/s).")
    return 0


def _options(to: str | None, given: Sequence[str]) -> dict[str, Any]:
    """Options of the format that is written; what is not known is wrong usage."""
    from nnx.checkpoint.formats import get_format, writable

    known: list[str] | None = None
    if to is not None:
        try:
            chosen = get_format(to)
        except CheckpointError as error:
            raise typer.BadParameter(f"{error.message} {error.remedy}", param_hint="--to") from error
        if not chosen.can_write:
            raise typer.BadParameter(
                f"format {to!r} can only be read; use one of {', '.join(writable())}.", param_hint="--to"
            )
        known = _own_options(chosen.write)
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or (known is not None and name not in known):
            listed = "NAME=VALUE" if known is None else ", ".join(f"{name}=..." for name in known) or "none"
            raise typer.BadParameter(f"{text!r} is not an option; it takes {listed}.", param_hint="-o")
        options[name] = _value(value)
    return options


def _own_options(write: Callable[..., Any]) -> list[str]:
    own = [p.name for p in inspect.signature(write).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return [name for name in own if name != "progress"]


def _value(text: str) -> Any:
    """As JSON where it is: a number, true, false, null, a list; else as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text

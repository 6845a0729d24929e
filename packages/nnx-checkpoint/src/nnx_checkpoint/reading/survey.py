"""Find the checkpoints below a directory, and the leftovers of interrupted programs.

The search opens no checkpoint: it recognizes them by names and first bytes. It asks formats of other programs
only about names that could be theirs, because asking imports torch. A checkpoint may share its directory with
others, so the search continues below it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from nnx_base.errors import (
    CheckpointError,
    PluginError,
)
from nnx_checkpoint.format.manifest import MANIFEST, is_save_id
from nnx_checkpoint.format.source import is_our_manifest
from nnx_checkpoint.reading.formats import from_outside, get_format, recognises, specs
from nnx_checkpoint.storage import Location, Place
from nnx_checkpoint.storage.locations import place_of

log = logging.getLogger("nnx.checkpoint")

PARTIAL = ".nnx-partial"
"""Suffix of unfinished conversions: ``.<name>.<random>.nnx-partial``, beside the target."""


_PARTIAL_NAME = re.compile(r"\..+\.[0-9a-f]{8}" + re.escape(PARTIAL), re.DOTALL)


_FOREIGN_NAMES = {".metadata", "latest"}


_FOREIGN_ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp", ".index.json")


_LIGHTNING_ENDING = ".ckpt"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint or leftover in a directory tree.

    Attributes:
        place: Its path or URL.
        kind: ``checkpoint``; ``interrupted`` for a directory whose first save never was committed; or
            ``partial`` for an unfinished conversion.
        format: Name of a checkpoint's format.
    """

    place: Place
    kind: Literal["checkpoint", "interrupted", "partial"]
    format: str = ""


def survey(location: Location, skipped: Callable[[Place, str], None] | None = None) -> Iterator[Found]:
    """Find everything at a path and below it, in the order of names.

    The search skips hidden directories, links to directories and the saves of a checkpoint.

    Args:
        location: A path or a URL.
        skipped: Function of each place that cannot be inspected, and the reason. None logs a warning.

    Raises:
        CheckpointError: The location does not exist or cannot be listed.
    """
    root = place_of(location)
    if root.kind() is None:
        raise CheckpointError(f"there is nothing at '{root}'.", remedy="Check the path.")
    root.names()
    pending = [(root, "")]
    while pending:
        place, outer = pending.pop()
        try:
            found, children = _look_at(place, outer)
        except CheckpointError as error:
            (skipped or _log_skipped)(place, error.message)
            continue
        if found is not None:
            yield found
        pending += reversed(children)


def _log_skipped(place: Place, why: str) -> None:
    log.warning("Skipped '%s': %s", place, why)


def _look_at(place: Place, outer: str) -> tuple[Found | None, list[tuple[Place, str]]]:
    """Return the kind of one place, and the places to search next.

    Args:
        place: The place.
        outer: The format of another program's checkpoint that the place may belong to; else empty.
    """
    if _PARTIAL_NAME.fullmatch(place.name):
        return Found(place, "partial"), []
    if place.kind() != "directory":
        # A file in another program's directory belongs to that program, unless Lightning wrote it beside.
        found = "" if outer and not place.name.endswith(_LIGHTNING_ENDING) else _foreign_format(place, [])
        return (Found(place, "checkpoint", found) if found else None), []
    names = place.names()
    has_saves = any(is_save_id(name) for name in names)
    if MANIFEST in names and (has_saves or is_our_manifest(place / MANIFEST)):
        return Found(place, "checkpoint", "nnx"), _children(place, names, "")
    if has_saves:
        return Found(place, "interrupted", "nnx"), _children(place, names, "")
    outer = outer if outer and get_format(outer).reaches_below else ""
    found = _foreign_format(place, names)
    children = _children(place, names, found or outer)
    return (Found(place, "checkpoint", found) if found and found != outer else None), children


def _children(place: Place, names: list[str], outer: str) -> list[tuple[Place, str]]:
    """Return the entries of a directory to search: partial conversions, and all that are not hidden."""
    wanted = [
        name
        for name in names
        if _PARTIAL_NAME.fullmatch(name)
        or not (name.startswith(".") or is_save_id(name) or _leads_away(place / name))
    ]
    # Each found checkpoint becomes a root of its own and may be a link; below a root no link is followed.
    return [(place_of((place / name).location), outer) for name in wanted]


def _leads_away(place: Place) -> bool:
    """Return True for a link to a directory that is no checkpoint of ours: it could form a cycle."""
    path = place.location
    if isinstance(path, str):
        return False
    try:
        return path.is_symlink() and path.is_dir() and not (path / MANIFEST).exists()
    except (OSError, RuntimeError):  # it cannot be inspected, or points to itself
        return True


def _foreign_format(place: Place, names: list[str]) -> str:
    own = names or [place.name]
    typical = any(name in _FOREIGN_NAMES or name.endswith(_FOREIGN_ENDINGS) for name in own)
    if not typical and not from_outside():
        return ""

    for name in specs():
        try:
            if name != "nnx" and recognises(get_format(name), place.location):
                return name
        except PluginError:  # `nnx doctor` reports plugins that cannot be imported
            continue
    return ""


def files_below(place: Place) -> dict[str, int]:
    """Return the sizes of a file, or of all files in a directory, by relative name."""
    if place.kind() == "file":
        return {place.name: place.size()}
    names = place.names()
    directories = [name for name in names if (place / name).kind() == "directory"]
    found = place.sizes(name for name in names if name not in directories)
    for name in directories:
        found |= {f"{name}/{inner}": size for inner, size in files_below(place / name).items()}
    return found

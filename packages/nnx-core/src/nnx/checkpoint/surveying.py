"""Finding the checkpoints below a directory, and what interrupted programs left between them.

Nothing is opened: names tell what something is. Formats of other programs are asked only where a name could
be theirs, because that imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nnx.checkpoint.manifest import MANIFEST, is_save_id
from nnx.checkpoint.places import place_of
from nnx.checkpoint.storage import Location, Place
from nnx.errors import CheckpointError, PluginError
from nnx.plugins import checkpoint_formats

__all__ = ["PARTIAL", "Found", "files_below", "survey"]

PARTIAL = ".nnx-partial"
"""How the names of unfinished conversions end: ``.<name>.<random>.nnx-partial``, beside the target."""

_FOREIGN_NAMES = {".metadata", "latest"}
_FOREIGN_ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp", ".index.json")


@dataclass(frozen=True, slots=True)
class Found:
    """One thing in a directory tree.

    Attributes:
        place: Where it is.
        kind: ``checkpoint``; ``interrupted`` for a directory whose first save never was committed; or
            ``partial`` for an unfinished conversion.
        format: Name of a checkpoint's format.
    """

    place: Place
    kind: Literal["checkpoint", "interrupted", "partial"]
    format: str = ""


def survey(location: Location) -> Iterator[Found]:
    """Find everything at a path and below it, in the order of names.

    Checkpoints are not looked into, and neither are hidden directories and links to directories.

    Raises:
        CheckpointError: Nothing is there, or it cannot be listed.
    """
    root = place_of(location)
    if root.kind() is None:
        raise CheckpointError(f"there is nothing at '{root}'.", remedy="Check the path.")
    yield from _visit(root)


def _visit(place: Place) -> Iterator[Found]:
    if place.name.endswith(PARTIAL):
        yield Found(place, "partial")
        return
    names = place.names() if place.kind() == "directory" else []
    if MANIFEST in names:
        yield Found(place, "checkpoint", "nnx")
    elif any(is_save_id(name) for name in names):
        yield Found(place, "interrupted", "nnx")
    elif found := _foreign_format(place, names):
        yield Found(place, "checkpoint", found)
    else:
        for name in names:
            if name.endswith(PARTIAL) or not (name.startswith(".") or _leads_away(place / name)):
                # What is found is a root of its own, which may be a link; only below it none is followed.
                yield from _visit(place_of((place / name).location))


def _leads_away(place: Place) -> bool:
    """Whether it is a link to a directory that is no checkpoint of ours: it could lead around in circles."""
    path = place.location
    return (
        not isinstance(path, str) and path.is_symlink() and path.is_dir() and not (path / MANIFEST).exists()
    )


def _foreign_format(place: Place, names: list[str]) -> str:
    own = names or [place.name]
    typical = any(name in _FOREIGN_NAMES or name.endswith(_FOREIGN_ENDINGS) for name in own)
    if not typical and not checkpoint_formats():
        return ""
    from nnx.checkpoint.formats import get_format, specs

    for name in specs():
        try:
            if name != "nnx" and get_format(name).guess_can_open(place.location):
                return name
        except PluginError:  # a plugin that cannot be imported is `nnx doctor`'s matter
            continue
    return ""


def files_below(place: Place) -> dict[str, int]:
    """Sizes of the file at a place, or of all files in the directory there, by relative name."""
    if place.kind() == "file":
        return {place.name: place.size()}
    names = place.names()
    directories = [name for name in names if (place / name).kind() == "directory"]
    found = place.sizes(name for name in names if name not in directories)
    for name in directories:
        found |= {f"{name}/{inner}": size for inner, size in files_below(place / name).items()}
    return found

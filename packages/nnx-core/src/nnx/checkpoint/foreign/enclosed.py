"""What a directory of another program's may lead to: itself, and in Hugging Face's cache its repository.

Those programs write no links, but people make them, and pass directories on. A link that stays in the
directory is followed; one that leaves it, a pipe, a socket or a device is refused before anything is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nnx.checkpoint.files import explained
from nnx.errors import CheckpointError

__all__ = ["require_enclosed", "require_inside"]

_DEPTH = 2
"""Formats look into a directory and those directly in it,"""
_ZERO = "zero"
"""and DeepSpeed's universal one into a folder of this name with a folder for each parameter."""


def require_enclosed(directory: Path) -> None:
    """Refuse a directory of which a part that a format looks at lies elsewhere or is no regular file.

    Raises:
        CheckpointError: With the name of what is refused.
    """
    _check(directory, directory, _DEPTH)


def require_inside(path: Path, directory: Path) -> None:
    """Refuse what is not a regular file or a directory, or leads out of the checkpoint.

    A snapshot in Hugging Face's cache, ``models--*/snapshots/*``, is made of links to files in ``blobs``
    beside ``snapshots``; these are its own.

    Args:
        path: Something in the checkpoint, which need not exist.
        directory: The checkpoint.

    Raises:
        CheckpointError: With its name.
    """
    try:
        target, root = path.resolve(), directory.resolve()
        kind = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:  # such as links in circles
        raise CheckpointError(f"cannot read '{path}': {error}.", remedy=_REMEDY) from error
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise CheckpointError(f"'{path}' is neither a file nor a directory.", remedy="Remove it.")
    homes = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        homes.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"'{path}' is a link that leads out of the checkpoint.", remedy=_REMEDY)


def _check(directory: Path, root: Path, depth: int) -> None:
    with explained("list", directory), os.scandir(directory) as listed:
        entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_file(follow_symlinks=False):
            continue
        if entry.is_symlink() or not entry.is_dir():
            require_inside(path, root)
        if entry.is_symlink() and depth < _DEPTH and entry.is_dir():
            raise CheckpointError(f"'{path}' is a link to a directory.", remedy=_REMEDY)
        if entry.is_dir() and (depth > 1 or _ZERO in (entry.name, directory.name)):
            _check(path, root, depth - 1)


_REMEDY = "Copy the checkpoint with what its links lead to (`cp -rL`), or open a directory without them."

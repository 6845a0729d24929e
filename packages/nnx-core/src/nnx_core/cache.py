"""JSON kept for this user from one run to the next: what was measured or tried, nothing that is needed.

A file that is missing or cannot be parsed counts as none, a directory that cannot be written is done without.
Processes may write one file at the same time: whole contents replace each other.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_directory(*names: str) -> Path:
    """Where it is kept: below ``NNX_CACHE_DIR``, or below the user's cache directory.

    Args:
        *names: Of the directories below it, such as the engine's.
    """
    base = os.environ.get("NNX_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nnx"
    return root.joinpath(*names)


def read_json(path: Path) -> Any:
    """What a file holds; None if none can be read. Its form is the caller's to check."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Keep something, if the directory can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)

"""Notes that running processes leave for `nnx doctor`: the line with which another process joins, say.

A note is a file that is named after its process. It needs the standard library only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["leave_note", "notes"]


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"nnx-notes-{os.getuid() if hasattr(os, 'getuid') else 0}"


def leave_note(text: str) -> Callable[[], None]:
    """Leave a note of this process, in place of an earlier one; return a function that removes it."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / str(os.getpid())
    path.write_text(text, encoding="utf-8")

    def remove() -> None:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other processes have notes there
            folder.rmdir()

    return remove


def notes() -> dict[int, str]:
    """Return the notes of running processes by process id, and remove those of dead ones."""
    found: dict[int, str] = {}
    folder = _folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            os.kill(int(path.name), 0)
            found[int(path.name)] = path.read_text(encoding="utf-8")
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):  # it has ended since, or is another file
            continue
    return found

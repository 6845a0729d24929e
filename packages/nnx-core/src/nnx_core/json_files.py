"""JSON files: plans, which users keep and edit, and the user's cache.

An engine owns the content of its plans; a file that is no plan raises one clear error. The cache holds
measurements and is optional: an unreadable file counts as missing, and an unwritable directory is ignored.
Files are replaced atomically, so a reader finds the old file or the new one.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_core.errors import PlanError


@dataclass(frozen=True, slots=True)
class PlanFormat:
    """The header of one engine's plans.

    Attributes:
        owner: The distribution of the engine, such as ``"nnx-nnscaler"``.
        version: The only version that is written and read.
        writer: The function that writes such a file, for remedies: ``"`Plan.save`"``.
    """

    owner: str
    version: int
    writer: str

    @property
    def head(self) -> dict[str, Any]:
        """The first keys of every document."""
        return {"format": f"{self.owner} plan", "version": self.version}

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a file.

        Raises:
            PlanError: The file is missing, or is no plan of this format and version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PlanError(
                f"the plan {str(path)!r} cannot be read: {reason}.", remedy="Check the path."
            ) from error
        return self.parse(text, path=str(path))

    def parse(self, text: str, *, path: str = "") -> dict[str, Any]:
        """Parse a text as a document.

        Args:
            text: The JSON.
            path: The path of the file, for messages.

        Raises:
            PlanError: It is no plan of this format and version.

        Example:
            >>> PlanFormat("nnx-example", 1, "`save`").parse('{"format": "nnx-example plan", "version": 1}')
            {'format': 'nnx-example plan', 'version': 1}
        """
        remedy = f"Pass a file that {self.writer} wrote."
        try:
            body = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the plan {path!r} is no JSON: {error}.", remedy=remedy) from error
        if not isinstance(body, dict) or body.get("format") != self.head["format"]:
            raise PlanError(f"{path!r} is no plan of {self.owner}.", remedy=remedy)
        if body.get("version") != self.version:
            raise PlanError(
                f"the plan {path!r} has version {body.get('version')!r}, expected {self.version}.",
                remedy="Make a new plan, or use the version that wrote it.",
            )
        return body


def save_plan(path: str | Path, text: str) -> None:
    """Replace a file atomically; create its directory if it is missing.

    Raises:
        PlanError: It cannot be written.
    """
    try:
        _replace(Path(path), text)
    except OSError as error:
        raise PlanError(
            f"{str(path)!r} cannot be written: {error.strerror or error}.", remedy="Choose another path."
        ) from error


def cache_directory(*names: str) -> Path:
    """Return a directory of the cache, below ``NNX_CACHE_DIR`` or the user's cache directory.

    Args:
        *names: The names of the directories below it, such as the engine's.
    """
    base = os.environ.get("NNX_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nnx"
    return root.joinpath(*names)


def read_json(path: Path) -> Any:
    """Return the content of a file; None if it cannot be read. The caller checks its form."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a file to the cache (if its directory is writable)."""
    with suppress(OSError):
        _replace(path, json.dumps(content, indent=1))


def _replace(path: Path, text: str) -> None:
    """Write a file atomically; create its directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise

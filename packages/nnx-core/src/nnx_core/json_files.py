"""JSON that we write for later: plans, which people keep and edit, and what is kept for this user.

What a plan says is its engine's; a file that is no plan is one clear error. What is kept from one run to
the next was measured or tried and is never needed: a file that cannot be read counts as none, and a
directory that cannot be written is done without. Files are replaced at once, so that a reader finds the old
one or the new one.
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
    """The head of one engine's plans, and how they are read.

    Attributes:
        owner: The distribution whose plans these are: ``"nnx-nnscaler"``.
        version: The version that is written, and the only one that is read.
        writer: The function that writes such a file, for remedies: ``"`Plan.save`"``.
    """

    owner: str
    version: int
    writer: str

    @property
    def head(self) -> dict[str, Any]:
        """The keys that begin every document."""
        return {"format": f"{self.owner} plan", "version": self.version}

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a file.

        Raises:
            PlanError: There is none, or it is no plan of this format and version.
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
        """Understand a text as a document.

        Args:
            text: The JSON.
            path: The path that it is from, used in messages.

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
                f"the plan {path!r} is of version {body.get('version')!r}, and {self.version} is read.",
                remedy="Plan anew, or use the version that wrote it.",
            )
        return body


def save_plan(path: str | Path, text: str) -> None:
    """Replace a file at once; its directory is made where it is missing.

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
    """Where it is kept: below ``NNX_CACHE_DIR``, or below the user's cache directory.

    Args:
        *names: Of the directories below it, such as the engine's.
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
    """Keep something, if the directory can be written."""
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

"""Plans as documents that people keep and edit: JSON with a format and a version, read with one clear error.

What a plan says is its engine's. Files are replaced at once, so a reader finds the old one or the new one.
"""

from __future__ import annotations

import json
import os
import tempfile
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
        writer: What writes such a file, named in remedies: ``"`Plan.save`"``.
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
    target, temporary = Path(path), ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise PlanError(
            f"{str(path)!r} cannot be written: {error.strerror or error}.", remedy="Choose another path."
        ) from error

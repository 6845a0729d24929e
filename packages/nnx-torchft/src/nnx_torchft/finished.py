"""The mark of a run that has ended, so that a group that comes later does not train it once more."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["Mark"]


class Mark:
    """A file that says at which step a run has ended.

    Attributes:
        path: The path of the file.

    Args:
        directory: The Trainer's ``default_root_dir``.
        run: The name of the run; a run without a name has no mark.
    """

    def __init__(self, directory: str, run: str) -> None:
        self._run = run
        self.path = Path(directory) / "elastic" / f"{run}.finished.json"

    def write(self, step: int) -> None:
        """Mark the run as finished, by one atomic rename."""
        if not self._run:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"run": self._run, "step": step}))
        temporary.replace(self.path)

    def read(self) -> int | None:
        """Return the step at which the run has ended; None if it has not."""
        if not self.path.exists():
            return None
        step: int = json.loads(self.path.read_text())["step"]
        return step

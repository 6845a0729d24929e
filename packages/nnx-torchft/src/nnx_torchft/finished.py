"""The mark of a run that has ended, so that a group that comes later does not train it once more."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nnx_core.errors import NnxError

__all__ = ["Mark", "RunFinishedError"]


class RunFinishedError(NnxError):
    """The run that this group belongs to has ended."""


class Mark:
    """A file that says at which step a run has ended.

    Args:
        directory: The Trainer's ``default_root_dir``.
        run: The name of the run; a run without a name has no mark.
    """

    def __init__(self, directory: str, run: str) -> None:
        self._run = run
        self._path = Path(directory) / "elastic" / f"{run}.finished.json"

    def write(self, step: int) -> None:
        """Mark the run as finished, by one atomic rename."""
        if not self._run:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"run": self._run, "step": step}))
        temporary.replace(self._path)

    def refuse_finished(self) -> None:
        """Refuse to train a run that has ended.

        Raises:
            RunFinishedError: The mark is there.
        """
        if not self._path.exists():
            return
        step = json.loads(self._path.read_text())["step"]
        raise RunFinishedError(
            f"this run is finished at step {step}.",
            remedy=f"To train again, pass another run_id than {self._run!r}, or delete {self._path}.",
        )

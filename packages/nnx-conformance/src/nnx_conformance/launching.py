"""Starts `scripts/train.py` in the ways in which users start theirs, and reads what the processes report.

A launch costs seconds, so its outcome is kept for the checks that look at different sides of it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx_conformance.check import CheckFailed
from nnx_conformance.subject import Subject

if TYPE_CHECKING:
    from nnx_conformance.check import Bench
    from nnx_conformance.task import Task

__all__ = ["BY_LIGHTNING", "BY_TORCHRUN", "OF_LAUNCHERS", "Launch", "Launched", "launch"]

BY_LIGHTNING: tuple[str, ...] = ()
"""``python train.py``: whatever else is to run, the strategy starts."""
BY_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""``torchrun train.py``"""

_SCRIPT = Path(__file__).parent / "scripts" / "train.py"
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
"""Environment variables that tell a process its place among others."""
_done: dict[Launch, Launched] = {}


@dataclass(frozen=True)
class Launch:
    """How a script is started; equal launches are made once.

    Attributes:
        subject: The strategy.
        engine: Module that holds it.
        task: The training to run.
        launcher: The words between ``python`` and the script.
        devices: The devices of the Trainer.
        through: Names what builds the Trainer.
    """

    subject: Subject
    engine: str
    task: Task
    launcher: tuple[str, ...] = BY_LIGHTNING
    devices: int = 2
    through: str = "Trainer"

    def write(self, directory: Path) -> None:
        """Put down what the script reads."""
        job = {
            "strategy": self.subject.name,
            "engine": self.engine,
            "prepare": not self.is_installed,
            "devices": self.devices,
            "through": self.through,
        }
        (directory / "job.json").write_text(json.dumps(job))
        (directory / "job.pickle").write_bytes(pickle.dumps((self.subject, self.task)))

    @property
    def is_installed(self) -> bool:
        """Whether a script can use the strategy by its name, without imports of its own."""
        return not (self.subject.imports or self.subject.options or ":" in self.subject.strategy)


@dataclass(frozen=True)
class Launched:
    """How a script ended.

    Attributes:
        code: Exit code; None if it was killed at the deadline.
        output: The text that all its processes printed.
        seconds: The time from start to end.
        accounts: By rank, what `scripts/train.py` wrote.
    """

    code: int | None
    output: str
    seconds: float
    accounts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def expect_accounts(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """What these ranks reported.

        Raises:
            CheckFailed: The script did not get so far on just these ranks.
        """
        if sorted(self.accounts) == list(ranks) and self.code is not None:
            return [self.accounts[rank] for rank in ranks]
        end = f"ended with exit code {self.code}" if self.code is not None else "did not end"
        raise CheckFailed(
            f"the script {end} after {self.seconds:.0f} s; ranks {sorted(self.accounts)} reported, expected "
            f"{list(ranks)}. {self.last_words()}"
        )

    def last_words(self) -> str:
        """The end of what was printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return "It printed last: " + " | ".join(lines[-3:]) if lines else "It printed nothing."


def launch(bench: Bench, wanted: Launch) -> Launched:
    """Start the script and wait for its end, unless that was done before.

    Args:
        bench: Has the deadline.
        wanted: Describes how to start it.
    """
    if wanted not in _done:
        with tempfile.TemporaryDirectory(prefix="nnx-launch-") as top:
            _done[wanted] = _launch(wanted, Path(top), timeout=bench.remaining)
    return _done[wanted]


def _launch(wanted: Launch, directory: Path, *, timeout: float) -> Launched:
    wanted.write(directory)
    command = [sys.executable, *wanted.launcher, str(_SCRIPT), str(directory)]
    code, output, seconds = run_script(
        command, directory=directory, accelerator=wanted.subject.accelerator, timeout=timeout
    )
    accounts = {
        int(path.stem.partition("-")[2]): pickle.loads(path.read_bytes())
        for path in directory.glob("account-*.pickle")
    }
    return Launched(code, output, seconds, accounts)


def run_script(
    command: Sequence[str], *, directory: Path, accelerator: str, timeout: float
) -> tuple[int | None, str, float]:
    """Run a command as if from a fresh shell; kill it and all it started at the deadline.

    Args:
        command: The command to run.
        directory: The directory to run it in.
        accelerator: On ``"cpu"`` the GPUs are hidden from it.
        timeout: Seconds.

    Returns:
        Its exit code (None where it had to be killed), all that was printed, and the seconds it took.
    """
    environment = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment["OMP_NUM_THREADS"] = "1"
    if accelerator == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    started = time.monotonic()
    with (directory / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            list(command),
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
        seconds = time.monotonic() - started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the script left behind, too
        process.wait()
        output.seek(0)
        return code, output.read(), seconds

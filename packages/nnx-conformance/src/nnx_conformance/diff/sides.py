"""The two sides of a comparison, and the processes of their runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nnx_conformance.diff.job import VARIABLE, Job
from nnx_conformance.diff.record import Run, read_run
from nnx_conformance.pool import free_port
from nnx_core.errors import OptionError
from nnx_core.launch.launcher import variables

_AFTER_FAILURE = 15.0
"""The seconds that ranks have to fail, too, after the first one has failed."""

_SIDE = re.compile(r"(?P<strategy>[A-Za-z_]\w*)?(?:@(?P<devices>\d+))?(?::(?P<precision>[\w-]+))?")


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        strategy: The strategy's name; empty keeps the script's own.
        devices: The number of processes.
        precision: The precision; empty keeps the script's own.
        options: Options of the strategy.
        script: Another script than the other side's.
        python: Another interpreter.
    """

    strategy: str = ""
    devices: int = 1
    precision: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
    python: str = ""

    @classmethod
    def parse(cls, text: str, **further: Any) -> Side:
        """Return the side of ``strategy@devices:precision``, in which each part may be absent.

        The strategy ``script`` is the script's own, as without one.

        Raises:
            OptionError: The text is no side.

        Example:
            >>> Side.parse("fsdp_auto@2:bf16-mixed").devices
            2
            >>> str(Side.parse("ddp"))
            'ddp@1'
            >>> Side.parse("script@2") == Side.parse("@2")
            True
        """
        match = _SIDE.fullmatch(text)
        if match is None or match["devices"] == "0":
            raise OptionError(
                f"{text!r} is no side.",
                remedy="Write strategy@processes:precision, such as ddp@2:bf16-mixed.",
            )
        strategy = "" if match["strategy"] in (None, "script") else match["strategy"]
        return cls(strategy, int(match["devices"] or 1), match["precision"] or "", **further)

    def __str__(self) -> str:
        precision = f":{self.precision}" if self.precision else ""
        return f"{self.strategy or 'script'}@{self.devices}{precision}"

    @property
    def twin(self) -> Side:
        """The side that computes the same in float64, by plain data parallelism."""
        strategy = "" if not self.strategy else "ddp" if self.devices > 1 else "auto"
        return replace(self, strategy=strategy, precision="64-true", options={}, python="")


def run_side(side: Side, job: Job, *, name: str, timeout: float) -> Run:
    """Run a job in the processes of a side, and read its record.

    Args:
        side: The side.
        job: The job, whose fields about the side are replaced.
        name: The name of the run.
        timeout: The seconds that it may take.

    Raises:
        OptionError: There is no such interpreter.
        RecordError: The processes recorded no step.
    """
    python = side.python or sys.executable
    if shutil.which(python) is None:
        raise OptionError(
            f"there is no interpreter {python!r}.", remedy="Pass the path of one, such as .venv2/bin/python."
        )
    directory = Path(job.directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = (directory / "job.json").resolve()
    replace(
        job,
        strategy=side.strategy,
        options=dict(side.options),
        devices=side.devices,
        precision=side.precision,
        script=side.script or job.script,
    ).write(path)
    words = [python, "-m", "nnx_conformance.diff.worker"]
    port = free_port()
    with ExitStack() as stack:
        processes = []
        for rank in range(side.devices):
            own = variables(rank, nodes=1, devices=side.devices, address="127.0.0.1", port=port)
            threads = {"OMP_NUM_THREADS": "1"} if side.devices > 1 else {}
            environment = {**threads, **os.environ, **own, VARIABLE: str(path)}
            log = stack.enter_context((directory / f"output{rank}.txt").open("wb"))
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT))
        ended = wait(processes, timeout)
    run = read_run(directory, name)
    if not run.error:
        run.error = ended
    return run


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> str:
    """Wait for all processes, and return how they failed; empty if they did not.

    After the first failure the others have a few seconds to end.
    """
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                end = min(end, time.monotonic() + _AFTER_FAILURE)
            time.sleep(0.05)
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed:
        return f"rank {failed[0]}: exit code {processes[failed[0]].returncode}"
    return f"rank {late[0]}: no end within {timeout:g} s" if late else ""

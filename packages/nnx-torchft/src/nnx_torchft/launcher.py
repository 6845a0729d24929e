"""`ElasticLauncher`: a lighthouse, and groups that are started again when they die.

``nnx run --elastic 4 -- train.py`` starts four groups on this machine. On another machine,
``--option lighthouse=host:port`` starts groups that join the first machine's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nnx_checkpoint.cli.output import print_text
from nnx_core.errors import LaunchError, OptionError
from nnx_core.launch.launcher import Job, Launcher, LauncherOptions
from nnx_core.options import option
from nnx_torchft.options import GROUP, LIGHTHOUSE, RUN

__all__ = ["ElasticLauncher", "ElasticLauncherOptions"]

_SOON = 60.0
"""Seconds after its start in which an error of a group counts as a failure to start."""


@dataclass(frozen=True, kw_only=True)
class ElasticLauncherOptions(LauncherOptions):
    """Options of the elastic launcher."""

    lighthouse: str = option(
        "", help="A lighthouse to join, as 'host:port'; by default a new one on this machine.", types=(str,)
    )
    port: int = option(0, help="The port of the new lighthouse; 0 is any free one.", types=(int,))
    heartbeat_timeout: float = option(
        5.0, help="Seconds without a sign of life after which a group is lost.", types=(int, float)
    )
    join_timeout: float = option(
        60.0, help="Seconds that the groups wait for one that lives and is late.", types=(int, float)
    )
    run_id: str = option("", help="The name of the run; by default a new one.", types=(str,))
    max_failures: int = option(
        3,
        help="A group is not started again after so many errors in a row within a minute of its start. "
        "Signals, as of a kill, do not count.",
        types=(int,),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lighthouse and not self.run_id:
            raise OptionError(
                f"lighthouse={self.lighthouse!r} is of a run whose name is not given.",
                remedy="Pass --option run_id=NAME, the one that the first machine's launcher printed.",
            )


class ElasticLauncher(Launcher):
    """Starts a script in groups of one process each, and starts groups again that die."""

    Options = ElasticLauncherOptions

    def run(self, job: Job) -> Any:
        """Raise, because the launcher starts scripts."""
        raise LaunchError(
            "launcher='elastic' starts scripts, and not the processes of a Trainer in a running script.",
            remedy="Leave `launcher` out and start the script with `nnx run --elastic 2 -- train.py`.",
        )

    def run_script(self, command: Sequence[str], *, nodes: int, devices: int) -> int:
        """Run a command in every group until all have ended.

        Returns:
            0 if a group ended the run; otherwise the exit code of the last group that failed.
        """
        if nodes > 1:
            raise OptionError(
                "the elastic launcher starts the groups of one machine.",
                remedy="Run it on each; on the others add --option lighthouse=HOST:PORT and run_id=NAME.",
            )
        return _Groups(self.options, command, devices).run()  # type: ignore[arg-type] # Options of this class

    def describe(self, command: Sequence[str], *, nodes: int, devices: int) -> str:
        """Return the command, in a line."""
        lighthouse = self.options.lighthouse or "a new one"  # type: ignore[attr-defined] # as above
        return f"{' '.join(command)}   # {devices} groups, lighthouse: {lighthouse}"


class _Groups:
    """The groups of one machine, while they run."""

    def __init__(self, options: ElasticLauncherOptions, command: Sequence[str], count: int) -> None:
        self._options, self._command = options, list(command)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._failures = dict.fromkeys((f"{socket.gethostname()}-{n}" for n in range(count)), 0)
        self._started: dict[str, float] = {}
        self._stops = 0
        self._run = options.run_id or f"run-{uuid.uuid4().hex[:8]}"

    def run(self) -> int:
        """Start the groups, and wait for the end of all."""
        lighthouse = None if self._options.lighthouse else _start_lighthouse(self._options)
        address = self._options.lighthouse or lighthouse.address().removeprefix("http://")  # type: ignore[union-attr]
        _say(f"lighthouse {address}, run {self._run}")
        before = {each: signal.signal(each, self._stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number, group in enumerate(self._failures):
                self._start(group, number, address)
            return self._watch(address)
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
            for each, handler in before.items():
                signal.signal(each, handler)
            if lighthouse is not None:
                lighthouse.shutdown()

    def _start(self, group: str, number: int, address: str) -> None:
        variables = {LIGHTHOUSE: address, RUN: self._run, GROUP: group, **_gpu(number)}
        self._started[group] = time.monotonic()
        self._processes[group] = subprocess.Popen(self._command, env={**os.environ, **variables})

    def _watch(self, address: str) -> int:
        """Start groups again that died; stop to do so once a group has ended the run."""
        has_ended, code = False, 0
        while self._processes:
            time.sleep(0.1)
            for number, group in enumerate(self._failures):
                process = self._processes.get(group)
                if process is None or process.poll() is None:
                    continue
                del self._processes[group]
                has_ended = has_ended or process.returncode == 0
                if process.returncode == 0 or has_ended or self._stops:
                    continue
                code = process.returncode
                is_error = code > 0 and time.monotonic() - self._started[group] < _SOON
                self._failures[group] = self._failures[group] + 1 if is_error else 0
                gives_up = self._failures[group] >= self._options.max_failures
                _say(f"group {group} died with {code}; {'not ' if gives_up else ''}starting it again")
                if not gives_up:
                    self._start(group, number, address)
        return 0 if has_ended else (code if code > 0 else 128 - code if code else 1)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the groups, and start none again."""
        self._stops += 1
        for process in self._processes.values():
            process.send_signal(number)


def _say(what: str) -> None:
    print_text(f"elastic: {what}")
    sys.stdout.flush()


def _gpu(number: int) -> dict[str, str]:
    """Return the variable that gives a group a GPU of its own, where there are some."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    visible = there if given is None else [each for each in given.split(",") if each]
    return {"CUDA_VISIBLE_DEVICES": visible[number % len(visible)]} if visible else {}


def _start_lighthouse(options: ElasticLauncherOptions) -> Any:
    from nnx_torchft._torchft_compat import LighthouseServer  # imports torch

    return LighthouseServer(
        bind=f"0.0.0.0:{options.port}",
        min_replicas=1,
        join_timeout_ms=int(1000 * options.join_timeout),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * options.heartbeat_timeout),
    )

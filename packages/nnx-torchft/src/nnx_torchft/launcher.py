"""`ElasticLauncher`: a lighthouse, and groups that are started again when they die.

``nnx run --elastic 4 -- train.py`` starts four groups on this machine; with ``--devices 2`` each has two
processes. On another machine, ``--option lighthouse=host:port`` starts groups that join the first machine's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nnx_checkpoint.cli.output import print_text
from nnx_core.errors import LaunchError, OptionError
from nnx_core.launch.launcher import Job, Launcher, LauncherOptions, variables
from nnx_core.options import option
from nnx_torchft.options import GROUP, LIGHTHOUSE, RUN

__all__ = ["ElasticLauncher", "ElasticLauncherOptions"]

_SOON = 60.0
"""Seconds after its start in which an error of a group counts as a failure to start."""


@dataclass(frozen=True, kw_only=True)
class ElasticLauncherOptions(LauncherOptions):
    """Options of the elastic launcher."""

    groups: int = option(1, help="The groups of this machine; `nnx run --elastic N` sets it.", types=(int,))
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
        if self.groups < 1:
            raise OptionError(f"groups={self.groups!r} is no number of groups.", remedy="Pass, say, 2.")
        if self.lighthouse and not self.run_id:
            raise OptionError(
                f"lighthouse={self.lighthouse!r} is of a run whose name is not given.",
                remedy="Pass --option run_id=NAME, the one that the first machine's launcher printed.",
            )


class ElasticLauncher(Launcher):
    """Starts a script in the processes of each group, and starts groups again that die."""

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
        options: Any = self.options
        count = f"{options.groups} groups" + (f" of {devices} processes" if devices > 1 else "")
        return f"{' '.join(command)}   # {count}, lighthouse: {options.lighthouse or 'a new one'}"


class _Group:
    """The processes of one group, which live and die together."""

    def __init__(self, number: int) -> None:
        self.name = f"{socket.gethostname()}-{number}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failures = 0
        self._number, self._started = number, 0.0

    def start(self, command: Sequence[str], count: int, given: Mapping[str, str]) -> None:
        """Start the processes."""
        self._started = time.monotonic()
        own = {**os.environ, **given, GROUP: self.name, **_gpus(self._number, count)}
        place = {"nodes": 1, "devices": count, "port": _free_port()}
        for rank in range(count):
            ranks = variables(rank, address="127.0.0.1", run=f"{given[RUN]}-{self.name}", **place)
            self.processes.append(subprocess.Popen(command, env={**own, **ranks}, start_new_session=True))

    def poll(self, *, stops: bool) -> int | None:
        """Return the exit code if the group has ended; a process that died takes the others with it.

        Args:
            stops: Wait for the others, which got the signal to stop.
        """
        codes = [process.poll() for process in self.processes]
        died = min((code for code in codes if code), default=None)  # a signal is the cause of errors
        if None in codes and (died is None or stops):
            return None
        self.kill()
        is_error = (died or 0) > 0 and time.monotonic() - self._started < _SOON
        self.failures = self.failures + 1 if is_error else 0
        return died or 0

    def kill(self) -> None:
        """End the processes at once, and those that they started, such as the workers of loaders."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes = []


class _Groups:
    """The groups of one machine, while they run."""

    def __init__(self, options: ElasticLauncherOptions, command: Sequence[str], devices: int) -> None:
        self._options, self._command, self._devices = options, list(command), devices
        self._groups = [_Group(number) for number in range(options.groups)]
        self._stops = 0
        self._run = options.run_id or f"run-{uuid.uuid4().hex[:8]}"

    def run(self) -> int:
        """Start the groups, and wait for the end of all."""
        lighthouse = None if self._options.lighthouse else _start_lighthouse(self._options)
        address = self._options.lighthouse or lighthouse.address().removeprefix("http://")  # type: ignore[union-attr]
        _say(f"lighthouse {address}, run {self._run}")
        before = {each: signal.signal(each, self._stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._watch({LIGHTHOUSE: address, RUN: self._run})
        finally:
            for group in self._groups:
                group.kill()
            for each, handler in before.items():
                signal.signal(each, handler)
            if lighthouse is not None:
                lighthouse.shutdown()

    def _watch(self, given: Mapping[str, str]) -> int:
        """Start the groups, and again those that died, until one has ended the run."""
        has_ended, code = False, 0
        for group in self._groups:
            group.start(self._command, self._devices, given)
        while living := [group for group in self._groups if group.processes]:
            time.sleep(0.1)
            for group in living:
                ended = group.poll(stops=self._stops > 0)
                has_ended = has_ended or ended == 0
                if not ended or has_ended or self._stops:
                    continue
                code = ended
                gives_up = group.failures >= self._options.max_failures
                _say(f"group {group.name} died with {ended}; {'not ' if gives_up else ''}starting it again")
                if not gives_up:
                    group.start(self._command, self._devices, given)
        return 0 if has_ended else (code if code > 0 else 128 - code if code else 1)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the groups, and start none again."""
        self._stops += 1
        for process in [process for group in self._groups for process in group.processes]:
            process.send_signal(number)


def _say(what: str) -> None:
    print_text(f"elastic: {what}")
    sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _gpus(number: int, count: int) -> dict[str, str]:
    """Return the variable that gives a group GPUs of its own, where there are some."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    visible = there if given is None else [each for each in given.split(",") if each]
    own = [visible[(number * count + rank) % len(visible)] for rank in range(count)] if visible else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))} if own else {}


def _start_lighthouse(options: ElasticLauncherOptions) -> Any:
    from nnx_torchft._torchft_compat import LighthouseServer  # imports torch

    return LighthouseServer(
        bind=f"0.0.0.0:{options.port}",
        min_replicas=1,
        join_timeout_ms=int(1000 * options.join_timeout),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * options.heartbeat_timeout),
    )

"""Start processes that train peers, read what they print, and end all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

JOB = Path(__file__).parent / "jobs" / "peer.py"
LOOPBACK: dict[str, Any] = {
    "target_batch_size": 192,
    "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    "matchmaking_time": 2.0,
    "averaging_timeout": 20.0,
    "optimizer_kwargs": {"tracker_opts": {"min_refresh_period": 0.2, "default_refresh_period": 0.5}},
}
"""Options of peers on one machine."""


class Process:
    """A process that trains peers, one after another."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.out, self.err = name, folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(JOB)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,  # a signal to its group reaches the processes of hivemind, too
            )
        self._begin = 0

    def fit(self, **run: Any) -> None:
        """Begin a run; facts are those since then."""
        self.wait(lambda facts: bool(facts))
        self._begin = len(self._lines())
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(run) + "\n")
        self._process.stdin.flush()

    def _lines(self) -> list[str]:
        return [line for line in self.out.read_text().splitlines() if line.endswith("}")]

    def facts(self) -> list[dict[str, Any]]:
        """Return what it has printed in this run."""
        return [json.loads(line) for line in self._lines()[self._begin :]]

    @property
    def step(self) -> int:
        """The steps of the swarm that it has seen."""
        return max((int(each.get("hivemind/epoch", 0)) for each in self.facts()), default=0)

    def wait(self, found: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Wait until a function of the facts is true, while the process lives; return its value."""
        while True:
            code = self._process.poll()
            if value := found(self.facts()):
                return value
            assert code is None, f"{self.name} ended with {code}: {self.err.read_text()[-3000:]}"
            time.sleep(0.2)

    def address(self) -> str:
        """Wait until it can be joined; return its address."""
        return str(self.wait(lambda facts: next((each["ready"] for each in facts if "ready" in each), "")))

    def end(self) -> float:
        """Wait for the end of the run; return its last loss."""
        return float(self.wait(lambda facts: next((each["end"] for each in facts if "end" in each), 0.0)))

    def code(self) -> int:
        """Send no more runs; wait for the process, and return its exit code."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process alone: the processes that it has started must follow."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def left(self) -> list[str]:
        """Return the living processes that it has started, which keep its session."""
        command = ["ps", "-o", "stat=,args=", "-s", str(self._process.pid)]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        return [line for line in listed if not line.startswith("Z")]

    def close(self) -> None:
        """End the process, and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

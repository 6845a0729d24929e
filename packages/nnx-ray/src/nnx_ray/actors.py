"""Run code in Ray's actors: one worker for each process of a run, and the event log of all workers."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from nnx_core.errors import LaunchError, follows_lost_rank
from nnx_core.launch.launcher import Work, last_committed

_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True)
class WorkerInfo:
    """The location and software of a worker.

    Attributes:
        node: The node's name and address, for messages.
        address: The node's address.
        versions: Versions of Python and of packages; None for a package that is not installed.
        gpus: The ids of the GPUs that Ray gave the worker.
    """

    node: str
    address: str
    versions: Mapping[str, str | None]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a worker's process.

    Attributes:
        result: The value that rank zero returns.
        error: The pickled exception; empty without an exception, or if it cannot be pickled.
        text: The traceback; empty without an exception.
        follows_lost_rank: True if the exception only reports the loss of another rank. A pickled exception
            has lost its cause, so the worker records this.
    """

    result: Any = None
    error: bytes = b""
    text: str = ""
    follows_lost_rank: bool = False


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of Python and of packages in this process, without importing them."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


class Worker:
    """One process of a run."""

    def describe(self, packages: Sequence[str]) -> WorkerInfo:
        """Return this worker's node, address, package versions and GPUs."""
        address = ray.util.get_node_ip_address()
        gpus = tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
        return WorkerInfo(f"{socket.gethostname()} ({address})", address, versions(packages), gpus)

    def free_port(self) -> int:
        """Return a free port of this node."""
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    def last_committed(self, paths: Sequence[str]) -> tuple[str, int] | None:
        """Return the last resumable checkpoint that this node sees on disk, and its step."""
        return last_committed(paths)

    def work(
        self,
        pickled: bytes,
        variables: Mapping[str, str],
        folder: str,
        report: Callable[[str, str], None],
        resume_from: str | None,
    ) -> Outcome:
        """Run this process of the job.

        Args:
            pickled: The pickled work.
            variables: Environment variables, which are set before anything is unpickled.
            folder: The working directory, used if it exists on this node.
            report: The first argument of `nnx_core.launch.launcher.Work`.
            resume_from: The checkpoint to resume.
        """
        _apply_environment(variables, folder)
        try:
            return Outcome(_unpickled(pickled)(report, resume_from))
        except BaseException as error:  # the driver must also learn of an exit
            return Outcome(
                error=_pickled(error),
                text=traceback.format_exc(),
                follows_lost_rank=follows_lost_rank(error),
            )

    def command(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """Run a command to its end, and kill it with this process.

        Args:
            words: The program and its arguments.
            variables: Environment variables.
            folder: The working directory, used if it exists on this node.
        """
        _apply_environment(variables, folder)
        return subprocess.run(words, check=False, preexec_fn=_end_with_parent).returncode


class EventLog:
    """The events that the processes of a run have reported. It outlives the processes."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, str, str]] = []

    def report(self, rank: int, kind: str, text: str) -> None:
        """Append an event, as `nnx_core.launch.launcher.Work` describes it."""
        self._entries.append((rank, kind, text))

    def read(self) -> list[tuple[int, str, str]]:
        """Return all events in order: rank, kind and text."""
        return self._entries


def _apply_environment(variables: Mapping[str, str], folder: str) -> None:
    os.environ.update(variables)
    if Path(folder).is_dir():
        os.chdir(folder)


def _unpickled(pickled: bytes) -> Work:
    try:
        work: Work = cloudpickle.loads(pickled)
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"the run cannot be unpickled on {socket.gethostname()}: {error}.",
            remedy="Install it there, or let Ray copy your files: runtime_env={'working_dir': '.'}.",
        ) from error
    return work


def _pickled(error: BaseException) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # a user's exception class may raise anything here
        return b""
    return pickled


def _end_with_parent() -> None:
    """Kill the command when this worker is killed, which is how Ray ends workers."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PARENT_DEATH, signal.SIGKILL)

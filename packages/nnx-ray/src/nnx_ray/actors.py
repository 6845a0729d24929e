"""Code that runs in Ray's actors.

One worker for each process of a run, and the journal of all of them.
"""

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
class Place:
    """Where a worker runs.

    Attributes:
        node: Its node, for people.
        address: The node's address.
        versions: Versions of Python and of packages; None for a package that is not installed.
        gpus: The ids of the GPUs that Ray gave the worker.
    """

    node: str
    address: str
    versions: Mapping[str, str | None]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a worker's part ended.

    Attributes:
        result: The value that rank 0 brings back.
        error: The exception, pickled; empty if there was none, or none that can be pickled.
        text: The traceback; empty if there was no exception.
        follows_lost_rank: True if the exception only tells that another rank is gone. A pickled exception
            has lost the one that it was raised from, so the worker answers this.
    """

    result: Any = None
    error: bytes = b""
    text: str = ""
    follows_lost_rank: bool = False


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """The versions of Python and of packages in this process; nothing is imported for it."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


class Worker:
    """One process of a run."""

    def describe(self, packages: Sequence[str]) -> Place:
        """Say where this is, and what is installed here."""
        address = ray.util.get_node_ip_address()
        gpus = tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
        return Place(f"{socket.gethostname()} ({address})", address, versions(packages), gpus)

    def free_port(self) -> int:
        """A port of this node that nobody uses."""
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    def last_committed(self, paths: Sequence[str]) -> tuple[str, int] | None:
        """The last checkpoint that can be resumed, as this node sees the disk, and its step."""
        return last_committed(paths)

    def work(
        self,
        pickled: bytes,
        variables: Mapping[str, str],
        folder: str,
        tell: Callable[[str, str], None],
        resume_from: str | None,
    ) -> Ended:
        """Do this process's part.

        Args:
            pickled: The work.
            variables: Environment variables; they are set before anything is unpickled.
            folder: The working directory, if there is such a directory here.
            tell: See `nnx_core.launch.launcher.Work`.
            resume_from: The checkpoint to resume.
        """
        _settle(variables, folder)
        try:
            return Ended(_unpickled(pickled)(tell, resume_from))
        except BaseException as error:  # an exit too is an end that the other side has to know
            return Ended(
                error=_pickled(error),
                text=traceback.format_exc(),
                follows_lost_rank=follows_lost_rank(error),
            )

    def command(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """Run a command to its end; it ends with this process.

        Args:
            words: The program and its arguments.
            variables: Environment variables.
            folder: The working directory, if there is such a directory here.
        """
        _settle(variables, folder)
        return subprocess.run(words, check=False, preexec_fn=_end_with_parent).returncode


class Journal:
    """What the processes of a run have said so far; it outlives them."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, str, str]] = []

    def tell(self, rank: int, kind: str, text: str) -> None:
        """Take an entry; see `nnx_core.launch.launcher.Work`."""
        self._entries.append((rank, kind, text))

    def read(self) -> list[tuple[int, str, str]]:
        """All entries: rank, kind and text, in the order in which they came."""
        return self._entries


def _settle(variables: Mapping[str, str], folder: str) -> None:
    os.environ.update(variables)
    if Path(folder).is_dir():
        os.chdir(folder)


def _unpickled(pickled: bytes) -> Work:
    try:
        work: Work = cloudpickle.loads(pickled)
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"the run cannot be unpickled on {socket.gethostname()}: {error}.",
            remedy="Install it there, or let Ray bring your files: runtime_env={'working_dir': '.'}.",
        ) from error
    return work


def _pickled(error: BaseException) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # its class may hold or want anything
        return b""
    return pickled


def _end_with_parent() -> None:
    """Let the command end when this worker is killed, as Ray does with workers."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PARENT_DEATH, signal.SIGKILL)

"""A process that has imported what workers need, and forks them.

To import torch and Lightning takes seconds of CPU; to fork a process that has done it takes milliseconds.
This module owns the template: it starts one, asks it for workers, and asks it what became of them, as only
a parent can tell. What workers do is not its business, and it never runs a job.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from nnx_conformance.worker import COLLECT_AFTER
from nnx_conformance.worker import serve as serve_jobs

__all__ = ["ForkedProcess", "Template", "is_sound_here", "serve"]

START_TIMEOUT = 120.0
"""Seconds that a template may take to import, on a machine busy with other things."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
LOST = -signal.SIGKILL
"""The exit code of a worker whose template died: nobody can tell, and it kills itself."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker takes from the process that asks for it, and not from the template.

    Attributes:
        env: Its environment variables.
        path: Places to import from.
        directory: Its working directory.
    """

    env: dict[str, str]
    path: list[str]
    directory: str


class Template:
    """One process from which workers are forked.

    Args:
        modules: What it imports; a module that is missing, or fails, is left to the jobs that need it.
        env: Environment variables to import them under.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from nnx_conformance.template import serve; serve({theirs.fileno()}, {tuple(modules)!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._is_sound: bool | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    @property
    def may_be_forked(self) -> bool:
        """Whether it has come up with nothing that a fork would lose. Waits for its imports."""
        if self._is_sound is None:
            self._is_sound = False
            with contextlib.suppress(EOFError, OSError):
                if self._connection.poll(START_TIMEOUT):
                    self._is_sound = self._connection.recv()
        return self._is_sound and self.is_alive

    def fork(self, connection: int, log: int, env: Mapping[str, str]) -> ForkedProcess:
        """Make a worker, in a session of its own.

        Args:
            connection: File descriptor on which it gets jobs.
            log: File descriptor that takes what it prints.
            env: Its environment variables.

        Raises:
            OSError, EOFError: The template has died.
        """
        self._connection.send(Surroundings(dict(env), list(sys.path), str(Path.cwd())))
        for descriptor in (connection, log):
            send_handle(self._connection, descriptor, self._process.pid)
        return ForkedProcess(self, self._connection.recv())

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """How a worker ended; None if it has not, and nobody waits for it."""
        try:
            self._connection.send((pid, wait))
            code: int | None = self._connection.recv()
        except (EOFError, OSError):
            return LOST
        return code

    def kill(self) -> None:
        """End it; its workers follow within a second."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


class ForkedProcess:
    """A worker of a template, as `subprocess.Popen` would show it.

    Attributes:
        pid: Of the process, and of its group.
    """

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            self._code = self._template.exit_code(self.pid, wait=False)
        return self._code

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self._code is None:
            self._code = self._template.exit_code(self.pid, wait=True)
        return LOST if self._code is None else self._code


def serve(fd: int, modules: Sequence[str]) -> None:
    """Import, then fork workers and tell how they ended, until the parent goes away.

    Args:
        fd: File descriptor of the connection to it.
        modules: What to import.
    """
    gc.set_threshold(*COLLECT_AFTER)
    for name in modules:
        with contextlib.suppress(Exception):  # the job that needs it shows the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the collector of a worker does not copy what all of them share
    connection = Connection(fd)
    connection.send(_is_one_thread())
    while True:
        try:
            request: Any = connection.recv()
        except EOFError:
            return
        if isinstance(request, Surroundings):
            connection.send(_fork(connection, request))
        else:
            connection.send(_exit_code(*request))


def is_sound_here() -> bool:
    """Whether processes may be forked after imports: on Linux, without a driver of GPUs.

    What an import makes of a GPU does not live on in a forked process, and threads are only counted on Linux.
    """
    return sys.platform == "linux" and not any(Path(device).exists() for device in GPU_DEVICES)


def _is_one_thread() -> bool:
    """Whether this process has no thread that would be missing in a forked one."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _fork(connection: Connection, surroundings: Surroundings) -> int:
    jobs, log = recv_handle(connection), recv_handle(connection)
    gone, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(gone)
        connection.close()
        _become_a_worker(jobs, log, alive, surroundings)
    for descriptor in (alive, jobs, log):
        os.close(descriptor)
    os.read(gone, 1)  # from here on it has a group that can be killed
    os.close(gone)
    return pid


def _become_a_worker(jobs: int, log: int, alive: int, surroundings: Surroundings) -> None:
    """Serve jobs, and never return."""
    code = 1
    try:
        os.setsid()
        os.write(alive, b"x")
        os.close(alive)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        os.environ.clear()
        os.environ.update(surroundings.env)
        sys.path[:] = surroundings.path
        os.chdir(surroundings.directory)
        tempfile.tempdir = None  # the template may have asked under another TMPDIR
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()  # Python sees to its own generator, and every job to torch's
        serve_jobs(jobs)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # the template's own end is none of a worker's business


def _exit_code(pid: int, wait: bool) -> int | None:
    ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None

"""A pool of worker processes that stay alive between tests.

Importing torch and Lightning costs seconds of CPU per process, so tests with several ranks share a few
workers. Each job runs an importable function in one worker per rank, in an environment like that of torchrun,
and leaves the workers clean for the next job. This module starts, feeds, watches and kills the workers, and
has the code that they run. It does not depend on Lightning.
"""

# Why not multiprocessing's forkserver? A process has one server for all contexts, so all ranks would have the
# same hash seed. The server also lives as long as any of its workers: when tests are killed, a hung worker
# and the server stay. Here the template ends with the tests, and the workers end with the template.
# (Measured.)

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import math
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

__all__ = [
    "PRELOAD",
    "JobError",
    "WorkerPool",
    "free_port",
    "shared_pool",
]


START_TIMEOUT = 120.0
"""Seconds for a worker to start and import torch, on a busy machine."""
COLLECT_AFTER = (20_000, 20, 20)
"""Thresholds of the garbage collector, whose defaults take a quarter of the time of importing Lightning."""


# A worker runs one job after the other, and cleans up after each.


@dataclass(frozen=True, slots=True)
class Job:
    """The message to a worker.

    Attributes:
        module: The module of the function; the worker tries to import it first.
        name: The name of the function within it.
        file: The source file, for modules that have no importable name.
        args: The pickled arguments.
        env: Environment variables for the job.
        path: Entries for `sys.path`.
        init: The backend of the default process group to create first.
        timeout: Seconds after which the job counts as hung.
    """

    module: str
    name: str
    file: str
    args: bytes
    env: dict[str, str]
    path: list[str]
    init: Literal["gloo", "cuda:gloo"] | None
    timeout: float


def serve_jobs(fd: int) -> None:
    """Run jobs until the parent ends.

    Args:
        fd: File descriptor of the connection to the parent.
    """
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    gc.set_threshold(*COLLECT_AFTER)
    import torch.distributed  # slow, so a worker imports it only once

    torch.set_num_threads(1)
    connection = Connection(fd)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message))


def _die_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _answer(message: bytes) -> bytes:
    environment, directory = dict(os.environ), Path.cwd()
    job: Job = pickle.loads(message)
    # The end of a Trainer restores signal handlers, which may drop this one. The timer is the fallback.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(0.9 * job.timeout)
    try:
        reply = pickle.dumps((True, _execute(job)))
    except (Exception, SystemExit, KeyboardInterrupt):
        reply = pickle.dumps((False, traceback.format_exc()))
    try:
        _clean_up(environment, directory)
    except Exception:
        reply = pickle.dumps((False, "while cleaning up after the job:\n" + traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    return reply


def _execute(job: Job) -> Any:
    import torch
    import torch.distributed as dist

    sys.path.extend(entry for entry in job.path if entry not in sys.path)
    os.environ.update(job.env)
    random.seed(0)
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = (
        False  # references come from the CPU
    )
    function = _find(job)
    args = pickle.loads(job.args)
    if job.init:
        dist.init_process_group(job.init)
    return function(*args)


def _find(job: Job) -> Callable[..., Any]:
    """Import the job's function by module name, or from its file (test files have no importable name)."""
    try:
        found: Any = importlib.import_module(job.module)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        if spec is None or spec.loader is None:
            raise
        found = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = found
        spec.loader.exec_module(found)
    for name in job.name.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _clean_up(environment: dict[str, str], directory: Path) -> None:
    import torch
    import torch.distributed as dist

    groups = _groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()
    groups.clear()
    _freeze_modules()


def _groups() -> list[Any]:
    """Return all process groups, to keep them alive until their users are collected.

    DDP's reducer frees its group without releasing the GIL, and waits for the threads of gloo. One of them
    may be freeing the tensor of the last collective, for which it needs the GIL: a deadlock. Python itself
    releases the GIL before it frees a group, so Python must hold the last reference.
    """
    from nnx_base._torch_compat import process_groups

    return process_groups()


_modules_frozen = 0


def _freeze_modules() -> None:
    """Exclude the objects of new modules from garbage collection, whose search takes longer than most jobs.

    Freeze only after imports of new modules: objects that a thread or traceback holds at that moment are
    never freed again. They may include process groups, whose threads slow down all later jobs.
    """
    global _modules_frozen  # noqa: PLW0603 - of this process
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.freeze()


# Importing torch and Lightning takes seconds of CPU; forking a process with these imports takes milliseconds.
# So the pool starts template processes and asks them to fork workers. It also asks them for exit codes of
# workers, which only the parent process can read. A template never runs a job.


GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LOST = -signal.SIGKILL
"""The exit code of a worker whose template died: the real code is unknown, and the worker kills itself."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state that a worker copies from the requesting process instead of the template.

    Attributes:
        env: The environment variables.
        path: Entries for `sys.path`.
        directory: The working directory.
    """

    env: dict[str, str]
    path: list[str]
    directory: str


class Template:
    """A process that imports modules and forks workers.

    Args:
        modules: The modules to import; a job that needs a missing or failing module gets the error.
        env: Environment variables for the imports.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from nnx_conformance.pool import serve_forks; "
            f"serve_forks({theirs.fileno()}, {tuple(modules)!r})"
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
        """True if the process runs."""
        return self._process.poll() is None

    @property
    def may_be_forked(self) -> bool:
        """True if the process has no threads, which a fork would lose. Waits for the imports."""
        if self._is_sound is None:
            self._is_sound = False
            with contextlib.suppress(EOFError, OSError):
                if self._connection.poll(START_TIMEOUT):
                    self._is_sound = self._connection.recv()
        return self._is_sound and self.is_alive

    def fork(self, connection: int, log: int, env: Mapping[str, str]) -> ForkedProcess:
        """Fork a worker, in a new session.

        Args:
            connection: File descriptor from which the worker receives jobs.
            log: File descriptor for the worker's output.
            env: Environment variables of the worker.

        Raises:
            OSError, EOFError: The template has died.
        """
        self._connection.send(Surroundings(dict(env), list(sys.path), str(Path.cwd())))
        for descriptor in (connection, log):
            send_handle(self._connection, descriptor, self._process.pid)
        return ForkedProcess(self, self._connection.recv())

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """Return a worker's exit code; None if it runs and `wait` is False."""
        try:
            self._connection.send((pid, wait))
            code: int | None = self._connection.recv()
        except (EOFError, OSError):
            return LOST
        return code

    def kill(self) -> None:
        """Kill the template; its workers end within a second."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


class ForkedProcess:
    """A forked worker, with methods of `subprocess.Popen`.

    Attributes:
        pid: The id of the process and of its group.
    """

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the worker runs."""
        if self._code is None:
            self._code = self._template.exit_code(self.pid, wait=False)
        return self._code

    def wait(self) -> int:
        """Wait for the end of the worker, and return its exit code."""
        if self._code is None:
            self._code = self._template.exit_code(self.pid, wait=True)
        return LOST if self._code is None else self._code


def serve_forks(fd: int, modules: Sequence[str]) -> None:
    """Import modules, then fork workers and report exit codes, until the parent ends.

    Args:
        fd: File descriptor of the connection to the parent.
        modules: The modules to import.
    """
    gc.set_threshold(*COLLECT_AFTER)
    for name in modules:
        with contextlib.suppress(Exception):  # the job that needs it shows the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the memory pages that workers share: garbage collection would write to them
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
    """Return True if processes may fork after imports: on Linux, without a GPU driver.

    GPU state that an import creates does not survive a fork, and threads can only be counted on Linux.
    """
    return sys.platform == "linux" and not any(Path(device).exists() for device in GPU_DEVICES)


def _is_one_thread() -> bool:
    """Return True if this process has one thread, so that a fork loses none."""
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
    os.read(gone, 1)  # from here on the worker has its own process group to kill
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
        tempfile.tempdir = None  # the template may have cached another TMPDIR
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()  # Python reseeds its own generator, and each job seeds torch's
        serve_jobs(jobs)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # skips the template's exit handlers


def _exit_code(pid: int, wait: bool) -> int | None:
    ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


PRELOAD = ("torch.distributed", "lightning.pytorch")
"""Modules that all jobs on strategies import."""
TEMPLATES = 2
GRACE = 10.0
"""Seconds for the other ranks to notice the failure of one rank; see `WorkerPool.run`."""


class JobError(RuntimeError):
    """A job failed on at least one rank.

    Attributes:
        failures: By rank: a traceback, a death or a hang.
        output: The output of each rank during the job.
    """

    def __init__(self, job: str, failures: Mapping[int, str], output: Sequence[str]) -> None:
        self.failures = dict(failures)
        self.output = list(output)
        lines = [f"job {job} failed on {len(failures)} of {len(output)} ranks"]
        for rank, text in enumerate(output):
            if rank in self.failures:
                lines.append(f"---- rank {rank} ----\n{self.failures[rank].rstrip()}")
            if text.strip():
                lines.append(f"---- output of rank {rank} ----\n{text.rstrip()}")
        super().__init__("\n".join(lines))


class WorkerPool:
    """Long-lived workers that run functions as the ranks of a distributed job.

    Worker *i* is always rank *i*. Workers start when a job first needs them. The pool replaces a worker that
    died or hung in a job, and keeps a worker that answered, even with an exception.

    Args:
        size: Largest number of ranks of a job.
        preload: Modules that nearly every job needs. Two template processes import them and fork the workers:
            two, so that ranks have different set orders, as in a cluster. Workers import the modules
            themselves if a fork is unsafe: with a GPU, or with threads.

    Example:
        >>> import math
        >>> with WorkerPool(size=1) as pool:
        ...     pool.run(math.sqrt, 9.0, world_size=1)
        [3.0]
    """

    def __init__(self, size: int = 4, *, preload: Sequence[str] = ()) -> None:
        self.size = size
        self.preload = tuple(preload)
        self.output: list[str] = []
        """The output of each rank in the latest job."""
        self._workers: dict[int, _Worker] = {}
        self._templates: dict[int, Template] = {}

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        nodes: int = 1,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        init: Literal["gloo", "cuda:gloo"] | None = None,
        end_after: float = math.inf,
        grace: float = GRACE,
    ) -> list[Any]:
        """Call a function once per rank and collect the results.

        The function sees the environment variables of torchrun, so that a Lightning Trainer inside it joins a
        group instead of launching processes. The pool fixes random seeds before the call. Afterwards it
        removes the process group, and restores the environment and the working directory.

        Args:
            fn: A module-level function of an importable module, or of a test file.
            *args: Its arguments, the same on every rank; arguments and results are pickled.
            world_size: Number of ranks.
            nodes: Number of simulated nodes, with equally many ranks each.
            timeout: Seconds after which the job counts as hung.
            env: Further environment variables for the job.
            init: ``"gloo"`` creates the default process group before the call; ``"cuda:gloo"`` one that
                refuses tensors in host memory, as NCCL does.
            end_after: Seconds from an answer until the pool kills the workers that answered, while others
                have not. This simulates the end of a script's process, which lets the collectives of the
                others fail.
            grace: Seconds from the failure of one rank until the others count as hung.

        Returns:
            The results in rank order.

        Raises:
            JobError: A rank raised, died or hung; the message has every rank's traceback and output.
            ValueError: The pool has fewer workers than ranks, or the nodes do not divide the ranks.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size={world_size} but the pool has {self.size} workers")
        if world_size % nodes:
            raise ValueError(f"nodes={nodes} does not divide world_size={world_size}")
        self._start(world_size)
        workers = [self._workers[rank] for rank in range(world_size)]
        port = free_port()
        for rank, worker in enumerate(workers):
            environment = _environment(rank, world_size, nodes, port) | dict(env or {})
            worker.submit(_job(fn, args, environment, init, timeout))
        replies, failures = _collect(workers, timeout, end_after, grace)
        self.output = [worker.output() for worker in workers]
        self._drop_the_lost()
        if failures:
            raise JobError(f"{fn.__module__}.{fn.__qualname__}", failures, self.output)
        return replies

    def close(self) -> None:
        """Kill all workers and their children; the next `run` starts new ones."""
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.kill()
        templates, self._templates = self._templates, {}
        for template in templates.values():
            template.kill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, count: int) -> None:
        """Start the missing workers of a job."""
        self._drop_the_lost()
        missing = [rank for rank in range(count) if rank not in self._workers]
        self._start_templates({rank % TEMPLATES for rank in missing})
        try:
            for rank in missing:
                self._workers[rank] = _Worker(self._template_of(rank))
            for rank in missing:
                self._workers[rank].wait_until_ready()
        except BaseException:
            self.close()  # other workers may still be starting
            raise

    def _start_templates(self, turns: set[int]) -> None:
        """Start the missing templates, all of them before waiting for the first one."""
        for turn in turns if self.preload and is_sound_here() else ():
            if turn in self._templates and not self._templates[turn].is_alive:
                self._templates.pop(turn).kill()
            if turn not in self._templates:
                self._templates[turn] = Template(self.preload, _inherited())

    def _template_of(self, rank: int) -> Template | None:
        """Return the template to fork a rank from; None if the rank needs a new process."""
        template = self._templates.get(rank % TEMPLATES)
        return template if template and template.may_be_forked else None

    def _drop_the_lost(self) -> None:
        """Kill and forget workers that died or hung."""
        for rank, worker in list(self._workers.items()):
            if not worker.healthy or worker.process.poll() is not None:
                self._workers.pop(rank).kill()


@cache
def shared_pool(size: int = 4) -> WorkerPool:
    """Return the pool that this process shares; its workers end with the process.

    Args:
        size: Largest number of ranks of a job.
    """
    pool = WorkerPool(size, preload=PRELOAD)
    atexit.register(pool.close)
    return pool


class _Worker:
    """The parent's side of one worker process, forked from a template if there is one."""

    def __init__(self, template: Template | None) -> None:
        self.connection, theirs = Pipe()
        self.healthy = True
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._log_start = 0
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if template:
            self.process = template.fork(theirs.fileno(), self._log.fileno(), _inherited())
        else:
            self.process = _start_new_process(theirs.fileno(), self._log)
        theirs.close()

    def wait_until_ready(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(START_TIMEOUT) and self.connection.recv_bytes() == b"ready":
                return
        text = self.output()
        self.kill()
        raise RuntimeError(f"a worker process did not start:\n{text}")

    def submit(self, job: Job) -> None:
        self._log_start = os.fstat(self._log.fileno()).st_size
        self.connection.send_bytes(pickle.dumps(job))

    def output(self) -> str:
        size = os.fstat(self._log.fileno()).st_size - self._log_start
        return os.pread(self._log.fileno(), size, self._log_start).decode(errors="replace")

    def dump_stacks(self) -> None:
        """Make a hung worker print its stacks."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the process and its children; the output stays readable."""
        self.healthy = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill(self) -> None:
        self.end()
        self.connection.close()
        self._log.close()


def _start_new_process(connection: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    serving = f"from nnx_conformance.pool import serve_jobs; serve_jobs({connection})"
    code = f"import sys; sys.path[:] = {sys.path!r}; {serving}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=_inherited(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=[connection],
        start_new_session=True,
    )


def _inherited() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _collect(
    workers: Sequence[_Worker], timeout: float, end_after: float, grace: float
) -> tuple[list[Any], dict[int, str]]:
    """Wait for every rank's answer, less long after a failure; end finished workers after `end_after`."""
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    waiting: set[Connection] = {worker.connection for worker in workers}
    replies: list[Any] = [None] * len(workers)
    failures: dict[int, str] = {}
    deadline, ending = time.monotonic() + timeout, math.inf
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, min(deadline, ending) - time.monotonic()))
        if not ready and ending < deadline:
            for worker in workers:
                if worker.connection not in waiting:
                    worker.end()
            ending = math.inf
            continue
        if not ready:
            break
        ending = time.monotonic() + end_after
        for connection in ready:
            assert isinstance(connection, Connection)
            waiting.discard(connection)
            rank = ranks[connection]
            failure, replies[rank] = _receive(workers[rank])
            if failure:
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + grace)
    hung = [ranks[connection] for connection in waiting]
    for rank in hung:
        workers[rank].healthy = False
        workers[rank].dump_stacks()
        failures[rank] = f"no answer in time ({timeout:g} s, or {grace:g} s after another rank's failure)"
    if hung:
        _wait_for_stacks([workers[rank] for rank in hung])
    return replies, failures


def _wait_for_stacks(workers: Sequence[_Worker]) -> None:
    """Wait until hung workers have printed their stacks, or a few seconds."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end and not all("(most recent call first)" in w.output() for w in workers):
        time.sleep(0.1)
    time.sleep(0.1)  # the last worker may still be printing


def _receive(worker: _Worker) -> tuple[str, Any]:
    """Return a rank's failure (or an empty string) and its result."""
    try:
        ok, value = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        worker.healthy = False
        return f"the process died with exit code {worker.process.wait()}", None
    except Exception as error:
        return f"the result cannot be unpickled: {error!r}", None
    return ("", value) if ok else (value, None)


def _job(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    env: dict[str, str],
    init: Literal["gloo", "cuda:gloo"] | None,
    timeout: float,
) -> Job:
    file = ""
    with contextlib.suppress(TypeError):  # a builtin has no file
        file = inspect.getsourcefile(fn) or ""
    # Import a script's functions by file, because the worker has a different main module.
    module = f"nnx_script_{Path(file).stem}" if fn.__module__ == "__main__" else fn.__module__
    return Job(module, fn.__qualname__, file, pickle.dumps(args), env, list(sys.path), init, timeout)


def _environment(rank: int, world_size: int, nodes: int, port: int) -> dict[str, str]:
    node, local_rank = divmod(rank, world_size // nodes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # A rank that ends a short job early would cut off ranks that are still connecting.
        "TORCH_DIST_INIT_BARRIER": "1",
    }


def free_port() -> int:
    """Return a free port, below the range of outgoing connections.

    The system could give a port of that range away before rank 0 listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

"""One worker of a pool: it runs one job after the other and leaves nothing of a job behind."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

__all__ = ["Job", "serve"]

COLLECT_AFTER = (20_000, 20, 20)
"""Objects, and rounds, until the garbage collector looks. With Python's own numbers it takes a quarter of the
time in which torch and Lightning are imported."""


@dataclass(frozen=True, slots=True)
class Job:
    """What travels to a worker.

    Attributes:
        module: The module of the function, which is tried first.
        name: The name of the function within it.
        file: Its source, for modules that cannot be imported by name.
        args: Its pickled arguments.
        env: Environment variables for the job.
        path: Places to import from.
        init: The default process group to make beforehand.
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


def serve(fd: int) -> None:
    """Run jobs until the parent goes away.

    Args:
        fd: File descriptor of the connection to it.
    """
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    gc.set_threshold(*COLLECT_AFTER)
    import torch.distributed  # the point of staying alive

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
    # A Trainer's end puts handlers of signals back that it does not know of, so the signal alone may be lost.
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
        False  # references are of the CPU
    )
    function = _find(job)
    args = pickle.loads(job.args)
    if job.init:
        dist.init_process_group(job.init)
    return function(*args)


def _find(job: Job) -> Callable[..., Any]:
    """Import the job's function by module name, or else from its file (test files have no name)."""
    try:
        found: Any = importlib.import_module(job.module)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        if spec is None or spec.loader is None:
            raise
        found = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = found
        spec.loader.exec_module(found)
    for part in job.name.split("."):
        found = getattr(found, part)
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
    """All process groups, to be held until what uses them has been collected.

    DDP's reducer frees a group that nobody else holds without giving up the GIL. It waits for the threads of
    gloo, and one of them may be about to free the tensor of the last collective, which takes the GIL. Where
    Python frees a group it gives up the GIL first.
    """
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)


_modules_frozen = 0


def _freeze_modules() -> None:
    """Spare the collector what new modules have brought, as to search it takes longer than most jobs.

    Without new modules nothing is frozen. What a thread or a traceback holds right now would never be freed
    again, with the process groups that it leads to, whose threads slow down everything that follows.
    """
    global _modules_frozen  # noqa: PLW0603 - of this process
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.freeze()

"""A process that dies while it saves over a checkpoint: the one before or the new one is there, whole.

The savers are forked from the workers, which have imported everything and hold no process group. One of
them is killed right before its n-th operation on the file system.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import nnx_checkpoint
from nnx_conformance.check import Bench, CheckFailed, check, expect
from nnx_conformance.checks.checkpoints.runs import trainer_for
from nnx_conformance.checks.checkpoints.stored import path_in
from nnx_conformance.pool import free_port
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task

_OPERATIONS = frozenset(
    ["open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"]
)
_SURVIVAL = 20.0
"""Seconds that a saver may take; the timeouts of collectives are longer, but must not be needed."""
_RANKS = 2
_FAST_KILLS = 3
"""Kills on each rank in the fast profile."""


@check(deadline=120, of_adapter=True)
def killed_while_saving(bench: Bench) -> None:
    """A process that is killed while it saves leaves a whole checkpoint, and no other process hanging."""
    _try_kills(bench, _FAST_KILLS)


@check(full=True, deadline=1200)
def killed_at_every_operation(bench: Bench) -> None:
    """A kill before any operation on the file system leaves a whole checkpoint, the old or the new one."""
    _try_kills(bench, None)


def _try_kills(bench: Bench, kills: int | None) -> None:
    path = path_in(bench)
    subject = replace(bench.subject, accelerator="cpu")  # what was started on a GPU cannot be forked
    version = 1
    _save(bench, subject, path, version)
    operations = _save(bench, subject, path, version + 1)
    version += 1
    if not any(operations):
        bench.not_applicable(
            "it writes in a way that cannot be interrupted between two operations of Python's"
        )
    for rank, count in enumerate(operations):
        for operation in _chosen(count, kills):
            _save(bench, subject, path, version + 1, victim=rank, operation=operation)
            where = f"rank {rank} was killed before operation {operation} of {count} of a save"
            version = _expect_whole(bench, path, version, where)


def _chosen(count: int, kills: int | None) -> list[int]:
    """Numbers of operations, spread evenly; all without `kills`."""
    if kills is None or count <= kills:
        return list(range(1, count + 1))
    return [1 + round(i * (count - 1) / (kills - 1)) for i in range(kills)]


def _save(
    bench: Bench, subject: Subject, path: str, version: int, *, victim: int = -1, operation: int = 0
) -> list[int]:
    """Save a version with savers of its own; how many operations each made, unless one was the victim."""
    job = (Task(model=Plain, steps=1), path, version, free_port(), victim, operation)
    ended = bench.run(_fork_and_wait, *job, subject=subject, world_size=_RANKS)
    for rank, (status, _) in enumerate(ended):
        if status is None and victim < 0:
            bench.not_applicable("it does not get as far as to save in a process that was forked")
        if status is None:
            raise CheckFailed(
                f"rank {victim} was killed while saving, and rank {rank} had not ended {_SURVIVAL:g} s later."
            )
        if victim < 0:
            expect(status == 0, f"rank {rank}: a process that saves ended with exit code {status}.")
    return [operations for _, operations in ended]


def _expect_whole(bench: Bench, path: str, version: int, where: str) -> int:
    """The version on disk, after reading all of it."""
    try:
        stored = nnx_checkpoint.open_checkpoint(path)
        found = int(stored.objects["trainer"]["version"])
        values = {name: set(stored.read(name).flatten().tolist()) for name in stored.tensors}
    except Exception as error:
        raise CheckFailed(f"{where}: nothing can be loaded: {type(error).__name__}: {error}") from error
    expect(found in (version, version + 1), f"{where}: version {found} is there, {version} was saved before.")
    for name, value in values.items():
        expect(value == {found}, f"{where}: {name} holds {value} in version {found}: saves are mixed.")
    return found


# --- in the workers -------------------------------------------------------------------------------


class _Killed(Callback):
    """Saves before the first step, and dies before a certain operation; counts them."""

    def __init__(self, path: str, version: int, operation: int) -> None:
        self.path, self.version, self.operation = path, version, operation
        self.held: list[Any] = []
        self.count = 0
        self.is_saving = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save; an error ends the process at once, as this is all that it is for."""
        sys.addaudithook(self._audit)
        self.is_saving = True
        try:
            trainer.save_checkpoint(self.path)
        except Exception:
            os._exit(1)
        self.is_saving = False

    def on_save_checkpoint(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the version down."""
        checkpoint["version"] = self.version

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        if self.is_saving and event in _OPERATIONS:
            self.count += 1
            if self.count == self.operation:
                os.kill(os.getpid(), signal.SIGKILL)


def _fork_and_wait(
    subject: Subject, task: Task, path: str, version: int, port: int, victim: int, operation: int
) -> tuple[int | None, int]:
    """Save in a process of its own.

    Returns:
        Its exit code, None if it had to be ended; and the operations it made, where it lived to tell.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["MASTER_PORT"] = str(port)
        mine = operation if int(os.environ["RANK"]) == victim else 0
        saver = _Killed(path, version, mine)
        saver.held = _contents_of_modules()
        _save_and_exit(subject, task, saver, write)
    os.close(write)
    status = _wait(child)
    told = os.read(read, 8)
    os.close(read)
    return status, int.from_bytes(told, "little")


def _contents_of_modules() -> list[Any]:
    """Copies of all containers at the top of modules, to hold on to what is in them.

    A process group that a cache lets go waits for its threads, which are not forked with the process.
    """
    values = [value for module in list(sys.modules.values()) for value in list(vars(module).values())]
    return [copy.copy(value) for value in values if type(value) in (dict, list, set)]


def _save_and_exit(subject: Subject, task: Task, saver: _Killed, write: int) -> NoReturn:
    status = 1
    try:
        module = task.module()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(saver.version)
        trainer = trainer_for(subject, task, callbacks=[saver])
        trainer.fit(module)
        os.write(write, saver.count.to_bytes(8, "little"))
        status = 0
    finally:
        os._exit(status)


def _wait(child: int) -> int | None:
    limit = time.monotonic() + _SURVIVAL
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

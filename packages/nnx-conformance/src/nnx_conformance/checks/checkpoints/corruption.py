"""Damaged, missing and foreign checkpoints, kills while saving, and the files that ModelCheckpoint keeps.

Each failure must end in one clear error on every rank, because a rank without the error would wait forever.

"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import nnx_checkpoint
from nnx_conformance.check import Bench, CheckFailed, check, expect
from nnx_conformance.checks.checkpoints.runs import (
    TASK,
    TOLERANCE,
    Record,
    Resumable,
    SaveAt,
    error_of,
    path_in,
    run,
    saved_checkpoint,
    trainer_for,
)
from nnx_conformance.comparing import expect_equal_weights
from nnx_conformance.pool import free_port
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import outcome_of

SCORES = (3.0, 1.0, 2.0, 4.0)
"""The scores that the runs log after each step; steps 2 and 3 have the best two."""


@check(of_adapter=True)
def model_checkpoint_keeps_best(bench: Bench) -> None:
    """ModelCheckpoint keeps the best checkpoints and the last one, and every rank names the same best."""
    kept = {"step=2.ckpt", "step=3.ckpt", "last.ckpt"}
    for rank, report in enumerate(bench.run(_keep, _TASK, str(bench.directory))):
        expect(
            report.best == "step=2.ckpt",
            f"rank {rank} names {report.best!r} as best, expected 'step=2.ckpt'.",
        )
        expect(set(report.kept) == kept, f"rank {rank} finds {report.kept}, expected {sorted(kept)}.")


@check(of_adapter=True)
def old_checkpoint_removed_once(bench: Bench) -> None:
    """Only one rank removes an old checkpoint."""
    ranks = bench.run(_keep, _TASK, str(bench.directory))
    removed = Counter(name for report in ranks for name in report.removed)
    twice = sorted(name for name, count in removed.items() if count > 1)
    expect(not twice, f"several ranks removed {twice}: the second one may find half a directory.")


@check(of_adapter=True)
def ckpt_path_best_and_last(bench: Bench) -> None:
    """`ckpt_path="best"` evaluates the best weights, and `ckpt_path="last"` resumes the latest ones."""
    second: Record = bench.alone(run, replace(_TASK, steps=2))
    for rank, (best, step) in enumerate(bench.run(_use, _TASK, str(bench.directory))):
        expect_equal_weights(best.weights, second.weights, tolerance=TOLERANCE, where=f"best, rank {rank}")
        expect(step == len(SCORES), f"rank {rank}: 'last' resumed in step {step}, expected {len(SCORES)}.")


class Scored(Resumable):
    """Logs a score for each step."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.log("score", SCORES[min(self.trainer.global_step, len(SCORES) - 1)])
        return super().training_step(batch, index)


_TASK = replace(TASK, model=Scored)


@dataclass
class _Report:
    """One rank's view of the checkpoints.

    Attributes:
        best: Name of the best one.
        kept: The checkpoints on disk after training.
        removed: Names of the checkpoints that this rank removed.

    """

    best: str
    kept: list[str]
    removed: list[str]


def _trainer(subject: Subject, task: Task, folder: str, **settings: Any) -> Trainer:
    saver = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        monitor="score",
        mode="min",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=1,
    )
    callbacks = [saver, *settings.pop("callbacks", [])]
    return trainer_for(subject, task, callbacks=callbacks, enable_checkpointing=True, **settings)


def _keep(subject: Subject, task: Task, folder: str) -> _Report:
    trainer = _trainer(subject, task, folder)
    removed: list[str] = []
    io: Any = trainer.strategy.checkpoint_io
    io.remove_checkpoint = _noting(io.remove_checkpoint, removed)
    trainer.fit(task.module())
    trainer.strategy.barrier()
    best: Any = trainer.checkpoint_callback
    return _Report(Path(best.best_model_path).name, sorted(p.name for p in Path(folder).iterdir()), removed)


def _noting(remove: Callable[[Any], None], removed: list[str]) -> Callable[[Any], None]:
    def note_and_remove(path: Any) -> None:
        removed.append(Path(path).name)
        remove(path)

    return note_and_remove


def _use(subject: Subject, task: Task, folder: str) -> tuple[Outcome, int]:
    """Evaluate the best checkpoint, resume the last one, and return the step at which that run began."""
    module = task.module()
    trainer = _trainer(subject, task, folder, limit_val_batches=1, val_check_interval=task.batches)
    trainer.fit(module)
    trainer.validate(module, ckpt_path="best", verbose=False)
    best = outcome_of(trainer, module)
    saver = SaveAt({})
    again = _trainer(subject, replace(task, steps=len(SCORES) + 1, seed=8), folder, callbacks=[saver])
    again.fit(replace(task, seed=8).module(), ckpt_path="last")
    return best, -1 if saver.started is None else saver.started.counters["global_step"]


@check(of_adapter=True)
def flipped_byte(bench: Bench) -> None:
    """Resuming finds a flipped byte, and every rank names the file."""
    _expect_refused(bench, _flip)


@check(of_adapter=True)
def truncated_file(bench: Bench) -> None:
    """Resuming finds a truncated file, and every rank names it."""
    _expect_refused(bench, _truncate)


@check(of_adapter=True)
def missing_checkpoint(bench: Bench) -> None:
    """Every rank reports a missing checkpoint and names the path."""
    path = str(bench.directory / "nowhere.ckpt")
    for rank, error in enumerate(bench.run(_resume, TASK, path)):
        expect("nowhere.ckpt" in error, f"rank {rank}: {error or 'no error'!r} does not name {path!r}.")


@check(of_adapter=True)
def checkpoint_of_another_model(bench: Bench) -> None:
    """Every rank refuses a checkpoint of another model with the same message, which names the difference."""
    saved_checkpoint(bench)
    errors = bench.run(_resume, replace(TASK, model=Wider), path_in(bench))
    for rank, error in enumerate(errors):
        named = "head.weight" in error or "more.weight" in error
        expect(named, f"rank {rank}: {error or 'no error'!r} names neither head.weight nor more.weight.")
    expect(len(set(errors)) == 1, f"the ranks differ: {' / '.join(map(repr, errors))}.")


@check(kinds=("backend",), of_adapter=True)
def save_error_on_all_ranks(bench: Bench) -> None:
    """Every rank gets the error of a failed save, and training can continue."""
    obstacle = bench.directory / "obstacle"
    obstacle.write_text("a file in place of a directory")
    path = str(obstacle / "saved.ckpt")
    for rank, (error, losses) in enumerate(bench.run(_save_in_vain, TASK, path)):
        expect("obstacle" in error, f"rank {rank}: saving ended with {error or 'no error'!r}.")
        expect(losses == TASK.steps, f"rank {rank}: {losses} steps, expected {TASK.steps}.")


def _expect_refused(bench: Bench, damage: Callable[[Path], None]) -> None:
    saved_checkpoint(bench)
    path = path_in(bench)
    file = max(Path(path).rglob("*.safetensors"))
    damage(file)
    for rank, error in enumerate(bench.run(_resume, TASK, path)):
        if not error:
            raise CheckFailed(f"rank {rank} resumed from a damaged checkpoint.")
        expect(file.name in error, f"rank {rank}: the error does not name {file.name}: {error}")


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1  # a byte of the tensors, which come last in the file
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


class Wider(Resumable):
    """Another model, with one layer of another size and an additional layer."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(self.head.in_features, self.head.out_features + 1)
        self.more = nn.Linear(2, 2)


class SaveInVain(Callback):
    """Tries to save after the first step, and continues."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error = ""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.error = error_of(lambda: trainer.save_checkpoint(self.path))


def _resume(subject: Subject, task: Task, path: str) -> str:
    """Return the error of resuming."""
    return error_of(lambda: run(subject, task, ckpt_path=path))


def _save_in_vain(subject: Subject, task: Task, path: str) -> tuple[str, int]:
    """Return the error of saving, and the number of steps in the run."""
    failing = SaveInVain(path)
    record = run(subject, task, callbacks=[failing])
    return failing.error, len(record.losses)


# A process that dies while it overwrites a checkpoint leaves the old one or the new one, complete.
# The savers are forked from the workers, which have imported everything and hold no process group. One of
# them is killed right before its n-th operation on the file system.


_OPERATIONS = frozenset(
    ["open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"]
)
_SURVIVAL = 20.0
"""Seconds for a saver. Collectives have longer timeouts, but the savers must not need them."""
_RANKS = 2
_FAST_KILLS = 3
"""Kills on each rank in the fast profile."""


@check(deadline=120, of_adapter=True)
def killed_while_saving(bench: Bench) -> None:
    """A process killed while saving leaves a complete checkpoint, and no other process hangs."""
    _try_kills(bench, _FAST_KILLS)


@check(full=True, deadline=1200)
def killed_at_every_file_operation(bench: Bench) -> None:
    """A kill before any file operation leaves a complete checkpoint, the old or the new one."""
    _try_kills(bench, None)


def _try_kills(bench: Bench, kills: int | None) -> None:
    path = path_in(bench)
    subject = replace(bench.subject, accelerator="cpu")  # a process that uses a GPU cannot be forked
    version = 1
    _save(bench, subject, path, version)
    operations = _save(bench, subject, path, version + 1)
    version += 1
    if not any(operations):
        bench.not_applicable("its writes cannot be interrupted between two operations of Python")
    for rank, count in enumerate(operations):
        for operation in _chosen(count, kills):
            _save(bench, subject, path, version + 1, victim=rank, operation=operation)
            where = f"rank {rank} was killed before operation {operation} of {count} of a save"
            version = _expect_whole(bench, path, version, where)


def _chosen(count: int, kills: int | None) -> list[int]:
    """Return operation numbers, spread evenly; all of them without `kills`."""
    if kills is None or count <= kills:
        return list(range(1, count + 1))
    return [1 + round(i * (count - 1) / (kills - 1)) for i in range(kills)]


def _save(
    bench: Bench, subject: Subject, path: str, version: int, *, victim: int = -1, operation: int = 0
) -> list[int]:
    """Save a version in forked processes; return the operations of each, unless one was the victim."""
    job = (Task(model=Plain, steps=1), path, version, free_port(), victim, operation)
    ended = bench.run(_fork_and_wait, *job, subject=subject, world_size=_RANKS)
    for rank, (status, _) in enumerate(ended):
        if status is None and victim < 0:
            bench.not_applicable("it cannot save in a forked process")
        if status is None:
            raise CheckFailed(
                f"rank {victim} was killed while saving, and rank {rank} had not ended {_SURVIVAL:g} s later."
            )
        if victim < 0:
            expect(status == 0, f"rank {rank}: a saving process ended with exit code {status}.")
    return [operations for _, operations in ended]


def _expect_whole(bench: Bench, path: str, version: int, where: str) -> int:
    """Read the whole checkpoint and return its version."""
    try:
        stored = nnx_checkpoint.open_checkpoint(path)
        found = int(stored.objects["trainer"]["version"])
        values = {name: set(stored.read(name).flatten().tolist()) for name in stored.tensors}
    except Exception as error:
        raise CheckFailed(
            f"{where}: the checkpoint does not load: {type(error).__name__}: {error}"
        ) from error
    expect(
        found in (version, version + 1),
        f"{where}: the checkpoint has version {found}, the save before was {version}.",
    )
    for name, value in values.items():
        expect(value == {found}, f"{where}: {name} holds {value} in version {found}, a mixture of saves.")
    return found


# Workers run the functions below.


class _Killed(Callback):
    """Saves before the first step, counts file operations, and dies before one of them."""

    def __init__(self, path: str, version: int, operation: int) -> None:
        self.path, self.version, self.operation = path, version, operation
        self.held: list[Any] = []
        self.count = 0
        self.is_saving = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save; end the process at once after an error, because it has no other task."""
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
        checkpoint["version"] = self.version

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        if self.is_saving and event in _OPERATIONS:
            self.count += 1
            if self.count == self.operation:
                os.kill(os.getpid(), signal.SIGKILL)


def _fork_and_wait(
    subject: Subject, task: Task, path: str, version: int, port: int, victim: int, operation: int
) -> tuple[int | None, int]:
    """Save in a forked process.

    Returns:
        The exit code (None if the process had to be killed), and its number of operations if it survived.

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
    count = os.read(read, 8)
    os.close(read)
    return status, int.from_bytes(count, "little")


def _contents_of_modules() -> list[Any]:
    """Copy all containers at the top level of modules, to keep their contents alive.

    A process group that a cache drops would wait for its threads, which a fork does not copy.

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

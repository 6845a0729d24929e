"""Checkpoints that are damaged, missing or of another model, and places that cannot be written to.

Each ends in one clear error on every rank: one that only some ranks get leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn

from nnx_conformance.check import Bench, CheckFailed, check, expect
from nnx_conformance.checks.checkpoints.runs import TASK, Resumable, error_of, run
from nnx_conformance.checks.checkpoints.stored import path_in, saved_checkpoint
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task


@check(of_adapter=True)
def flipped_byte(bench: Bench) -> None:
    """A flipped byte is found when resuming; every rank names the file."""
    _expect_refused(bench, _flip)


@check(of_adapter=True)
def truncated_file(bench: Bench) -> None:
    """A truncated file is found when resuming; every rank names it."""
    _expect_refused(bench, _truncate)


@check(of_adapter=True)
def missing_checkpoint(bench: Bench) -> None:
    """Where no checkpoint is, every rank says so and names the path."""
    path = str(bench.directory / "nowhere.ckpt")
    for rank, error in enumerate(bench.run(_resume, TASK, path)):
        expect("nowhere.ckpt" in error, f"rank {rank}: {error or 'no error'!r} does not name {path!r}.")


@check(of_adapter=True)
def another_model(bench: Bench) -> None:
    """A checkpoint of another model is refused on every rank, in the same words, which name what differs."""
    saved_checkpoint(bench)
    errors = bench.run(_resume, replace(TASK, model=Wider), path_in(bench))
    for rank, error in enumerate(errors):
        named = "head.weight" in error or "more.weight" in error
        expect(named, f"rank {rank}: {error or 'no error'!r} names neither head.weight nor more.weight.")
    expect(len(set(errors)) == 1, f"the ranks differ: {' / '.join(map(repr, errors))}.")


@check(kinds=("backend",), of_adapter=True)
def save_fails_everywhere(bench: Bench) -> None:
    """Where a checkpoint cannot be written, every rank gets the error, and training can go on."""
    obstacle = bench.directory / "obstacle"
    obstacle.write_text("a file, where a directory would have to be")
    path = str(obstacle / "saved.ckpt")
    for rank, (error, losses) in enumerate(bench.run(_save_in_vain, TASK, path)):
        expect("obstacle" in error, f"rank {rank}: saving ended with {error or 'no error'!r}.")
        expect(losses == TASK.steps, f"rank {rank}: {losses} steps instead of {TASK.steps}.")


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
    content[-100] ^= 1  # among the tensors, which come last
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


# --- models and jobs ------------------------------------------------------------------------------


class Wider(Resumable):
    """Another model: one layer of another size, and one more."""

    def build(self) -> None:
        """Create the layers."""
        super().build()
        self.head = nn.Linear(self.head.in_features, self.head.out_features + 1)
        self.more = nn.Linear(2, 2)


class SaveInVain(Callback):
    """Tries to save after the first step, and goes on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error = ""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Try."""
        if trainer.global_step == 1:
            self.error = error_of(lambda: trainer.save_checkpoint(self.path))


def _resume(subject: Subject, task: Task, path: str) -> str:
    """How resuming fails."""
    return error_of(lambda: run(subject, task, ckpt_path=path))


def _save_in_vain(subject: Subject, task: Task, path: str) -> tuple[str, int]:
    """How saving fails, and how many steps the run makes nevertheless."""
    failing = SaveInVain(path)
    record = run(subject, task, callbacks=[failing])
    return failing.error, len(record.losses)

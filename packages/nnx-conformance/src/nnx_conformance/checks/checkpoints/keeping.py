"""ModelCheckpoint: which checkpoints it keeps, that all ranks agree on them, and resuming by their role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from nnx_conformance.check import Bench, check, expect, expect_equal_weights
from nnx_conformance.checks.checkpoints.runs import (
    TASK,
    TOLERANCE,
    Record,
    Resumable,
    SaveAt,
    run,
    trainer_for,
)
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import outcome_of

SCORES = (3.0, 1.0, 2.0, 4.0)
"""What the runs log after each step; the best two are those of steps 2 and 3."""


@check(of_adapter=True)
def keeps_the_best(bench: Bench) -> None:
    """ModelCheckpoint keeps the best ones and the last, and every rank names the same best."""
    kept = {"step=2.ckpt", "step=3.ckpt", "last.ckpt"}
    for rank, report in enumerate(bench.run(_keep, _TASK, str(bench.directory))):
        expect(
            report.best == "step=2.ckpt", f"rank {rank} calls {report.best!r} the best, not 'step=2.ckpt'."
        )
        expect(set(report.kept) == kept, f"rank {rank} finds {report.kept}, expected {sorted(kept)}.")


@check(of_adapter=True)
def removes_checkpoints_once(bench: Bench) -> None:
    """An old checkpoint is removed by one rank only."""
    ranks = bench.run(_keep, _TASK, str(bench.directory))
    removed = Counter(name for report in ranks for name in report.removed)
    twice = sorted(name for name, count in removed.items() if count > 1)
    expect(not twice, f"{twice} were removed by several ranks: the second one may find half a directory.")


@check(of_adapter=True)
def best_and_last_load(bench: Bench) -> None:
    """`ckpt_path="best"` evaluates the best weights, `ckpt_path="last"` resumes the latest."""
    second: Record = bench.alone(run, replace(_TASK, steps=2))
    for rank, (best, step) in enumerate(bench.run(_use, _TASK, str(bench.directory))):
        expect_equal_weights(best.weights, second.weights, tolerance=TOLERANCE, where=f"best, rank {rank}")
        expect(step == len(SCORES), f"rank {rank}: 'last' was resumed in step {step}, not {len(SCORES)}.")


class Scored(Resumable):
    """Logs a score for each step."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch."""
        self.log("score", SCORES[min(self.trainer.global_step, len(SCORES) - 1)])
        return super().training_step(batch, index)


_TASK = replace(TASK, model=Scored)


# --- jobs -----------------------------------------------------------------------------------------


@dataclass
class _Report:
    """What one rank knows of the checkpoints.

    Attributes:
        best: Name of the best one.
        kept: What there is when training has ended.
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
    """Evaluate the best one; then resume the last with a new Trainer, which says where it began."""
    module = task.module()
    trainer = _trainer(subject, task, folder, limit_val_batches=1, val_check_interval=task.batches)
    trainer.fit(module)
    trainer.validate(module, ckpt_path="best", verbose=False)
    best = outcome_of(trainer, module)
    saver = SaveAt({})
    again = _trainer(subject, replace(task, steps=len(SCORES) + 1, seed=8), folder, callbacks=[saver])
    again.fit(replace(task, seed=8).module(), ckpt_path="last")
    return best, -1 if saver.started is None else saver.started.counters["global_step"]

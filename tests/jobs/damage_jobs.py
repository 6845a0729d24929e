"""Runs with a damaged checkpoint, or with a rank that cannot write."""

from __future__ import annotations

import resource
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

import nnx_checkpoint
from nnx_core.errors import CheckpointError
from nnx_test_helpers.training import MODELS, Run, make_trainer


def resume_error(run: Run) -> str:
    """Return the message of the error that resuming raises, or the result without one."""
    trainer = make_trainer(run)
    try:
        trainer.fit(MODELS[run.model](run), ckpt_path=run.resume)
    except CheckpointError as error:
        return f"CheckpointError: {error}"
    return "no error"


class _SaveTwice(Callback):
    """Saves at every step; from the second on, one rank may write a few bytes only."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.errors = run, rank, []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if trainer.global_step > 1 and trainer.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            trainer.save_checkpoint(str(self.run.save))
        except CheckpointError as error:
            self.errors.append(f"CheckpointError: {error}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_on_a_full_disk(run: Run, rank: int) -> tuple[list[str], int, list[str]]:
    """Save while one rank's disk is full.

    Returns:
        The errors, the step of the checkpoint on disk afterwards, and the files beside it.
    """
    saver = _SaveTwice(run, rank)
    make_trainer(run, callbacks=[saver]).fit(MODELS[run.model](run))
    stored = nnx_checkpoint.open_checkpoint(str(run.save))
    left = sorted(entry.name for entry in Path(str(run.save)).iterdir())
    return saver.errors, int(stored.objects["trainer"]["global_step"]), left

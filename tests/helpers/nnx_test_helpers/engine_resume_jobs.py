"""Jobs that save DeepSpeed checkpoints in one run, resume them in another, and save again at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import nnx_checkpoint
from nnx_test_helpers.training import MODELS, Run, make_trainer


@dataclass(frozen=True)
class Losses:
    """The losses of one rank's run."""

    losses: list[float]


class SaveAt(Callback):
    """Saves once: after a step, or before the first one of a run that resumes."""

    def __init__(self, step: int, path: str, *, resumed: bool) -> None:
        self.step, self.path, self.resumed = step, path, resumed

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.resumed:
            assert trainer.global_step == self.step, "it resumes where the other was saved"
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        if not self.resumed and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def run_and_save(run: Run, step: int, path: str) -> Losses:
    """Train a run and save it after `step`, or when it has resumed there."""
    import nnx

    module = MODELS[run.model](run)
    callback = SaveAt(step, path, resumed=run.resume is not None)
    plugins = [nnx.CheckpointIO()] if run.strategy.startswith(("ddp", "auto")) else None
    make_trainer(run, callbacks=[callback], plugins=plugins).fit(module, ckpt_path=run.resume)
    return Losses(module.losses)


def linear_after(run: Run) -> tuple[bool, list[float]]:
    """Return True if torch's own linear is restored after a run, and the run's losses."""
    before = torch.nn.functional.linear
    module = MODELS[run.model](run)
    make_trainer(run).fit(module)
    return torch.nn.functional.linear is before, module.losses


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every logical tensor of a checkpoint, whole: weights, optimizer state and steps."""
    saved = nnx_checkpoint.open_checkpoint(path)
    return {key: saved.read(key) for key in saved.tensors}

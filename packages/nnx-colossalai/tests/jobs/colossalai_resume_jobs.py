"""Cells of the resume matrix in 16-mixed: weights, moments, steps, and the loss scale with its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from nnx_test_helpers.resume_jobs import exact_state
from nnx_test_helpers.training import MODELS, Run, make_trainer

DEVICE_BYTES = 64 * 2**20
LIGHTNINGS_SCALE = {"init_scale": 2.0**10, "growth_interval": 2}
"""The initial state of torch's scaler, under the strategies without options for it."""


@dataclass(frozen=True)
class Exact:
    """A rank's training state at the time of saving or resuming, and the later losses."""

    weights: str
    optimizer: str
    scaler: Mapping[str, Any]
    losses: list[float]


class Watch(Callback):
    """Saves at a step and notes the state, or notes it when a run that resumes there begins."""

    def __init__(self, step: int, save: str | None) -> None:
        self.step, self.save = step, save
        self.state: tuple[str, str] = ("", "")
        self.scaler: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.save is None:
            assert trainer.global_step == self.step
            self._note(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if self.save is not None and trainer.global_step == self.step:
            trainer.save_checkpoint(self.save)
            self._note(trainer, module)

    def _note(self, trainer: Trainer, module: LightningModule) -> None:
        self.state = exact_state(trainer, module)
        self.scaler = dict(trainer.precision_plugin.state_dict())


def run_cell(run: Run, step: int, simulated: int | None = None) -> Exact:
    """Train a run that saves at a step, or one that resumes from a checkpoint of that step.

    Args:
        run: The run as data.
        step: The step of the save.
        simulated: The seed of a simulated device's random delays, for runs of nnx.
    """
    import nnx

    if simulated is not None:
        run = replace(run, options={**run.options, "device": simulated_device(simulated)})
    module = MODELS[run.model](run)
    watch = Watch(step, run.save)
    scaler = None if run.strategy == "colossalai" else torch.amp.GradScaler("cpu", **LIGHTNINGS_SCALE)
    # Trainer turns precision="16-mixed" into bf16-mixed on the CPU.
    plugins: list[Any] = [MixedPrecision("16-mixed", "cpu", scaler)]
    if run.strategy.startswith("ddp"):
        plugins.append(nnx.CheckpointIO())
    trainer = make_trainer(replace(run, precision=None), callbacks=[watch], plugins=plugins)
    trainer.fit(module, ckpt_path=run.resume)
    return Exact(*watch.state, watch.scaler, module.losses)


def simulated_device(seed: int) -> Any:
    """Copies take random times, so that a wait that is missing shows as another hash."""
    from jobs.simulated_device import SimDevice

    return SimDevice(DEVICE_BYTES, delays=seed)

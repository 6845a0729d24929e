"""Trainings with impossible requests, or that run out of device memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from nnx_test_helpers.training import Net, Run, digest_of, make_trainer

ENOUGH = 2**20


class Greedy(Net):
    """Runs out of device memory in a forward, as torch does, on some ranks and a given number of times."""

    def __init__(self, run: Run, *, at: int, times: int, rank: int | None) -> None:
        super().__init__(run)
        self.at, self.times, self.only = at, times, rank

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super()._loss(inputs, targets)
        here = self.only is None or self.global_rank == self.only
        if self.training and here and self.times and self.trainer.global_step == self.at:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB.")
        return loss


class Shrink(Callback):
    """From a step on, the simulated device has less memory: as if something else had taken it."""

    def __init__(self, device: Any, *, at: int, capacity: int) -> None:
        self.device, self.at, self.capacity = device, at, capacity

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            self.device.capacity = self.capacity


class Lines(logging.Handler):
    """Collects the log lines of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit(
    options: Mapping[str, Any],
    devices: int,
    *,
    capacity: int | None = None,
    shrink: tuple[int, int] | None = None,
    exhausted: tuple[int, int, int | None] | None = None,
    accumulate: int = 1,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """Train, and report losses, the final weights and the log lines.

    Args:
        options: Of the strategy.
        devices: Ranks.
        capacity: Of a simulated device in place of the host.
        shrink: From which step on it has how many bytes.
        exhausted: At which step, how often and on which rank (None: all) forward is out of memory.
        accumulate: Micro batches in a step.
        optimizer: ``"adamw"`` or ``"sgd"``.
    """
    options = {"min_num_params": 100, **options}
    callbacks: list[Callback] = []
    if capacity is not None:
        from jobs.simulated_device import SimDevice

        device = SimDevice(capacity, delays=1)
        options["device"] = device
        if shrink is not None:
            callbacks.append(Shrink(device, at=shrink[0], capacity=shrink[1]))
    run = Run("colossalai", options, devices, steps=5, accumulate=accumulate, optimizer=optimizer)
    at, times, rank = exhausted or (-1, 0, None)
    module = Greedy(run, at=at, times=times, rank=rank)
    lines = Lines()
    logging.getLogger("nnx").addHandler(lines)
    try:
        make_trainer(run, callbacks=callbacks).fit(module)
    finally:
        logging.getLogger("nnx").removeHandler(lines)
    return {"losses": module.losses, "digest": digest_of(module.state_dict()), "log": lines.lines}


def fit_on_the_device(module: LightningModule, **options: Any) -> None:
    """Fit any module for a step on one rank."""
    import nnx

    Trainer(
        strategy=nnx.strategy("colossalai", **options),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)

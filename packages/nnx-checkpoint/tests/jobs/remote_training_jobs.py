"""Trainer runs that save their checkpoints to a URL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import nnx
from nnx_test_helpers.training import Net, Run, make_strategy


def _trainer(run: Run, url: str, steps: int) -> tuple[Trainer, ModelCheckpoint]:
    keeper = ModelCheckpoint(
        dirpath=url, monitor="step", mode="max", save_top_k=1, save_last=True, every_n_train_steps=1
    )
    plugins: list[Any] = [nnx.CheckpointIO()] if run.strategy.startswith("ddp") else []
    trainer = Trainer(
        strategy=make_strategy(run),
        accelerator="cpu",
        devices=run.devices,
        max_steps=steps,
        callbacks=[keeper],
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return trainer, keeper


def train_and_resume(run: Run, url: str) -> tuple[list[float], list[float], str]:
    """Losses of three steps at once, and of one step that was resumed after two; the last path."""
    whole = Net(run)
    _trainer(run, f"{url}/whole", 3)[0].fit(whole)
    first = Net(run)
    trainer, keeper = _trainer(run, f"{url}/parts", 2)
    trainer.fit(first)
    second = Net(replace(run))
    resumed, _ = _trainer(run, f"{url}/parts", 3)
    resumed.fit(second, ckpt_path=keeper.last_model_path)
    weights = zip(whole.parameters(), second.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in weights)
    return whole.losses, first.losses + second.losses, keeper.last_model_path if same else "other weights"

"""Runs that resume with another global batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

import nnx

__all__ = ["warnings_of_resumed_runs"]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def warnings_of_resumed_runs(first: str, second: str, path: str) -> list[list[str]]:
    """Train under one strategy, resume under another, and return the warnings about the batch of each run."""
    _fit(first, batch=8, accumulate=1, epochs=1).save_checkpoint(path)
    found = []
    for batch, accumulate in [(8, 1), (16, 1), (8, 2)]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _fit(second, batch=batch, accumulate=accumulate, epochs=2, path=path)
        texts = [str(warning.message) for warning in caught]
        found.append([text for text in texts if "trained with a global batch" in text])
    return found


def _fit(strategy: str, *, batch: int, accumulate: int, epochs: int, path: str | None = None) -> Any:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[nnx.CheckpointIO()] if strategy == "ddp" else None,
    )
    seed_everything(0, verbose=False)
    trainer.fit(Net(), DataLoader(torch.randn(60, 16), batch_size=batch), ckpt_path=path)
    return trainer

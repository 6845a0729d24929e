"""A job that trains with a different number of threads on each rank."""

from __future__ import annotations

import os

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def threads_of_a_run(strategy: str) -> int:
    """Return this rank's number of threads after a run that began with a different number on each rank."""
    torch.set_num_threads(2 + int(os.environ["RANK"]))
    try:
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(BoringModel())
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(1)

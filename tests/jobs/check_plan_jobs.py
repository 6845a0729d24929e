"""Runs with `check_plan=True`, for `test_check_plan.py`."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import nnx


class Blocks(pl.LightningModule):
    """Layers large enough to become units of fsdp_auto."""

    def __init__(self, *, reads_data: bool = False) -> None:
        super().__init__()
        self.reads_data = reads_data
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(4)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = batch
        if self.reads_data and batch.sum() > 1e9:
            x = x[x > 0]
        for block in self.blocks:
            x = x + block(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("loss", 0.0)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches(Dataset[Tensor]):
    """Five batches; one at a time is in memory, because their number is known."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(2048, 256, generator=torch.Generator().manual_seed(index))


def fit(
    strategy: str, devices: int, check: bool = True, steps: int = 4, reads_data: bool = False
) -> tuple[list[str], list[float]]:
    """Train; return the lines about the plan on this rank, and the losses."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nnx.plan")
    logger.addHandler(handler)
    torch.manual_seed(0)
    model = Blocks(reads_data=reads_data)
    trainer = pl.Trainer(
        strategy=nnx.strategy(strategy, check_plan=check),
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(model, DataLoader(Batches(), batch_size=None))
    finally:
        logger.removeHandler(handler)
    return lines, model.losses

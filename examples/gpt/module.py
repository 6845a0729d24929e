"""The training of the GPT: a LightningModule without any distributed code."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from gpt.model import GPT, GPTConfig

__all__ = ["LitGPT"]


class LitGPT(LightningModule):
    """AdamW with warm-up and cosine decay; weight decay on matrices only.

    Args:
        config: The size of the model.
        steps: Length of the whole training, which the learning rate follows.
        learning_rate: Its peak, reached after a tenth of the steps.
    """

    def __init__(self, config: GPTConfig, *, steps: int, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.model = GPT(config)
        self.steps = steps
        self.learning_rate = learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of this rank's share; the logged value is the mean over the global batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same loss on text the model is not trained on."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Two parameter groups and a schedule that moves every step."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def _learning_rate_factor(self, step: int) -> float:
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

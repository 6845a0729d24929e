"""Runs of a model that asks in which modes it computes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, FEATURES = 16, 8


class Asking(LightningModule):
    """Computes a part in float32 wherever autocast is on, and another one only without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row."""
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                x = self.first(x.float()) * 2
        else:
            x = self.first(x)
        y = self.last(x)
        return y if torch.is_grad_enabled() else y + 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The mean square."""
        return self(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Keeps what comes out."""
        self.out: Tensor = self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Steps so small that validation before and after sees the same."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trained_and_validated(strategy: str, precision: str) -> dict[str, Any]:
    """Programs that there are after training and validation, and how far the outputs are from the model's."""
    data = DataLoader(
        TensorDataset(torch.linspace(-1, 1, ROWS * FEATURES).view(ROWS, FEATURES)), batch_size=4
    )
    module = Asking()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        precision=precision,  # type: ignore[arg-type]
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
    )
    found: dict[str, Any] = {}
    module.on_train_end = lambda: found.update(_programs(trainer, module))  # type: ignore[method-assign]
    trainer.fit(module, data, data)
    own = Asking()
    (batch,) = list(data)[-1]
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        found["off"] = float((own(batch) - module.out).abs().max())
    return found


def _programs(trainer: Any, module: Asking) -> dict[str, Any]:
    programs = trainer.strategy.backend._laid_out[module].programs
    return {
        "modes": [compiled.graph.training for compiled in programs.variants],
        "contexts": ["enabled=False" in compiled.source for compiled in programs.variants],
        "causes": programs.causes,
    }

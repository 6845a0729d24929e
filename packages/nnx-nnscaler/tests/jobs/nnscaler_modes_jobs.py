"""Runs of models that read the modes of their computation, or values that change."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nnx

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
        """Record the result."""
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


FACTORS = [1.0]
"""A global of the module that a forward reads."""


class Factors:
    """An object of a class of the user's own."""

    def __init__(self, value: float) -> None:
        self.value = value


class Reading(LightningModule):
    """Multiplies by a number that a callback changes after each step.

    Args:
        place: The place of the number.
        factor: The number in the first step.
    """

    def __init__(self, place: str, factor: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.table, self.object, self.number = {"factor": [factor]}, Factors(factor), torch.tensor(factor)
        self.function: Any = partial(torch.mul, other=factor)
        FACTORS[0] = factor
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """One row for each row."""
        y: Tensor = self.layer(x)
        match self.hparams["place"]:
            case "hparams":
                return y * self.hparams["factor"]
            case "dict":
                return y * self.table["factor"][0]
            case "object":
                return y * self.object.value
            case "tensor":
                return y * self.number
            case "function":
                return self.function(y)  # type: ignore[no-any-return]
            case "global":
                return y * FACTORS[0]
            case _:
                return y * (self.hparams["factor"] + self.global_step)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The mean square."""
        loss = self(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        """Add one to the number."""
        FACTORS[0] += 1
        self.hparams["factor"] += 0 if self.hparams["place"] == "trainer" else 1
        self.table["factor"][0] += 1
        self.object.value += 1
        self.number += 1
        self.function = partial(torch.mul, other=FACTORS[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Does not move, so that losses tell the factor."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def losses_of_reading(strategy: str, place: str, factor: float, folder: str) -> list[float]:
    """The losses of three steps on one batch."""
    data = torch.linspace(-1, 1, 4 * FEATURES).view(4, FEATURES)
    module = Reading(place, factor)
    trainer = Trainer(
        strategy=nnx.strategy(strategy, gen_savedir=folder) if strategy != "auto" else "auto",
        accelerator="cpu",
        devices=2 if strategy != "auto" else 1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return module.losses

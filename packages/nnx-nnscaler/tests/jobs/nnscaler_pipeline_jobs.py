"""Jobs that train small models in the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nnx
from nnx_nnscaler.pipeline import schedules


class Deep(LightningModule):
    """Equal layers, and a forward that returns its loss beside its results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        return F.mse_loss(y, x.sin()), y

    def training_step(self, batch: Tensor, index: int) -> Any:
        loss, _ = self(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WithAuxiliaryLoss(Deep):
    def training_step(self, batch: Tensor, index: int) -> Any:
        loss, y = self(batch)
        return loss + y.square().mean()


class BackwardTwice(Deep):
    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> Any:
        loss, _ = self(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)


class Branches(Deep):
    """Two results, of which each depends on parameters that the other does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.layers[:4](x)
        return self.side(half.argmax(-1, keepdim=True) + x), self.layers[4:](half)

    def training_step(self, batch: Tensor, index: int) -> Any:
        side, main = self(batch)
        loss = side.square().mean() if index % 2 else (main - batch).square().mean()
        self.losses.append(loss.item())
        return loss


class LossBesideResult(Branches):
    """The forward returns the loss of the one, and the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side, main = super().forward(x)
        return (main - x).square().mean(), side

    training_step = Deep.training_step


class Penalized(Deep):
    """A loss over what a mask leaves, and a penalty of weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = self.layers(x), (x[:, 0] > 0).to(x.dtype)
        loss = ((y - x).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)
        first, last = self.layers[0][0].weight, self.layers[-1][0].weight
        return loss + 0.01 * (first.square().sum() + last.abs().sum()), y


class Contrast(Deep):
    """Compares each sample with all others, whose number is written into the graph."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.normalize(self.layers(x), dim=-1)
        return F.cross_entropy(y @ y.t(), torch.arange(len(y))), y


OF_ONE_PROCESS = (Branches, LossBesideResult, Penalized, Contrast)


def weights_after(schedule: str, folder: str) -> dict[str, list[Tensor]]:
    """By model, its weights after some steps that decay them."""
    found = {}
    for kind in OF_ONE_PROCESS:
        module = kind()
        options = {"pipeline_scheduler": schedule} if schedule else {}
        train(module, rows(16), batch=8, folder=f"{folder}/{kind.__name__}", **options)
        found[kind.__name__] = [value.clone() for value in module.state_dict().values()]
    return found


def train(module: LightningModule, data: Any, *, batch: int, folder: str, **options: Any) -> None:
    devices = 2 if options else 1
    trainer = Trainer(
        strategy=nnx.strategy("nnscaler_pp", gen_savedir=folder, **options) if options else "auto",
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch))


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(2))


def held_microbatches(folder: str, schedule: str, microbatches: int) -> int:
    """How many microbatches this rank had activations of at the same time, at most."""
    most = 0
    original = schedules.Turns._forward

    def counting(self: Any, number: int, index: int) -> None:
        nonlocal most
        original(self, number, index)
        most = max(most, len(self._given))

    schedules.Turns._forward = counting  # type: ignore[method-assign]
    try:
        train(
            *(Deep(), rows(16)),
            batch=16,
            folder=folder,
            pipeline_scheduler=schedule,
            pipeline_nmicros=microbatches,
        )
    finally:
        schedules.Turns._forward = original  # type: ignore[method-assign]
    assert most, "it did not work in turns"
    return most


def unequal_batches(schedule: str, folder: str) -> list[float]:
    """Losses where the last batch has 5 samples instead of 8, which are cut into fewer microbatches."""
    module = Deep()
    train(module, rows(29), batch=8, folder=folder, **({"pipeline_scheduler": schedule} if schedule else {}))
    return module.losses


def auxiliary_loss(folder: str) -> tuple[str, str]:
    return _error(WithAuxiliaryLoss(), folder)


def second_backward(folder: str) -> tuple[str, str]:
    return _error(BackwardTwice(), folder)


def _error(module: LightningModule, folder: str) -> tuple[str, str]:
    try:
        train(module, rows(16), batch=8, folder=folder, pipeline_scheduler="1f1b")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""

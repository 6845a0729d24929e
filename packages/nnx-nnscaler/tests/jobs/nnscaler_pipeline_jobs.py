"""Jobs that train small models in the stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nnx
from nnx_core.errors import PlanError
from nnx_core.whole import local_mode
from nnx_nnscaler.pipeline import schedules
from nnx_nnscaler.pipeline.plan import pipeline_plan_from_text

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Deep(LightningModule):
    """Equal layers, and a forward that returns its loss beside its results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])
        self.losses: list[float] = []
        self.plan = ""

    def on_train_start(self) -> None:
        describe = getattr(getattr(self.trainer.strategy, "backend", None), "summary", None)
        self.plan = describe(self) if describe else ""

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


def train(module: LightningModule, data: Any, *, batch: int, folder: str, **options: Any) -> None:
    devices = 2 if options else 1
    strategy = nnx.strategy("nnscaler_pp", gen_savedir=folder, **options) if options else "auto"
    trainer = Trainer(strategy=strategy, devices=devices, **_QUIET)
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


class Bytes(Callback):
    """Counts what a rank stores of parameters, gradients and optimizer state, but for counters of steps."""

    found = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        backend, (optimizer,) = trainer.strategy.backend, trainer.optimizers  # type: ignore[attr-defined]
        with local_mode(), backend._states.shown(optimizer):
            parameters = list(module.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            states = [
                v for values in optimizer.state.values() for v in values.values() if v.ndim or v.numel() > 1
            ]
            masters = list(backend._masters.copies.values())
            self.found = sum(
                t.numel() * t.element_size() for t in (*parameters, *gradients, *states, *masters)
            )


def stored_and_predicted(
    folder: str, strategy: str, devices: int, precision: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Bytes of parameters, gradients and optimizer state on this rank: counted, and as the plan has it."""
    counted = Bytes()
    trainer = Trainer(
        strategy=nnx.strategy(strategy, gen_savedir=folder, **options),
        devices=devices,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[counted],
        **_QUIET,
    )
    module = Deep()
    module.layers.append(module.layers[0])  # stages share it
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    trainer.fit(module, DataLoader(rows(16).to(dtype), batch_size=16))  # type: ignore[arg-type]
    plan = pipeline_plan_from_text(next(Path(folder).rglob("plan.json")).read_text())
    place = trainer.global_rank % plan.size // plan.stages[0].size
    return counted.found, plan.usage[place].states


def planned_losses_with(
    folder: str, strategy: str, options: dict[str, Any], width: int = 8
) -> tuple[list[float], str, str]:
    """Losses, what the first line of the run says of the plan, and the error that came instead."""
    module = Deep()
    if width != 8:
        module.layers[0] = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
    trainer = Trainer(strategy=nnx.strategy(strategy, gen_savedir=folder, **options), devices=2, **_QUIET)
    try:
        trainer.fit(module, DataLoader(rows(256), batch_size=256))  # type: ignore[arg-type]
    except PlanError as error:
        return [], "", str(error)
    return module.losses, module.plan, ""


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

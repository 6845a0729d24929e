"""A process that trains peers: each line of its input is a run, and it prints facts as lines of JSON.

A peer is a process with processes of its own, which a test kills, so that workers of a pool would not do. It
imports everything before the first line, because a peer that joins should not take a minute to do so.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nnx

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def data() -> TensorDataset:
    """Samples of a function that a linear model fits badly, with noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, 8, generator=generator)
    noise = 0.5 * torch.randn(2048, 1, generator=generator)
    return TensorDataset(inputs, torch.sin(inputs[:, :2].sum(1, keepdim=True)) + inputs[:, 2:3] + noise)


class Model(LightningModule):
    """A linear model; each batch takes `pause` seconds."""

    def __init__(self, *, pause: float = 0.0, outputs: int = 1, scheduler: bool = False) -> None:
        super().__init__()
        self.pause, self.scheduler, self.losses = pause, scheduler, list[float]()
        self.net = nn.Linear(8, outputs)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        time.sleep(self.pause)
        loss = nn.functional.mse_loss(self.net(batch[0]).mean(1, keepdim=True), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.1)
        if not self.scheduler:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    @torch.no_grad()
    def loss(self) -> float:
        """The loss on all samples."""
        inputs, targets = data().tensors
        return nn.functional.mse_loss(self.net(inputs), targets).item()


def say(**facts: Any) -> None:
    print(json.dumps({"at": round(time.monotonic(), 1), **facts}), flush=True)


class Watch(Callback):
    """Prints each step of the swarm, saves after the last one, and stops."""

    def __init__(self, steps: int, save: str) -> None:
        self.steps, self.save, self.seen = steps, save, -1

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        peer = trainer.strategy.backend.peer
        say(ready=peer.address, order=peer.order)

    def on_train_batch_end(self, trainer: Trainer, module: Model, *_: Any) -> None:
        backend = trainer.strategy.backend
        if backend.epoch != self.seen:
            self.seen = backend.epoch
            say(loss=module.loss(), local=trainer.global_step, **backend.metrics())
        if self.seen >= self.steps:
            if self.save:
                trainer.save_checkpoint(self.save)
            trainer.should_stop = True


def fit(
    *,
    seed: int,
    steps: int,
    options: dict[str, Any],
    pause: float = 0.0,
    outputs: int = 1,
    scheduler: bool = False,
    save: str = "",
    resume: str = "",
    trainer: dict[str, Any] | None = None,
) -> None:
    """Train a peer until the swarm has made so many steps."""
    seed_everything(seed, verbose=False)
    module = Model(pause=pause, outputs=outputs, scheduler=scheduler)
    strategy = nnx.strategy("hivemind", **options)
    settings = {**QUIET, "max_steps": 10**6, **(trainer or {})}
    runs = Trainer(strategy=strategy, callbacks=[Watch(steps, save)], **settings)
    runs.fit(module, DataLoader(data(), batch_size=8, shuffle=True), ckpt_path=resume or None)
    say(end=module.loss())


def alone(seed: int, *, steps: int, batch: int) -> float:
    """Return the loss after the same number of samples in one process."""
    seed_everything(seed, verbose=False)
    module = Model()
    loader = DataLoader(data(), batch_size=batch, shuffle=True, drop_last=True)
    Trainer(max_steps=steps, **QUIET).fit(module, loader)
    return module.loss()


class TwoSteps(Callback):
    """Records the loss of the restored weights, and stops after two steps."""

    def on_train_start(self, trainer: Trainer, module: Model) -> None:
        self.loss, self.began = module.loss(), trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.began + 2


def go_on(path: str, strategy: str) -> tuple[float, float, int]:
    """Resume a checkpoint for two steps under another strategy; return both losses, and the steps."""
    seed_everything(1, verbose=False)
    module, steps = Model(), TwoSteps()
    plugins = [nnx.CheckpointIO()] if strategy == "ddp" else None
    settings = {**QUIET, "devices": 2, "plugins": plugins}
    trainer = Trainer(strategy=strategy, callbacks=[steps], **settings)
    trainer.fit(module, DataLoader(data(), batch_size=96, shuffle=True), ckpt_path=path)
    return steps.loss, module.loss(), trainer.global_step - steps.began


if __name__ == "__main__":
    say(imported=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(240, repeat=True)
        fit(**json.loads(line))
        faulthandler.cancel_dump_traceback_later()

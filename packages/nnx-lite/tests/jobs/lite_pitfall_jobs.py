"""Pitfalls of distributed loops, and the solution with Lite. Each job runs on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import nnx
from jobs.lite_jobs import Regressor, batch_of, optimizer_of
from nnx_lite import LightningLite
from nnx_test_helpers.training import digest_of

PATIENCE = 5.0
"""Seconds that a collective waits for the others in jobs that diverge; by default it is half an hour."""


def patient(strategy: str) -> Any:
    """Return a strategy whose collectives time out soon."""
    if strategy == "ddp":
        return DDPStrategy(timeout=timedelta(seconds=PATIENCE))
    return nnx.strategy(strategy, namespace="lightning.fabric", timeout=PATIENCE)


def run(lite_class: str, strategy: str, *arguments: Any) -> Any:
    """Start one of the classes below on every rank."""
    cls: type[LightningLite] = globals()[lite_class]
    return cls(accelerator="cpu", strategy=strategy, devices=2).run(*arguments)


def run_patiently(lite_class: str, strategy: str, *arguments: Any) -> Any:
    """The same where a collective gives up soon."""
    cls: type[LightningLite] = globals()[lite_class]
    return cls(accelerator="cpu", strategy=patient(strategy), devices=2).run(*arguments)


def ready() -> bool:
    """Return True when this worker has imported the jobs' modules, which may exceed their timeout."""
    return True


def wait_for(path: Path) -> None:
    """Do something else until another rank has written a file."""
    deadline = time.monotonic() + 10 * PATIENCE
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def error_of(action: Callable[[], Any]) -> str:
    """Return the error of an action as text; empty if there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- divergence ---------------------------------------------------------------------------------------


class Diverging(LightningLite):
    """Only rank 0 enters a collective; the other continues with its own work."""

    def run(self, folder: str) -> str:
        done = Path(folder) / f"{type(self.strategy).__name__}.txt"
        if not self.is_global_zero:
            wait_for(done)
            return "did other things"
        error = error_of(lambda: self.all_gather(torch.ones(1)))
        done.touch()
        return error


class EarlyStopping(LightningLite):
    """Stop where the loss is low enough: by each rank's own loss, and by everybody's."""

    def run(self) -> dict[str, bool]:
        inputs, targets = batch_of(self.strategy, 0)
        model = self.setup(Regressor())
        with torch.no_grad():
            own = F.mse_loss(model(inputs), targets)
        losses = self.all_gather(own)
        threshold = losses.mean() + 1e-6  # between the two
        return {
            "by its own loss": bool(own < threshold),
            "by the mean": bool(self.reduce(own, reduce_op="mean") < threshold),
            "as rank 0 says": self.broadcast(bool(own < threshold)),
        }


class UnevenData(LightningLite):
    """Nineteen samples for two ranks: split by hand, one rank has a batch more, and waits in it."""

    def run(self) -> dict[str, int]:
        data = TensorDataset(torch.arange(19.0))
        by_hand = TensorDataset(torch.arange(19.0)[self.global_rank :: 2])
        return {
            "by hand": len(self.setup_dataloaders(DataLoader(by_hand, batch_size=3), replace_sampler=False)),
            "by Lite": len(self.setup_dataloaders(DataLoader(data, batch_size=3))),
        }


# --- reduction ----------------------------------------------------------------------------------------


class Reduction(LightningLite):
    """A loss, a metric over batches of unequal sizes, and gradients."""

    def run(self) -> dict[str, Any]:
        inputs, targets = batch_of(self.strategy, 0)
        model = self.setup(Regressor())
        with torch.no_grad():
            own = F.mse_loss(model(inputs), targets)
        count = torch.tensor(float(4 if self.global_rank == 0 else 2))
        total = torch.tensor(float(4 if self.global_rank == 0 else 0))  # rank 0 is right, rank 1 never
        sums = [self.reduce(value, reduce_op="sum") for value in (total, count)]
        return {
            "own": own.item(),
            "gathered": self.all_gather(own).mean().item(),
            "reduced": self.reduce(own, reduce_op="mean").item(),
            "mean of means": self.reduce(total / count, reduce_op="mean").item(),
            "sum over count": (sums[0] / sums[1]).item(),
        }


class Gradients(LightningLite):
    """One step with a model that was set up, and with one that was forgotten."""

    def run(self, set_up: bool) -> str:
        module = Regressor()
        model, optimizer = module, optimizer_of(module)
        if set_up:
            model, optimizer = self.setup(model, optimizer)
        inputs, targets = batch_of(self.strategy, 0)
        self.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        return digest_of(module.state_dict())


class PlainBackward(LightningLite):
    """``loss.backward()`` that was left as it is."""

    def run(self) -> str:
        module = Regressor()
        model, _ = self.setup(module, optimizer_of(module))
        inputs, targets = batch_of(self.strategy, 0)
        return error_of(F.mse_loss(model(inputs), targets).backward)


# --- rank 0 -------------------------------------------------------------------------------------------


class Download(LightningLite):
    """Rank 0 writes a file that all read: without waiting for it, and with."""

    def run(self, folder: str) -> dict[str, Any]:
        self.print("printed once")
        found = {}
        for name, waits in (("hasty.txt", False), ("patient.txt", True)):
            self.barrier()
            path = Path(folder) / name
            if self.global_rank == 0:
                time.sleep(0.3)
                path.write_text("data")
            if waits:
                self.barrier("downloaded")
            found[name] = path.exists()
        return found


# --- large models -------------------------------------------------------------------------------------


class Large(LightningLite):
    """A model made without memory; returns each rank's elements of it, and its results."""

    def run(self) -> dict[str, Any]:
        with self.init_module(empty_init=True):
            module = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
        empty = all(p.is_meta for p in module.parameters())
        model = self.setup(module)
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
        inputs, _ = batch_of(self.strategy, 0)
        return {
            "empty": empty,
            "held": held,
            "whole": sum(p.numel() for p in module.parameters()),
            "finite": bool(torch.isfinite(model(inputs)).all()),
        }


class Whole(LightningLite):
    """The number of a model's elements on each rank, for a model made as usual."""

    def run(self) -> int:
        module = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
        self.setup(module)
        return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())


# --- checkpoints --------------------------------------------------------------------------------------


class Saving(LightningLite):
    """A sharded model saved by ``torch.save``, by rank 0 alone, and by all."""

    def run(self, folder: str) -> dict[str, Any]:
        module = Regressor()
        model, optimizer = self.setup(module, optimizer_of(module))
        inputs, targets = batch_of(self.strategy, 0)
        self.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        report: dict[str, Any] = {}
        weight = model.state_dict()["embed.weight"]
        report["torch.save"] = (weight.to_local() if isinstance(weight, DTensor) else weight).numel()
        self.save({"model": model.state_dict(), "step": 1}, f"{folder}/all.ckpt")
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.state_dict().items()
        }
        report["digest"] = digest_of(whole)
        if self.is_global_zero:
            self.save({"mean": torch.ones(2)}, f"{folder}/plain.ckpt")
        report["plain"] = self.load(f"{folder}/plain.ckpt")["mean"].tolist()
        done = Path(folder) / "done.txt"
        if self.is_global_zero:
            report["rank 0"] = error_of(lambda: self.save(model.state_dict(), f"{folder}/rank0.ckpt"))
            done.touch()
        else:
            wait_for(done)
        return report

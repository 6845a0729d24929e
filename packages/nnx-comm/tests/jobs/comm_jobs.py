"""Runs of the strategies for slow links, whose replicas and errors the tests compare."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

import nnx
from nnx_base.shard import shard_of
from nnx_comm import QAdam
from nnx_comm.algorithm import Averaging
from nnx_comm.averaging import AsyncAverage
from nnx_comm.wire import make_wire
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task
from nnx_conformance.training import make_trainer


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as plain data.

    Attributes:
        strategy: The name of the strategy.
        options: Its options.
        steps: The optimizer steps of the whole run.
        save_at: The step after which to save to `path`; 0 is never.
        path: The directory of a checkpoint.
        resume: True to resume from `path`.
        save_to: Another directory to save to, of a resumed run.
        overflow_at: The batch whose loss is infinite on rank 1.
        validate: True to validate after every second batch.
        dies_at: The step in which rank 1 ends. Then ranks record no losses, which takes collectives.
        optimizer: The kind of optimizer, or "qadam".
        warmup: The warm-up steps of "qadam".
        scales: True for the loss scaler of 16-mixed, for which Trainer takes bf16-mixed on CPU.
        settings: Further arguments of Trainer.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    save_at: int = 0
    path: str = ""
    resume: bool = False
    save_to: str = ""
    overflow_at: int = -1
    validate: bool = False
    dies_at: int = -1
    optimizer: Any = "adamw"
    warmup: int = 2
    scales: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class Model(Plain):
    """Overflows on one rank, and records what evaluation saw."""

    def __init__(self, task: Task, run: Run) -> None:
        super().__init__(task)
        self.run = run
        self.evaluated: list[tuple[float, float]] = []

    def configure_optimizers(self) -> Any:
        if self.run.optimizer != "qadam":
            return super().configure_optimizers()
        return QAdam(self.parameters(), lr=0.02, warmup_steps=self.run.warmup)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.trainer.global_step == self.run.dies_at and self.global_rank == 1:
            os._exit(7)
        loss = super().training_step(batch, index)
        if index == self.run.overflow_at and self.global_rank == 1:
            return loss * torch.tensor(float("inf"))
        return loss

    def record(self, loss: Tensor) -> None:
        if self.run.dies_at < 0:
            super().record(loss)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        if index == 0:
            whole = batch[0].new_ones(4, batch[0].shape[1])
            self.evaluated.append((float(self(whole).sum()), float(self.embed.weight.sum())))


class Watch(Callback):
    """Saves, and records errors at the beginning, around the overflow, and at the end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.errors: dict[str, dict[str, Tensor]] = {}
        self.start: dict[str, Tensor] = {}
        self.copies: dict[str, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.errors["start"] = own_of(trainer, pl_module, "error")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.errors[f"batch {batch_idx}"] = own_of(trainer, pl_module, "error")
        self.copies = {key: own_of(trainer, pl_module, key) for key in ("left", "right")}
        self.copies["here"] = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        path = self.run.save_to if self.run.resume else self.run.path
        if path and trainer.global_step == self.run.save_at:
            trainer.save_checkpoint(path)


def own_of(trainer: Any, module: Any, key: str) -> dict[str, Tensor]:
    """Return a copy of a tensor of the algorithm's own state on this rank, by parameter.

    That of a sharded parameter has zeros for the elements of other ranks.
    """
    algorithm = getattr(getattr(trainer.strategy, "backend", None), "algorithm", None)
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {}
    for parameter, tensors in ({} if algorithm is None else algorithm.own).items():
        if key in tensors:
            shard = shard_of(parameter)
            found[names[parameter]] = tensors[key].new_zeros(shard.shape)
            for box in shard.boxes:
                found[names[parameter]][box.slices] = tensors[key]
    return found


def train(run: Run) -> dict[str, Any]:
    """Train, and return losses, weights, errors and metrics of this rank."""
    task = Task(steps=run.steps, optimizer=run.optimizer)
    module, watch = Model(task, run), Watch(run)
    evaluation = {"limit_val_batches": 1, "val_check_interval": 2} if run.validate else {}
    settings = {"log_every_n_steps": 1, **evaluation, **run.settings}
    if run.strategy in ("ddp", "auto"):
        settings["plugins"] = [nnx.CheckpointIO()]
    if run.scales:
        settings |= {
            "precision": None,
            "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))],
        }
    trainer = make_trainer(Subject(run.strategy, options=run.options), task, callbacks=[watch], **settings)
    trainer.fit(module, ckpt_path=run.path if run.resume else None)
    return {
        "losses": module.losses,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "errors": watch.errors,
        "copies": watch.copies,
        "start": watch.start,
        "evaluated": module.evaluated,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "scale": getattr(getattr(trainer.precision_plugin, "scaler", None), "get_scale", lambda: 1.0)(),
    }


def train_with(options_by_rank: list[dict[str, Any]], strategy: str) -> dict[str, Any]:
    """Train with the options of this rank."""
    return train(Run(strategy=strategy, options=options_by_rank[int(os.environ["RANK"])]))


def run_ahead(path: str, steps: int) -> list[float]:
    """Return a weight after each step of an asynchronous average; each step adds the rank plus one.

    Rank 1 takes its fourth step after the sixth of rank 0.
    """
    weight, rank, seen = torch.nn.Parameter(torch.zeros(1)), dist.get_rank(), []
    algorithm = AsyncAverage(4, staleness=3, group=None)
    for step in range(1, steps + 1):
        while rank == 1 and step == 4 and not Path(path).exists():
            time.sleep(0.01)
        weight.data += rank + 1
        algorithm.exchange({weight: weight.detach()}, step=step)
        seen.append(float(weight))
        if rank == 0 and step == 6:
            Path(path).touch()
    algorithm.finish()
    return seen


def send(codec: str, counts: list[int]) -> list[tuple[float, float, int, int]]:
    """Average random numbers; return what is lost, the largest error of the mean, and the payload."""
    found = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for count in counts:
        values = torch.randn(count, generator=generator, dtype=torch.float64)
        total = values.clone()
        dist.all_reduce(total)
        averaging, ranks = Averaging(make_wire(codec, 0.1)), dist.get_world_size()
        parameter, mean = torch.nn.Parameter(values), values.clone()
        payload = averaging.exchange({parameter: mean}, step=1)
        error = averaging.own.get(parameter, {}).get("error", torch.zeros_like(values)).clone()
        dist.all_reduce(error)
        lost = float((total - ranks * mean - error).abs().max())
        off = float((mean - total / ranks).abs().max())
        found.append((lost, off, payload, averaging.wire.payload(count, ranks=ranks, itemsize=8)))
    return found

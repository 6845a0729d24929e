"""Tasks, outcomes, samples and the plain model of training runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.nn.functional import gelu, mse_loss
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler, TensorDataset

from nnx_base.ranks import is_distributed

__all__ = [
    "Block",
    "ConsecutiveSampler",
    "GLOBAL_BATCH",
    "Grouped",
    "Outcome",
    "Plain",
    "Task",
    "dataset",
    "loader",
    "share_of",
]


GLOBAL_BATCH = 12
"""Divisible by 1, 2, 3 and 4, so that every world size sees the same global batches."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training run as plain data; equal tasks give equal results.

    Attributes:
        model: The module's class, which gets the task; None for the plain model.
        steps: Optimizer steps.
        batches: Global batches in an epoch.
        last_batch: Samples in the epoch's last global batch.
        accumulate: Batches for each optimizer step.
        clip: The limit of gradient clipping.
        clip_algorithm: Clip by norm or by value.
        optimizer: The kind of optimizer. SGD reveals a wrong scale of gradients, which Adam would hide.
        precision: The precision of the Trainer.
        dtype: The dtype of the weights and the data.
        seed: The seed of the weights.
    """

    model: type[Plain] | None = None
    steps: int = 3
    batches: int = 8
    last_batch: int = GLOBAL_BATCH
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    precision: str = "32-true"
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 7

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights and the data."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def module(self) -> Plain:
        """Return a new module, always with the same weights."""
        return (self.model or Plain)(self)


@dataclass
class Outcome:
    """The results of a run, equal on every rank if the strategy is correct.

    Attributes:
        losses: Mean loss over all ranks of every training batch.
        weights: The complete state dict after teardown.
        metrics: ``trainer.callback_metrics``.
        notes: Further observations for a check.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)


FEATURES = 6


class ConsecutiveSampler(Sampler[list[int]]):
    """Gives each rank its consecutive slice of every global batch, in order.

    Args:
        samples: Length of the dataset; the last global batch may be smaller.
        num_replicas: Ranks that share the data.
        rank: This rank's number among them.
    """

    def __init__(self, samples: int, *, num_replicas: int, rank: int) -> None:
        self.samples, self.replicas, self.rank = samples, num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.samples, GLOBAL_BATCH):
            share = min(GLOBAL_BATCH, self.samples - start) // self.replicas
            first = start + self.rank * share
            yield list(range(first, first + share))

    def __len__(self) -> int:
        return math.ceil(self.samples / GLOBAL_BATCH)


def process_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size of torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def dataset(task: Task) -> TensorDataset:
    """Return an epoch of a fixed regression, inputs and targets of shape ``[samples, FEATURES]``."""
    samples = (task.batches - 1) * GLOBAL_BATCH + task.last_batch
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs).roll(1, dims=1) * 2
    return TensorDataset(inputs.to(task.torch_dtype), targets.to(task.torch_dtype))


def share_of(trainer: Any) -> dict[str, int]:
    """Return the strategy's ``num_replicas`` and ``rank`` for distributed samplers."""
    kwargs: dict[str, int] = getattr(
        trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
    )
    return {"num_replicas": kwargs["num_replicas"], "rank": kwargs["rank"]}


def loader(task: Task, trainer: Any) -> DataLoader[Any]:
    """Return the loader of this rank's share of the epoch."""
    data = dataset(task)
    return DataLoader(data, batch_sampler=ConsecutiveSampler(len(data), **share_of(trainer)))


FEATURES, WIDTH, BLOCKS = 6, 10, 2


class Block(nn.Module):
    """A residual layer, which wrapping engines would choose as an FSDP unit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, width]`` to the same shape."""
        return x + self.down(gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Plain(LightningModule):
    """A small regression model with common layers.

    Checks subclass it, mostly to override `build` and `forward`.

    Attributes:
        losses: Mean loss over all ranks of every training batch, in float64.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        torch.manual_seed(task.seed)
        self.task = task
        self.losses: list[float] = []
        self.build()
        self.to(task.torch_dtype)

    def build(self) -> None:
        """Create the layers."""
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, FEATURES]`` to the same shape."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def dummy_forward_args_fn(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """Return arguments for engines that trace the forward."""
        return {"x": batch[0]}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return and record the loss of a batch."""
        loss = self.loss(batch)
        self.record(loss)
        return loss

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Return the mean squared error of a batch."""
        inputs, targets = batch[:2]
        return mse_loss(self(inputs).to(targets.dtype), targets)

    def record(self, loss: Tensor) -> None:
        """Record the mean of a loss over all ranks."""
        mean = loss.detach().clone().double()
        if is_distributed():
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
        self.losses.append(mean.item())

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the mean loss."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Log the mean loss."""
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the output."""
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """Return one optimizer over the trained parameters."""
        return self.optimizer([p for p in self.parameters() if p.requires_grad])

    def optimizer(self, parameters: Any, **changes: Any) -> torch.optim.Optimizer:
        """Return an optimizer of the task's kind."""
        if self.task.optimizer == "sgd":
            return torch.optim.SGD(parameters, **{"lr": 0.1, **changes})
        return torch.optim.AdamW(parameters, **{"lr": 0.02, "weight_decay": 0.1, **changes})

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the task's data, in the same global order at every world size."""
        return loader(self.task, self.trainer)

    def val_dataloader(self) -> Any:
        """Return the training data."""
        return loader(self.task, self.trainer)

    test_dataloader = predict_dataloader = val_dataloader


class Grouped(Plain):
    """Has two parameter groups with different hyperparameters."""

    def groups(self) -> list[dict[str, Any]]:
        """Return the blocks and the other layers as groups."""
        around = [*self.embed.parameters(), *self.head.parameters()]
        return [
            {"params": list(self.blocks.parameters())},
            {"params": around, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.2},
        ]

    def configure_optimizers(self) -> Any:
        """Return SGD over the groups."""
        return optim.SGD(self.groups(), lr=0.1)

    def trained_with(self) -> Optimizer:
        """Return the optimizer in training."""
        optimizer: Optimizer = self.trainer.optimizers[0]
        return optimizer

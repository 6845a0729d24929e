"""The models of ``benchmarks/diff_faults.py``, and the job that records a run of one of them on a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nnx_conformance.diff.job import Job
from nnx_conformance.diff.recorder import write_error
from nnx_conformance.diff.trainer import fit_once
from nnx_conformance.subject import Subject
from nnx_conformance.training import ranks_per_node
from nnx_core.errors import NnxError

BATCH, STEPS, WIDTH = 8, 3, 16


class Model(LightningModule):
    """Trains a network on random samples by SGD with momentum.

    Attributes:
        target: The name of a square weight in the middle of the model.
        elementwise: The name of a vector near it.
        first: The name of the module that reads the samples.
    """

    first = "layers.0"
    target = "layers.2.weight"
    elementwise = "layers.2.bias"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.build()

    def build(self) -> None:
        self.layers = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 6), torch.randint(0, 5, (count,))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def loader(self) -> DataLoader[Any]:
        torch.manual_seed(11)
        return DataLoader(TensorDataset(*self.samples(STEPS * BATCH)), batch_size=BATCH)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader()


class Block(nn.Module):
    """A block of a small transformer, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(Model):
    """A transformer of two blocks."""

    first, target, elementwise = "embed", "blocks.1.proj.weight", "blocks.1.proj.bias"

    def build(self) -> None:
        self.embed, self.place = nn.Embedding(23, WIDTH), nn.Parameter(torch.randn(7, WIDTH) * 0.1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.place))

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 23, (count, 7)), torch.randint(0, 23, (count, 7))


class AdamGPT(GPT):
    """The transformer, trained by AdamW, whose first updates are the signs of gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class CNN(Model):
    """Convolutions with group norm."""

    target, elementwise = "layers.3.weight", "layers.3.bias"

    def build(self) -> None:
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 5),
        )

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, 8, 8), torch.randint(0, 5, (count,))


MODELS: dict[str, type[Model]] = {"MLP": Model, "GPT": GPT, "CNN": CNN, "AdamGPT": AdamGPT}


def record_run(job: Job, model: str, subject: Subject, settings: Mapping[str, Any]) -> None:
    """Record a run of a model on this rank; its error, if it fails, is in the record."""
    subject.prepare()
    torch.set_num_threads(1)
    module = MODELS[model]()
    trainer = Trainer(
        strategy=subject.flag(),
        accelerator="cpu",
        devices=ranks_per_node(),
        precision=job.precision or "32-true",
        max_epochs=-1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **{"gradient_clip_val": 0.1, **settings},
    )
    job = replace(job, devices=ranks_per_node())
    try:
        fit_once(job, trainer, module, module.loader())
    except (NnxError, RuntimeError) as error:
        write_error(Path(job.directory), int(os.environ.get("RANK", "0")), error)

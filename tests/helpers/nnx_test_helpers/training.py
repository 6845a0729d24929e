"""Models, data and training runs that worker processes share.

A run is described by plain data, trained by `train`, and reports its global losses of each step, so that a
test can compare one process with several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

GLOBAL_BATCH = 12
"""Divisible by 1, 2, 3 and 4, so that every world size sees the same global batches."""


class Strided(Sampler[int]):
    """Gives each rank its consecutive slice of every global batch, in order, unshuffled.

    Args:
        length: The number of samples in the dataset.
        skip: The number of global batches that the resumed run has already seen.
        num_replicas: The number of ranks that share the data.
        rank: The index of this rank among them.
    """

    def __init__(self, length: int, *, skip: int, num_replicas: int, rank: int) -> None:
        self.length, self.skip, self.replicas, self.rank = length, skip, num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        share = GLOBAL_BATCH // self.replicas
        for start in range(self.skip * GLOBAL_BATCH, self.length, GLOBAL_BATCH):
            yield from range(start + self.rank * share, start + (self.rank + 1) * share)

    def __len__(self) -> int:
        return self.length // self.replicas  # in an epoch, which is what Lightning counts


class Block(nn.Module):
    """A residual layer large enough to be worth a unit of its own in these tests."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # uneven on purpose
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(LightningModule):
    """A small regression model with blocks, a tied pair, a frozen layer and a buffer.

    Args:
        setup: The settings of its optimizers; see `Run`.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.run = run
        width = 10
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 6, bias=False)
        self.back = nn.Linear(width, 6, bias=False)
        self.back.weight = self.head.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5]))
        if run.dtype == "float64":
            self.double()
        self.losses: list[float] = []
        self.automatic_optimization = run.optimizers == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(self.frozen(x))
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) + 0.1 * self.back(hidden.tanh())) * self.scale

    def dummy_forward_args_fn(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """For engines that trace the forward."""
        return {"x": batch[0]}

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
        inputs, targets = batch
        if self.automatic_optimization:
            loss = self._loss(inputs, targets)
            self._record(loss)
            return loss
        for optimizer, scale in zip(self.optimizers(), (1.0, 0.5, 0.25), strict=False):
            self.toggle_optimizer(optimizer)
            loss = self._loss(inputs, targets) * scale
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.run.clip:
                self.clip_gradients(optimizer, self.run.clip, self.run.clip_algorithm)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers() or []:
            scheduler.step()
        self._record(loss)
        return None

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self(inputs).to(targets.dtype), targets)

    def _record(self, loss: torch.Tensor) -> None:
        mean = loss.detach().clone().double()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses.append(mean.item())

    def train_dataloader(self) -> DataLoader[Any]:
        # Where nnx does not read a checkpoint, nobody else passes over what has been seen.
        seen = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return loader(self.trainer, _dtype(self.run), skip=0 if _nnx_resumes(self.trainer) else seen)

    def val_dataloader(self) -> Any:
        return loader(self.trainer, _dtype(self.run)) if self.run.validate_every else []

    test_dataloader = predict_dataloader = lambda self: loader(self.trainer, _dtype(self.run))

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self._loss(*batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("test_loss", self._loss(*batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        first = [p for name, p in trained.items() if "blocks" in name]
        second = [p for name, p in trained.items() if "blocks" not in name]
        if self.run.optimizer == "mixed":
            return self._mixed_optimizers(trained)
        if self.run.optimizers == 2:
            optimizers = [self._optimizer(first, 0.02), self._optimizer(second, 0.01)]
            return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in optimizers]
        if self.run.groups == 2:
            groups = [{"params": first}, {"params": second, "lr": 0.003, "weight_decay": 0.0}]
            return self._optimizer(groups, 0.02)
        if not self.run.scheduler:
            return self._optimizer(list(trained.values()), 0.02)
        optimizer = self._optimizer(list(trained.values()), 0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _mixed_optimizers(self, trained: dict[str, nn.Parameter]) -> Any:
        """AdamW with two groups and SGD; or AdamW, Muon and Adafactor: states of every shape."""
        blocks = [[p for n, p in trained.items() if n.startswith(f"blocks.{i}")] for i in range(3)]
        rest = [p for name, p in trained.items() if "blocks" not in name]
        groups = [{"params": blocks[0]}, {"params": blocks[1], "lr": 0.003, "weight_decay": 0.0}]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)]
        if self.run.optimizers == 3:
            optimizers.append(torch.optim.Muon([p for p in blocks[2] if p.ndim == 2], lr=0.02))
            optimizers.append(torch.optim.Adafactor([*rest, *(p for p in blocks[2] if p.ndim != 2)], lr=0.02))
        else:
            optimizers.append(torch.optim.SGD(blocks[2] + rest, lr=0.02, momentum=0.9))
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for o in optimizers]

    def _optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        if self.run.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


class Wrapped(Net):
    """Chooses its units itself."""

    def configure_model(self) -> None:
        for index, block in enumerate(self.blocks):
            self.blocks[index] = wrap(block)


class Parallelized(Net):
    """Shards itself, as Lightning's ModelParallelStrategy asks for."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


MODELS: dict[str, type[Net]] = {"net": Net, "wrapped": Wrapped, "parallelized": Parallelized}


@dataclass(frozen=True)
class Run:
    """One training run, as data that travels to the workers."""

    strategy: str = "fsdp_auto"
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    steps: int = 10
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: str = "norm"
    groups: int = 1
    optimizers: int = 1
    optimizer: str = "adamw"
    scheduler: bool = False
    precision: str = "32-true"
    dtype: str = "float32"
    validate_every: int | None = None
    resume: str | None = None
    save: str | None = None
    save_at: int | None = None
    model: str = "net"


@dataclass
class Outcome:
    """The report of a run."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]
    digest: str


def dataset(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Fifteen global batches of a fixed regression task."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(15 * GLOBAL_BATCH, 6, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs).roll(1, dims=1) * 2
    return TensorDataset(inputs.to(dtype), targets.to(dtype))


def loader(trainer: Trainer, dtype: torch.dtype = torch.float32, skip: int = 0) -> DataLoader[Any]:
    """The dataset, cut so that step k sees the same samples at every world size."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    data = dataset(dtype)
    sampler = Strided(len(data), skip=skip, **kwargs)
    return DataLoader(data, batch_size=GLOBAL_BATCH // kwargs["num_replicas"], sampler=sampler)


def _nnx_resumes(trainer: Trainer) -> bool:
    if trainer.ckpt_path is None:
        return False
    from nnx_core.lightning.checkpoint import innermost_checkpoint_io
    from nnx_core.lightning.processes import ParallelProcesses

    ours = isinstance(trainer.strategy, ParallelProcesses)
    return ours or innermost_checkpoint_io(trainer.strategy.checkpoint_io) is not None


def _dtype(run: Run) -> torch.dtype:
    return getattr(torch, run.dtype)


def make_trainer(run: Run, **extra: Any) -> Trainer:
    """A Trainer for a run, quiet and on the CPU."""
    return Trainer(
        strategy=make_strategy(run),
        accelerator="cpu",
        devices=run.devices,
        max_steps=run.steps * run.optimizers,
        precision=run.precision,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip if run.optimizers == 1 else None,
        gradient_clip_algorithm=run.clip_algorithm if run.clip and run.optimizers == 1 else None,
        val_check_interval=run.validate_every,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **extra,
    )


def make_strategy(run: Run) -> Any:
    """The strategy of a run; ``auto`` for one plain process."""
    if run.strategy == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=run.devices, tensor_parallel_size=1)
    if not run.options:
        return run.strategy
    import nnx

    return nnx.strategy(run.strategy, **run.options)


def train(run: Run, *, module: Net | None = None, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Train as described and report; the weights are complete on every rank."""
    module = module if module is not None else MODELS[run.model](run)
    extra: dict[str, Any] = {}
    if run.strategy.startswith("ddp"):
        import nnx

        extra["plugins"] = [nnx.CheckpointIO()]
    trainer = make_trainer(run, callbacks=[SaveAt(run), *callbacks], **extra)
    trainer.fit(module, ckpt_path=run.resume)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(module.losses, weights, metrics, digest_of(weights))


class SaveAt(Callback):
    """Saves once, after a given step, and reports nothing."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.run.save and trainer.global_step == (self.run.save_at or self.run.steps):
            trainer.save_checkpoint(self.run.save)


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of names and exact values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def exists(path: str) -> bool:
    """Return True if a path exists for a worker."""
    return Path(path).exists()

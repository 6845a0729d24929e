"""Run a task on the ranks, by Trainer or by Fabric, with the strategy under test.

Workers run these functions. Checks compose their own jobs from `make_trainer` and `fit`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from nnx_base.ranks import all_gather_object, control_group
from nnx_conformance.subject import Subject
from nnx_conformance.task import BLOCKS, FEATURES, GLOBAL_BATCH, WIDTH, Block, Outcome, Plain, Task, dataset

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
"""Environment variables with the ranks and world size of a process."""


def world_size() -> int:
    """Return the number of ranks of the job; 1 outside of workers."""
    return ranks_per_node() * node_count()


def ranks_per_node() -> int:
    """Return the number of ranks on each node."""
    # Lightning deletes WORLD_SIZE at the end of a run, and a job may have several runs.
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))


def node_count() -> int:
    """Return the number of nodes of the job."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def make_trainer(subject: Subject, task: Task, **settings: Any) -> Trainer:
    """Return a quiet Trainer of `lightning.pytorch` for a task.

    Args:
        subject: The strategy.
        task: Steps, accumulation, clipping and precision.
        **settings: Further arguments of Trainer, which override those of the task.
    """
    return Trainer(**trainer_settings(subject, task, **settings))


def trainer_settings(
    subject: Subject, task: Task, *, namespace: str = "lightning.pytorch", **settings: Any
) -> dict[str, Any]:
    """Return the arguments that `make_trainer` passes to Trainer.

    Args:
        subject: The strategy.
        task: See `make_trainer`.
        namespace: Root of the Lightning tree whose Trainer gets them.
        **settings: See `make_trainer`.
    """
    chosen: dict[str, Any] = {
        "strategy": subject.flag(namespace),
        "accelerator": subject.accelerator,
        "devices": ranks_per_node(),
        "num_nodes": node_count(),
        "max_steps": task.steps,
        "precision": task.precision,
        "accumulate_grad_batches": task.accumulate,
        "gradient_clip_val": task.clip,
        "gradient_clip_algorithm": task.clip_algorithm if task.clip is not None else None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # the task's loader has its own sampler
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return {**chosen, **settings}


def fit(
    subject: Subject,
    task: Task,
    *,
    module: Plain | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    **settings: Any,
) -> Outcome:
    """Train a task and return its outcome.

    Args:
        subject: The strategy.
        task: The training to run.
        module: An existing module instead of a new one.
        callbacks: The callbacks of the Trainer.
        ckpt_path: Checkpoint to resume from.
        **settings: See `make_trainer`.
    """
    module = module if module is not None else task.module()
    trainer = make_trainer(subject, task, callbacks=list(callbacks), **settings)
    trainer.fit(module, ckpt_path=ckpt_path)
    return outcome_of(trainer, module)


def outcome_of(trainer: Trainer, module: Plain) -> Outcome:
    """Return the outcome of a finished Trainer."""
    return Outcome(
        losses=list(module.losses),
        weights={name: complete(value).cpu() for name, value in module.state_dict().items()},
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
    )


def complete(value: Tensor) -> Tensor:
    """Return a copy of the tensor, after gathering a DTensor. Collective."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


def mean_over_ranks(value: float) -> float:
    """Return the mean of a number over all ranks. Collective, on the CPU."""
    values = all_gather_object(value, control_group())
    return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A hand-written Fabric loop; equal loops give equal losses.

    Attributes:
        steps: Optimizer steps.
        accumulate: Batches for each step, all but the last under ``no_backward_sync``.
        clip_norm: Largest norm of the gradients.
        clip_value: Largest element of the gradients.
        precision: The precision of Fabric.
    """

    steps: int = 4
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: str = "32-true"


@dataclass
class Seen:
    """The results of a loop.

    Attributes:
        losses: Mean over all ranks of every batch.
        norms: The norms that clipping by norm returned.
        output_dtype: The dtype of the last batch's hidden activations.
    """

    losses: list[float]
    norms: list[float]
    output_dtype: torch.dtype | None = None


class Net(nn.Module):
    """The layers of the suite's plain model, without Lightning."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, FEATURES)
        self.dummy_forward_args = {"x": torch.zeros(2, FEATURES)}
        self.hidden_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, FEATURES]`` to the same shape."""
        hidden = self.embed(x)
        self.hidden_dtype = hidden.dtype
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def train(subject: Subject, loop: Loop, namespace: str = "lightning.fabric") -> Seen:
    """Train from the start.

    Args:
        subject: The strategy.
        loop: The loop to run.
        namespace: The copy of Lightning whose Fabric is used.
    """
    fabric = _fabric(subject, loop, namespace)
    module = Net()
    model, optimizer = fabric.setup(module, _optimizer(module))
    seen = _steps(fabric, model, optimizer, loop, range(loop.steps))
    seen.output_dtype = module.hidden_dtype
    return seen


def interrupted(subject: Subject, loop: Loop, path: str) -> Seen:
    """Train half of the steps, save, load into new objects, and train the other half."""
    half = loop.steps // 2
    fabric = _fabric(subject, loop)
    module = Net()
    model, optimizer = fabric.setup(module, _optimizer(module))
    first = _steps(fabric, model, optimizer, loop, range(half))
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": half})
    fabric.barrier()

    fabric = _fabric(subject, loop)
    module = Net(seed=99)
    model, optimizer = fabric.setup(module, _optimizer(module))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    second = _steps(fabric, model, optimizer, loop, range(state["step"], loop.steps))
    return Seen(first.losses + second.losses, first.norms + second.norms)


def _fabric(subject: Subject, loop: Loop, namespace: str = "lightning.fabric") -> Any:
    fabric = importlib.import_module(namespace).Fabric(
        strategy=subject.flag(namespace),
        accelerator=subject.accelerator,
        devices=ranks_per_node(),
        num_nodes=node_count(),
        precision=loop.precision,
    )
    fabric.launch()
    return fabric


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)


def _steps(fabric: Any, model: Any, optimizer: Any, loop: Loop, steps: range) -> Seen:
    seen = Seen([], [])
    for step in steps:
        for number in range(loop.accumulate):
            is_last = number == loop.accumulate - 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                inputs, targets = _batch(fabric, step * loop.accumulate + number)
                loss = mse_loss(model(inputs), targets)
                fabric.backward(loss / loop.accumulate)
            seen.losses.append(_mean(fabric, loss))
        if loop.clip_norm is not None:
            seen.norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=loop.clip_norm)))
        if loop.clip_value is not None:
            fabric.clip_gradients(model, optimizer, clip_val=loop.clip_value)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _batch(fabric: Any, index: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a global batch, by the strategy's sampler arguments."""
    alone = {"num_replicas": 1, "rank": 0}
    share = getattr(fabric.strategy, "distributed_sampler_kwargs", None) or alone
    size = GLOBAL_BATCH // share["num_replicas"]
    start = index * GLOBAL_BATCH + share["rank"] * size
    inputs, targets = dataset(Task()).tensors
    where = slice(start, start + size)
    return fabric.to_device(inputs[where]), fabric.to_device(targets[where])


def _mean(fabric: Any, loss: Tensor) -> float:
    return float(fabric.all_reduce(loss.detach().double(), reduce_op="mean"))


class Watched(Plain):
    """Records the results of evaluation.

    Attributes:
        evaluated: The mean over all ranks for every batch, by stage.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.evaluated: dict[str, list[float]] = {"validate": [], "test": [], "predict": []}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Record the loss."""
        self.evaluated["validate"].append(mean_over_ranks(self.loss(batch).item()))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Record the loss."""
        self.evaluated["test"].append(mean_over_ranks(self.loss(batch).item()))

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Record the mean square of the outputs, and return them."""
        outputs: Tensor = self(batch[0])
        self.evaluated["predict"].append(mean_over_ranks(outputs.square().mean().item()))
        return outputs

"""What the ranks do: build a Trainer for the strategy under test and run a task with it.

Runs in the workers. Checks compose their own jobs from `make_trainer` and `fit`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from nnx_checkpoint.collective import control_group, is_distributed
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task

# --- training -------------------------------------------------------------------------------------


def world_size() -> int:
    """Ranks of the job; one outside of the workers."""
    # Lightning deletes WORLD_SIZE when a run has ended, and a job may have several; it has one node.
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))


def make_trainer(subject: Subject, task: Task, **settings: Any) -> Trainer:
    """A quiet Trainer of `lightning.pytorch` for a task.

    Args:
        subject: The strategy.
        task: Steps, accumulation, clipping and precision.
        **settings: Further arguments of Trainer, or others in place of the above.
    """
    return Trainer(**trainer_settings(subject, task, **settings))


def trainer_settings(
    subject: Subject, task: Task, *, namespace: str = "lightning.pytorch", **settings: Any
) -> dict[str, Any]:
    """The arguments of a Trainer as `make_trainer` builds it.

    Args:
        subject: The strategy.
        task: See `make_trainer`.
        namespace: Root of the Lightning tree whose Trainer gets them.
        **settings: See `make_trainer`.
    """
    chosen: dict[str, Any] = {
        "strategy": subject.flag(namespace),
        "accelerator": subject.accelerator,
        "devices": world_size(),
        "max_steps": task.steps,
        "precision": task.precision,
        "accumulate_grad_batches": task.accumulate,
        "gradient_clip_val": task.clip,
        "gradient_clip_algorithm": task.clip_algorithm if task.clip is not None else None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # the task's loader has one of its own
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
    """Train as described.

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
    """What there is to report when a Trainer has ended."""
    return Outcome(
        losses=list(module.losses),
        weights={name: complete(value).cpu() for name, value in module.state_dict().items()},
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
    )


def complete(value: Tensor) -> Tensor:
    """A copy of the whole tensor, where it is a DTensor gathered. Collective."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def mean_over_ranks(value: float) -> float:
    """The mean of a number over all ranks. Collective, over host memory."""
    total = torch.tensor(value, dtype=torch.float64)
    if is_distributed():
        dist.all_reduce(total, group=control_group())
        total /= dist.get_world_size()
    return total.item()

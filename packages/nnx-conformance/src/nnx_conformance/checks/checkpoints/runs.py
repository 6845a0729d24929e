"""The runs that checks of checkpoints share: a model with state of every kind, saved and resumed.

Backends write the shared checkpoint by themselves; other strategies, and one plain process, get
`nnx.CheckpointIO` as a plugin where they take one. Runs in the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from nnx_conformance.check import CheckFailed
from nnx_conformance.checks.checkpoints.snapshots import Snapshot, take_snapshot
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task, dataset, share_of
from nnx_conformance.training import make_trainer, outcome_of
from nnx_core.backend import Backend
from nnx_core.registry import StrategyRegistry

SAVED_AFTER = 2
"""Steps after which the runs save, unless they say otherwise."""


class Resumable(Plain):
    """Has every kind of state: weights, a buffer, an optimizer with memory, a scheduler.

    It takes the batch of a step by itself, so that losses do not depend on where a loader stands: that has
    a check of its own.
    """

    def build(self) -> None:
        """Create the layers and the buffer."""
        super().build()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The batch of this step, wherever the loader stands."""
        self.seen += 1
        return super().training_step(self.batch_of_step(self.trainer.global_step), index)

    def batch_of_step(self, step: int) -> list[Tensor]:
        """This rank's share of a step's global batch."""
        share = share_of(self.trainer)
        size = GLOBAL_BATCH // share["num_replicas"]
        start = (step % self.task.batches) * GLOBAL_BATCH + share["rank"] * size
        return [tensor[start : start + size].to(self.device) for tensor in dataset(self.task).tensors]

    def configure_optimizers(self) -> Any:
        """One optimizer whose rate changes with every step."""
        optimizer = self.adam(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def adam(self, parameters: Any) -> torch.optim.AdamW:
        """With a large `eps`: rounding, in a gradient of almost nothing, must not make a whole step."""
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, eps=1e-3)


TASK = Task(model=Resumable, steps=4)
TOLERANCE = 1e-5
"""Largest difference of losses and weights between runs that divide the work differently."""


@dataclass
class Record:
    """What a run saw.

    Attributes:
        started: The state when training began.
        losses: Mean loss over all ranks of every batch.
        weights: The complete state dict after the run.
    """

    _saved: Snapshot | None
    started: Snapshot
    losses: list[float]
    weights: dict[str, Tensor]

    @property
    def saved(self) -> Snapshot:
        """The state when it was last saved.

        Raises:
            CheckFailed: The run never came to the step after which it was to save.
        """
        if self._saved is None:
            raise CheckFailed(f"the run ended after {len(self.losses)} batches, before it was to save.")
        return self._saved


class SaveAt(Callback):
    """Takes snapshots, and saves after certain steps.

    Args:
        paths: The paths to save to, by step; where one is empty, only look at the state.
        weights_only: Save the weights only.
    """

    def __init__(self, paths: Mapping[int, str], *, weights_only: bool = False) -> None:
        self.paths = paths
        self.weights_only = weights_only
        self.saved: Snapshot | None = None
        self.started: Snapshot | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what was restored."""
        self.started = take_snapshot(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save."""
        path = self.paths.get(trainer.global_step)
        if path is not None:
            self.saved = take_snapshot(trainer)
        if path:
            trainer.save_checkpoint(path, weights_only=self.weights_only)


def trainer_for(subject: Subject, task: Task, *, in_background: bool = False, **settings: Any) -> Trainer:
    """A Trainer that writes the shared checkpoint, if that can be.

    Args:
        subject: The strategy.
        task: The training to run.
        in_background: Save in the background.
        **settings: Further arguments of Trainer.
    """
    import nnx_core

    if _writes_by_itself(subject):
        if in_background:
            subject = replace(subject, options={**subject.options, "async_save": True})
        return make_trainer(subject, task, **settings)
    return make_trainer(subject, task, plugins=[nnx_core.CheckpointIO(async_save=in_background)], **settings)


def _writes_by_itself(subject: Subject) -> bool:
    """Whether a `Backend` is behind the strategy, whose checkpoints the core writes."""
    if subject.is_lightning:
        return False
    target = StrategyRegistry.get(subject.name).resolve()
    return isinstance(target, type) and issubclass(target, Backend)


def run(
    subject: Subject,
    task: Task,
    *,
    module: Plain | None = None,
    paths: Mapping[int, str] | None = None,
    ckpt_path: str | None = None,
    weights_only: bool = False,
    in_background: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Record:
    """Train, from the beginning or from a checkpoint.

    Args:
        subject: The strategy.
        task: The training to run.
        module: An existing module instead of a new one.
        paths: The paths to save to, by step; see `SaveAt`.
        ckpt_path: Checkpoint to resume from.
        weights_only: Save the weights only.
        in_background: Save in the background.
        callbacks: Further ones, which come before the one that saves.
    """
    module = module if module is not None else task.module()
    saver = SaveAt(paths or {}, weights_only=weights_only)
    trainer = trainer_for(subject, task, callbacks=[*callbacks, saver], in_background=in_background)
    trainer.fit(module, ckpt_path=ckpt_path)
    if saver.started is None:
        raise CheckFailed("training ended without `on_train_start` of its callbacks.")
    outcome = outcome_of(trainer, module)
    return Record(saver.saved, saver.started, outcome.losses, outcome.weights)


def error_of(call: Callable[[], Any]) -> str:
    """How a call fails on this rank; empty if it does not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

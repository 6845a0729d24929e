"""A look at Trainer in the middle of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task
from nnx_conformance.training import make_trainer

__all__ = ["in_training"]

T = TypeVar("T")


class _Probe(Callback):
    def __init__(self, look: Callable[[Trainer, Plain], object]) -> None:
        self.look = look

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Plain)
        self.seen = self.look(trainer, pl_module)


def in_training(subject: Subject, look: Callable[[Trainer, Plain], T]) -> T:
    """What a function sees when it is called as training starts, after everything was set up.

    Args:
        subject: The strategy.
        look: Called with the Trainer and the module.
    """
    task = Task(steps=1)
    probe = _Probe(look)
    make_trainer(subject, task, callbacks=[probe]).fit(task.module())
    return probe.seen  # type: ignore[return-value]

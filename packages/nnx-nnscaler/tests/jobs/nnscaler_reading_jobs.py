"""Jobs in which single ranks read weights or gradients, under the strategies of nnScaler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task
from nnx_conformance.training import fit
from nnx_core.errors import UnsupportedError

FROM = 2
"""The first step with a read; by then the ranks agree on their steps."""


@dataclass(frozen=True)
class Reading:
    """The ranks that read, the tensor, and the time.

    Attributes:
        readers: The ranks that read.
        what: The tensor: "weight" or "gradient".
        when: The name of the hook or method.
    """

    readers: Collection[int]
    what: str
    when: str


@dataclass
class Seen:
    """The result of a run on one rank."""

    losses: list[float]
    norms: list[float]
    error: str = ""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Reader(Plain):
    """Reads a norm of the head on some ranks."""

    reading: Reading

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.norms: list[float] = []

    def read(self, when: str, index: int) -> None:
        """If this is when, and this rank is one that reads."""
        if when == self.reading.when and index >= FROM and _rank() in self.reading.readers:
            weight: Any = self.head.weight
            self.norms.append(float((weight if self.reading.what == "weight" else weight.grad).norm()))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Before and after the forward."""
        self.read("before the forward", index)
        loss = super().training_step(batch, index)
        self.read("after the forward", index)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are there."""
        self.read("before the optimizer", self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        """Between steps."""
        self.read("between steps", index)


def read(strategy: str, options: dict[str, Any], reading: Reading) -> Seen:
    """Train for some steps."""
    module: Any = Task(model=Reader, steps=5).module()
    module.reading = reading
    try:
        fit(Subject(strategy, options=options), module.task, module=module)
    except UnsupportedError as error:
        return Seen(module.losses, module.norms, str(error))
    return Seen(module.losses, module.norms)

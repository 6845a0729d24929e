"""Jobs of manual optimization: steps that call forward, backward and optimizers in their own order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss

from nnx_conformance.checks.user_patterns.gradients import PipelineSplitBackward
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import fit


class Adversaries(Plain):
    """Two optimizers as Lightning documents them for a GAN: toggled, parts called, zeroed after the step."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer, scale in zip(self.optimizers(), (1.0, 0.5), strict=True):
            self.toggle_optimizer(optimizer)
            hidden = self.embed(batch[0])
            for block in self.blocks:
                hidden = block(hidden)
            loss = mse_loss(self.head(hidden).float(), batch[1]) * scale  # torch 2.11 takes no two dtypes
            self.record(loss)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        around = nn.ModuleList([self.embed, self.head])
        return [optim.SGD(self.blocks.parameters(), lr=0.1), optim.SGD(around.parameters(), lr=0.1)]


class PenaltyBefore(Plain):
    """Reads weights before the step whose loss depends on them, and accumulates by plain backwards."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__["penalty"] = sum(parameter.pow(2).sum() for parameter in self.parameters())

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch) + 0.1 * self.__dict__.pop("penalty")
        self.record(loss)
        loss.backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


class _NormalizedSGD(optim.SGD):
    """Divides by the norm of each gradient, and drops the gradients when it has stepped."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1.0)
        super().step()
        self.zero_grad()


class ZeroedByStep(Plain):
    """The optimizer drops gradients in its step, and nothing else does."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.loss(batch)
        self.record(loss)
        self.manual_backward(loss)
        self.optimizers().step()

    def configure_optimizers(self) -> Any:
        return _NormalizedSGD(self.parameters(), lr=0.1)


class Interleaved(PipelineSplitBackward):
    """Both gradients of a microbatch at once."""

    schedule = "Interleaved1F1B"


class LookingAgain(Plain):
    """Runs the forward once more between backward and step, and every third batch without either."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.record(loss)
        if index % 3 == 1:
            return
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.loss(batch)
        optimizer.step()
        self.record(self.loss(batch))


def train(strategy: str, options: dict[str, Any], model: type[Plain], **settings: Any) -> Outcome:
    """Train for a few steps; the notes say whether hooks were left on the module."""
    module = Task(model=model, steps=4, **settings).module()
    outcome = fit(Subject(strategy, options=options), module.task, module=module)
    outcome.notes["hooks"] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    return outcome

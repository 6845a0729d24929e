"""Optimizers that hooks make or put in the place of others, and training without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from nnx_conformance.habits import Habitual, Manual, chapter

habit = chapter()


class _Uncounted(Manual):
    """Trainer counts steps of the optimizers that it knows, of which there is none."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End after the task's steps."""
        self.trainer.should_stop = len(self.losses) >= self.task.steps


@habit()
class OptimizerMadeInAHook(_Uncounted):
    """An optimizer that `on_train_start` makes, where `configure_optimizers` returns None, trains."""

    own: Optimizer

    def configure_optimizers(self) -> Any:
        """Nothing."""
        return None

    def on_train_start(self) -> None:
        """Not in a state dict."""
        self.__dict__["own"] = AdamW(self.parameters(), lr=0.05)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """With the own one."""
        self.own.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        self.own.step()


@habit()
class OptimizerPerLayer(Manual):
    """Layers that `configure_optimizers` leaves to an optimizer of the module's own are trained."""

    own: Optimizer

    def configure_optimizers(self) -> Any:
        """Without the head."""
        return SGD([*self.embed.parameters(), *self.blocks.parameters()], lr=0.1)

    def on_train_start(self) -> None:
        """The head's."""
        self.__dict__["own"] = SGD(self.head.parameters(), lr=0.1)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """With both."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.own.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        optimizer.step()
        self.own.step()


@habit(steps=5)
class OptimizerExchanged(Habitual):
    """Another optimizer, put in place by `strategy.setup_optimizers(trainer)` while training, trains."""

    exchanged = False

    def configure_optimizers(self) -> Any:
        """SGD first."""
        return AdamW(self.parameters(), lr=0.05) if self.exchanged else SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """After two batches."""
        if batch_idx == 2:
            self.exchanged = True
            self.trainer.strategy.setup_optimizers(self.trainer)


@habit(steps=5)
class OptimizersAssigned(Habitual):
    """Optimizers that are assigned to `trainer.optimizers` while training are stepped from then on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """After two batches."""
        if batch_idx == 2:
            self.trainer.optimizers = [SGD(self.parameters(), lr=0.05, momentum=0.9)]


@habit()
class NoOptimizer(_Uncounted):
    """Weights that manual optimization moves without gradients or optimizer, as MeZO does, are right."""

    def configure_optimizers(self) -> Any:
        """Nothing."""
        return None

    @torch.no_grad()
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """The same direction on every rank."""
        self.recorded_loss(batch)
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * index + number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)

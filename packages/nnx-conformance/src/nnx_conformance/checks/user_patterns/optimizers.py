"""Hooks create or replace optimizers, or training runs without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from nnx_conformance.patterns import ManualPattern, UserPattern, shared_job

pattern = shared_job()


class _Uncounted(ManualPattern):
    """Ends the run by itself, because Trainer only counts steps of optimizers that it knows."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = len(self.losses) >= self.task.steps


@pattern()
class OptimizerCreatedInHook(_Uncounted):
    """An optimizer created in `on_train_start`, with `configure_optimizers` returning None, trains."""

    own: Optimizer

    def configure_optimizers(self) -> Any:
        return None

    def on_train_start(self) -> None:
        """Keep the optimizer out of the state dict."""
        self.__dict__["own"] = AdamW(self.parameters(), lr=0.05)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        self.own.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        self.own.step()


class _ZeroesInStep(SGD):
    """Drops the gradients that it has used, as hand-written optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


@pattern()
class GradientsZeroedInStep(ManualPattern):
    """An optimizer whose own `step` zeroes gradients trains without another `zero_grad`."""

    def configure_optimizers(self) -> Any:
        return _ZeroesInStep(self.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.recorded_loss(batch))
        optimizer.step()
        self.observe(sum(parameter.grad is not None for parameter in self.parameters()))


@pattern()
class OptimizerOutsideLightning(ManualPattern):
    """Layers that `configure_optimizers` leaves to a private optimizer of the module train."""

    own: Optimizer

    def configure_optimizers(self) -> Any:
        """Leave out the head."""
        return SGD([*self.embed.parameters(), *self.blocks.parameters()], lr=0.1)

    def on_train_start(self) -> None:
        self.__dict__["own"] = SGD(self.head.parameters(), lr=0.1)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Step both optimizers."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.own.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        optimizer.step()
        self.own.step()


@pattern(steps=5)
class OptimizerReplaced(UserPattern):
    """An optimizer that `strategy.setup_optimizers(trainer)` replaces during training trains."""

    exchanged = False

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.05) if self.exchanged else SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.exchanged = True
            self.trainer.strategy.setup_optimizers(self.trainer)


@pattern(steps=5)
class TrainerOptimizersAssigned(UserPattern):
    """Lightning steps optimizers that are assigned to `trainer.optimizers` during training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers = [SGD(self.parameters(), lr=0.05, momentum=0.9)]


@pattern()
class TrainingWithoutOptimizer(_Uncounted):
    """Manual optimization can update weights without gradients and optimizer, as MeZO does."""

    def configure_optimizers(self) -> Any:
        return None

    @torch.no_grad()
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Step in the same random direction on every rank."""
        self.recorded_loss(batch)
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * index + number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)

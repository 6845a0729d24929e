"""Gradients that no backward computes or completes, and steps of optimizers that are written by hand."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from nnx_conformance.habits import Habitual, Manual, chapter
from nnx_conformance.task import WIDTH
from nnx_core import load_from_checkpoint

habit = chapter()


@habit()
class GradientsByHand(Manual):
    """Gradients assigned to `p.grad` after a forward under `no_grad`, as in evolution strategies, train."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Toward smaller weights, in every second step without any forward."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with torch.no_grad():
            self.recorded_loss(batch)
            if index % 2:
                self.up(torch.ones(1, WIDTH))
        for number, parameter in enumerate(self.parameters()):
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) * (number % 3)
        optimizer.step()
        for parameter in self.parameters():
            parameter.grad = None


habit = chapter()


class _ByNorm(Optimizer):
    """Divides each gradient by the norm of its matrix."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, *, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Evaluate, and step."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / (parameter.grad.norm() + 0.1))
        return loss


@habit()
class ClosureByKeyword(Habitual):
    """An optimizer of whole matrices whose `step` takes its closure by keyword only trains."""

    def configure_optimizers(self) -> Any:
        """It."""
        return _ByNorm(self.parameters(), lr=0.05)


class _Lookahead(Optimizer):
    """Goes halfway back to the weights of two steps ago; does not call `Optimizer.__init__`."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of what is wrapped."""
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step what is wrapped, and every second time go back."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if "slow" not in self.state[parameter]:
                self.state[parameter]["slow"] = parameter.clone().detach()
        loss = self.base.step(closure)
        self.steps += 1
        for parameter in parameters if self.steps % 2 == 0 else ():
            slow = self.state[parameter]["slow"]
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)
        return loss


@habit()
class OptimizerThatWraps(Habitual):
    """An optimizer that wraps another, without `Optimizer.__init__`, as Lookahead is often copied, trains."""

    def configure_optimizers(self) -> Any:
        """It, around the plain one."""
        return _Lookahead(torch.optim.SGD(self.parameters(), lr=0.05))


habit = chapter()


@habit()
class CopiedStateDict(Habitual):
    """A module whose `state_dict` deep-copies is saved in hooks, with the weights of that moment."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A copy."""
        return copy.deepcopy(super().state_dict(*args, **kwargs))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save once, and look at what is in the file."""
        if batch_idx != 1:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(self.trainer.strategy.broadcast(folder), "saved.ckpt")
            self.trainer.save_checkpoint(path)
            saved = load_from_checkpoint(type(self), path, task=self.task)
            self.look(*(float(parameter.norm()) for parameter in saved.parameters()))
            self.trainer.strategy.barrier()


@habit()
class TracedLayers(Habitual):
    """Layers that torch.fx has traced train as in one process."""

    def build(self) -> None:
        """The first block, traced."""
        super().build()
        traced: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.traced = traced

    def loss(self, batch: list[Tensor]) -> Tensor:
        """With what it makes of the first layer's output."""
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return mse_loss(self.head(hidden + self.traced(hidden)), batch[1])

"""User code sets gradients without a backward, or writes the optimizer's step itself."""

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

from nnx_conformance.patterns import ManualPattern, UserPattern, shared_job
from nnx_conformance.task import WIDTH
from nnx_core import load_from_checkpoint

pattern = shared_job()


@pattern()
class GradientsSetWithoutBackward(ManualPattern):
    """Gradients assigned to `p.grad` after a forward under `no_grad` (evolution strategies) train."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Call the model in every second step only, and a single layer in the others."""
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


pattern = shared_job()


class _ByNorm(Optimizer):
    """Divides each gradient by the norm of its matrix."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, *, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / (parameter.grad.norm() + 0.1))
        return loss


@pattern()
class KeywordOnlyClosure(UserPattern):
    """An optimizer of full matrices whose `step` takes its closure only by keyword trains."""

    def configure_optimizers(self) -> Any:
        return _ByNorm(self.parameters(), lr=0.05)


class _Lookahead(Optimizer):
    """Returns halfway to the weights of two steps ago, and never calls `Optimizer.__init__`."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer, and interpolate in every second step."""
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


@pattern()
class WrapperOptimizer(UserPattern):
    """An optimizer that wraps another and skips `Optimizer.__init__`, like many Lookahead copies, trains."""

    def configure_optimizers(self) -> Any:
        return _Lookahead(torch.optim.SGD(self.parameters(), lr=0.05))


pattern = shared_job()


@pattern()
class DeepcopiedStateDict(UserPattern):
    """A module whose `state_dict` deep-copies can save in hooks, with the current weights."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return copy.deepcopy(super().state_dict(*args, **kwargs))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save once, and read the weights in the file."""
        if batch_idx != 1:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(self.trainer.strategy.broadcast(folder), "saved.ckpt")
            self.trainer.save_checkpoint(path)
            saved = load_from_checkpoint(type(self), path, task=self.task)
            self.observe(*(float(parameter.norm()) for parameter in saved.parameters()))
            self.trainer.strategy.barrier()


@pattern()
class FxTracedLayers(UserPattern):
    """Layers traced by torch.fx train as in one process."""

    def build(self) -> None:
        super().build()
        traced: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.traced = traced

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return mse_loss(self.head(hidden + self.traced(hidden)), batch[1])

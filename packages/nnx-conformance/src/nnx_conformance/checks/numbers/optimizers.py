"""Optimizers step as in one process: their kinds, groups and closures, also in manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, optim
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from nnx_conformance.check import Bench, check
from nnx_conformance.comparing import expect_parity
from nnx_conformance.task import Grouped, Plain, Task


@check()
def adamw(bench: Bench) -> None:
    """AdamW with weight decay steps as in one process."""
    expect_parity(bench, Task(model=_AdamW, steps=5))


@check()
def sgd_momentum(bench: Bench) -> None:
    """SGD with Nesterov momentum and weight decay steps as in one process."""
    expect_parity(bench, Task(model=_Momentum, steps=5))


@check("parameter_groups")
def parameter_groups(bench: Bench) -> None:
    """Every parameter group steps with its own learning rate, momentum and weight decay."""
    expect_parity(bench, Task(model=Grouped, steps=4))


@check("parameter_groups")
def parameter_groups_edited(bench: Bench) -> None:
    """Hyperparameters changed during training apply from the next step on."""
    expect_parity(bench, Task(model=_Edited, steps=4))


@check("parameter_groups", "added_parameter_groups")
def parameter_group_added(bench: Bench) -> None:
    """Parameters added to the optimizer during training are trained from then on."""
    expect_parity(bench, Task(model=_Growing, steps=4))


@check("repeated_closures")
def closure_called_twice(bench: Bench) -> None:
    """An optimizer may evaluate its closure twice in a step, at different weights."""
    expect_parity(bench, Task(model=_Extrapolated))


@check(full=True)
def elementwise_optimizers(bench: Bench) -> None:
    """Torch's elementwise optimizers step as in one process."""
    for kind in _ELEMENTWISE:
        expect_parity(bench, Task(model=kind, steps=4), what=kind.__name__)


class _Stepped(Plain):
    """Trains all its parameters with one optimizer class."""

    kind: ClassVar[type[Optimizer]]
    settings: ClassVar[dict[str, Any]]

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), **self.settings)


# A large `eps` prevents that the rounding of tiny gradients decides the direction of a step.


class _AdamW(_Stepped):
    kind, settings = optim.AdamW, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}


class _Momentum(_Stepped):
    kind, settings = optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}


class _Adagrad(_Stepped):
    kind, settings = optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}


class _Adadelta(_Stepped):
    kind, settings = optim.Adadelta, {"lr": 1.0, "eps": 1e-3}


class _Adamax(_Stepped):
    kind, settings = optim.Adamax, {"lr": 0.02, "eps": 1e-3}


class _ASGD(_Stepped):
    kind, settings = optim.ASGD, {"lr": 0.1}


class _NAdam(_Stepped):
    kind, settings = optim.NAdam, {"lr": 0.02, "eps": 1e-3}


class _RAdam(_Stepped):
    kind, settings = optim.RAdam, {"lr": 0.02, "eps": 1e-3}


class _RMSprop(_Stepped):
    kind, settings = optim.RMSprop, {"lr": 0.002, "eps": 1e-3, "momentum": 0.5}


_ELEMENTWISE = (_Adagrad, _Adadelta, _Adamax, _ASGD, _NAdam, _RAdam, _RMSprop)


class _Edited(Grouped):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Change the rate of one group and the decay of the other before the third batch."""
        if batch_idx == 2:
            blocks, around = self.trained_with().param_groups
            blocks["lr"] = 0.01
            around["weight_decay"] = 0.9


class _Growing(Grouped):
    def configure_optimizers(self) -> Any:
        """Optimize only the blocks."""
        return optim.SGD(self.groups()[:1], lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Add the other parameters before the third batch."""
        if batch_idx == 2:
            self.trained_with().add_param_group(self.groups()[1])


class _Extragradient(Optimizer):
    """Steps with the gradients at the point after a plain step, which takes two evaluations."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, evaluate again, return, and step with the new gradients."""
        if closure is None:
            raise TypeError("this optimizer needs a closure")
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        start = [(p, p.detach().clone()) for p, _ in self._trained()]
        for parameter, lr in self._trained():
            parameter.sub_(parameter.grad * lr)
        evaluate()
        for parameter, value in start:
            parameter.copy_(value)
        for parameter, lr in self._trained():
            parameter.sub_(parameter.grad * lr)
        return loss

    def _trained(self) -> Iterator[tuple[Any, float]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group["lr"]


class _Extrapolated(_Stepped):
    kind, settings = _Extragradient, {"lr": 0.1}


# Manual optimization: the module calls backward and step itself, with one optimizer or several.


@check("manual_optimization")
def manual_optimization(bench: Bench) -> None:
    """A module that calls backward, step and scheduler itself trains as in one process."""
    expect_parity(bench, Task(model=_Manual))


@check("manual_optimization")
def manual_closure(bench: Bench) -> None:
    """In manual optimization, a step accepts a closure that runs forward and backward."""
    expect_parity(bench, Task(model=_WithClosure))


@check("manual_optimization", "gradient_accumulation")
def manual_accumulation(bench: Bench) -> None:
    """Two calls of `manual_backward` before one step accumulate their gradients."""
    expect_parity(bench, Task(model=_Accumulating))


@check("manual_optimization", "gradient_accumulation")
def manual_accumulation_no_sync(bench: Bench) -> None:
    """Gradients accumulate when the first backward is inside the strategy's `block_backward_sync`."""
    expect_parity(bench, Task(model=_AccumulatingUnsynchronized))


@check("manual_optimization")
def forward_without_backward(bench: Bench) -> None:
    """A forward without a backward changes nothing, even with a step after it."""
    expect_parity(bench, Task(model=_LookingOnly))


@check("manual_optimization", "clip_by_norm")
def manual_clipping(bench: Bench) -> None:
    """`clip_gradients` in manual optimization clips by the norm over all ranks."""
    expect_parity(bench, Task(model=_Clipping))


@check("manual_optimization", "multiple_optimizers")
def several_optimizers(bench: Bench) -> None:
    """Two optimizers of different kinds with a loss each train as in one process."""
    expect_parity(bench, Task(model=_Several, steps=6))  # Lightning counts the steps of both optimizers


@check("manual_optimization", "multiple_optimizers", "clip_by_norm")
def several_optimizers_clipped(bench: Bench) -> None:
    """Each of two optimizers is clipped by the norm of its own parameters' gradients."""
    expect_parity(bench, Task(model=_SeveralClipped, steps=4))


@check("manual_optimization", "multiple_optimizers", "unused_parameters")
def several_optimizers_toggled(bench: Bench) -> None:
    """`toggle_optimizer` keeps the other optimizer's parameters out of a step."""
    expect_parity(bench, Task(model=_Toggled, steps=6))


@check("manual_optimization", "multiple_optimizers")
def submodules_called_directly(bench: Bench) -> None:
    """A step may call submodules instead of the module, and again after a backward."""
    expect_parity(bench, Task(model=_CallingParts, steps=4))


class _Manual(Plain):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Do by hand as Lightning does."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()

    def recorded_loss(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.record(loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return SGD with a decaying rate."""
        optimizer = super().configure_optimizers()
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class _WithClosure(_Manual):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Let the optimizer run the closure."""
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.recorded_loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class _LookingOnly(_Manual):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Evaluate the loss once more before the step, and skip every third backward."""
        optimizer: Any = self.optimizers()
        loss = self.recorded_loss(batch)
        if index % 3 == 1:
            return
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.recorded_loss(batch)
        optimizer.step()


class _Clipping(_Manual):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class _Accumulating(_Manual):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Step after every second batch."""
        optimizer: Any = self.optimizers()
        is_last = index % 2 == 1
        if not is_last:
            optimizer.zero_grad()
        with self.synchronization(wanted=is_last):
            self.manual_backward(self.recorded_loss(batch) / 2)
        if is_last:
            optimizer.step()

    def synchronization(self, *, wanted: bool) -> AbstractContextManager[Any]:
        """Return a context for forward and backward; the default keeps every synchronization."""
        return nullcontext()


class _AccumulatingUnsynchronized(_Accumulating):
    def synchronization(self, *, wanted: bool) -> AbstractContextManager[Any]:
        """Skip the synchronization of all but the last backward, if the strategy supports it."""
        block: Callable[[], AbstractContextManager[Any]] | None
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if wanted or block is None else block()


class _Several(_Manual):
    """Has two optimizers, each with its own loss over the full model."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        both: Any = self.optimizers()
        for optimizer, scale in zip(both, (1.0, 0.5), strict=True):
            for each in both:  # the loss reaches the parameters of both optimizers
                each.zero_grad()
            self.manual_backward(self.recorded_loss(batch) * scale)
            self.prepare(optimizer)
            optimizer.step()

    def prepare(self, optimizer: Any) -> None:
        """Prepare the gradients between backward and step."""

    def configure_optimizers(self) -> Any:
        """Return AdamW for the blocks and SGD for the other layers."""
        around = [*self.embed.parameters(), *self.head.parameters()]
        first = optim.AdamW(self.blocks.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)
        return [first, optim.SGD(around, lr=0.1)]


class _SeveralClipped(_Several):
    def prepare(self, optimizer: Any) -> None:
        """Clip the parameters of this optimizer."""
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        """Return SGD for both, whose updates show the norm."""
        around = [*self.embed.parameters(), *self.head.parameters()]
        return [optim.SGD(self.blocks.parameters(), lr=0.1), optim.SGD(around, lr=0.1)]


class _Toggled(_Several):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Step each optimizer while the other's parameters need no gradient."""
        both: Any = self.optimizers()
        for optimizer, scale in zip(both, (1.0, 0.5), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.recorded_loss(batch) * scale)
            optimizer.step()
            optimizer.zero_grad()  # its own gradients only, so that stray ones stay visible
            self.untoggle_optimizer(optimizer)


class _CallingParts(_Several):
    """Calls submodules, as a GAN calls its generator and its discriminator."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Compute the module's output without calling the module."""
        return mse_loss(type(self).forward(self, batch[0]).to(batch[1].dtype), batch[1])

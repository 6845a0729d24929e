"""Optimizers step as in one process: their kinds, their parameter groups, their closures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from nnx_conformance.check import Bench, check, expect_parity
from nnx_conformance.task import Plain, Task

__all__ = ["Grouped"]


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
    """Every parameter group is stepped with its own learning rate, momentum and weight decay."""
    expect_parity(bench, Task(model=Grouped, steps=4))


@check("parameter_groups")
def parameter_groups_edited(bench: Bench) -> None:
    """Hyper-parameters of a group that are changed during training count from the next step on."""
    expect_parity(bench, Task(model=_Edited, steps=4))


@check("parameter_groups", "added_parameter_groups")
def parameter_group_added(bench: Bench) -> None:
    """Parameters that are added to the optimizer during training are trained from then on."""
    expect_parity(bench, Task(model=_Growing, steps=4))


@check("repeated_closures")
def closure_called_twice(bench: Bench) -> None:
    """An optimizer may evaluate its closure twice in a step, at other weights."""
    expect_parity(bench, Task(model=_Extrapolated))


@check(full=True)
def elementwise_optimizers(bench: Bench) -> None:
    """Torch's optimizers that treat each element by itself step as in one process."""
    for kind in _ELEMENTWISE:
        expect_parity(bench, Task(model=kind, steps=4), what=kind.__name__)


# --- modules ------------------------------------------------------------------------------------


class _AdamW(Plain):
    """Its `eps` keeps what rounding does to the smallest gradients from deciding the step's direction."""

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


class _Momentum(Plain):
    def configure_optimizers(self) -> Any:
        """SGD with all that it has."""
        return optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02)


class Grouped(Plain):
    """Two groups that differ in everything."""

    def groups(self) -> list[dict[str, Any]]:
        """The blocks, and what is around them."""
        around = [*self.embed.parameters(), *self.head.parameters()]
        return [
            {"params": list(self.blocks.parameters())},
            {"params": around, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.2},
        ]

    def configure_optimizers(self) -> Any:
        """Stochastic gradient descent."""
        return optim.SGD(self.groups(), lr=0.1)

    def trained_with(self) -> Optimizer:
        """The optimizer while it trains."""
        optimizer: Optimizer = self.trainer.optimizers[0]
        return optimizer


class _Edited(Grouped):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the third batch: another rate for the one group, another decay for the other."""
        if batch_idx == 2:
            blocks, around = self.trained_with().param_groups
            blocks["lr"] = 0.01
            around["weight_decay"] = 0.9


class _Growing(Grouped):
    def configure_optimizers(self) -> Any:
        """Only over the blocks."""
        return optim.SGD(self.groups()[:1], lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the third batch: the rest as well."""
        if batch_idx == 2:
            self.trained_with().add_param_group(self.groups()[1])


class _Extragradient(Optimizer):
    """Steps with the gradients of where plain descent would go, which takes two evaluations."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Go there, look again, come back, and step."""
        if closure is None:
            raise TypeError("it needs a closure")
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


class _Extrapolated(Plain):
    def configure_optimizers(self) -> Any:
        """One that calls its closure twice."""
        return _Extragradient(self.parameters(), lr=0.1)


# Settings that keep a rounded gradient near zero from deciding the direction of a whole step.


class _Adagrad(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)


class _Adadelta(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.Adadelta(self.parameters(), lr=1.0, eps=1e-3)


class _Adamax(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.Adamax(self.parameters(), lr=0.02, eps=1e-3)


class _ASGD(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.ASGD(self.parameters(), lr=0.1)


class _NAdam(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.NAdam(self.parameters(), lr=0.02, eps=1e-3)


class _RAdam(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.RAdam(self.parameters(), lr=0.02, eps=1e-3)


class _RMSprop(Plain):
    def configure_optimizers(self) -> Any:
        """As named."""
        return optim.RMSprop(self.parameters(), lr=0.002, eps=1e-3, momentum=0.5)


_ELEMENTWISE = (_Adagrad, _Adadelta, _Adamax, _ASGD, _NAdam, _RAdam, _RMSprop)

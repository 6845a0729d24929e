"""Jobs of user code that reads and writes weights and gradients, and attaches attributes to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrize, prune

from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import fit
from nnx_core.errors import UnsupportedError


class Habits(Plain):
    """A model with plain SGD, so that the scale of every gradient shows."""

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


class Attached(Habits):
    """Hooks, an attribute and a list made in ``__init__``; a penalty that goes by them."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.head.weight.decay = 0.3
        self.listed = [self.head.weight, next(self.blocks.parameters())]
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.head.bias.register_post_accumulate_grad_hook(_halve)

    def loss(self, batch: list[Tensor]) -> Tensor:
        decayed = [p for p in self.parameters() if hasattr(p, "decay")]
        penalty = sum(p.decay * p.pow(2).sum() for p in decayed) + sum(p.abs().sum() for p in self.listed)
        assert len(decayed) == 1
        return super().loss(batch) * (1 + float(self.head.weight.norm())) + 0.01 * penalty


def _halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Written(Habits):
    """Weights and gradients written in every way, read back as one process would."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        weight = self.head.weight
        if index == 0:
            self.old = weight.data
            weight.data = weight.data * 0.5 + torch.ones_like(weight) * 0.01
            self.record(self.old.sum() - weight.sum())
        if index == 1:
            with torch.no_grad():
                nn.init.orthogonal_(weight)
                weight.copy_(torch.full(tuple(weight.shape), 0.02))
                weight[0] = 0.1
                weight.view(-1)[3] = 0.3
            weight.detach().numpy()[1] = 0.2
            prune.l1_unstructured(self.head, "weight", 0.4)
        if index == 2:
            prune.remove(self.head, "weight")
            parametrize.register_parametrization(self.head, "weight", nn.Identity())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        bias = self.head.bias
        bias.grad[0] = 0
        bias.grad = bias.grad + torch.ones_like(bias) * 0.01
        self.embed.bias.grad.numpy()[0] = 0.02
        self.record(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3))


class Differentiated(Habits):
    """A gradient penalty, and a gradient with respect to a weight."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = self(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = mse_loss(outputs, batch[1])
        (own,) = torch.autograd.grad(loss, self.head.weight, retain_graph=True)
        assert own.shape == self.head.weight.shape
        return loss + 0.1 * slope.pow(2).sum(1).mean()


class Surgeon(Habits):
    """Makes its gradients itself, of this rank's samples."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


class Remembering(Habits):
    """Reads the optimizer's state."""

    def on_train_batch_end(self, *_: Any) -> None:
        list(self.trainer.optimizers[0].state.values())


def refused(strategy: str, options: dict[str, Any], model: Any) -> str:
    """The error that a run ends with, on this rank."""
    try:
        train(strategy, options, model)
    except UnsupportedError as error:
        return str(error)
    return "it trained"


def train(strategy: str, options: dict[str, Any], model: Any) -> Outcome:
    """Train a model with a user pattern for four steps."""
    module = Task(model=model, steps=4).module()
    return fit(Subject(strategy, options=options), module.task, module=module)

"""One run of a stage's microbatches."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nnx_core.errors import UnsupportedError
from nnx_nnscaler._torch_compat import stage_backward_input, stage_backward_weight
from nnx_nnscaler.pipeline.call import Call, can_split
from nnx_nnscaler.pipeline.messages import refuse_second_derivative
from nnx_nnscaler.plan.schedules import BACKWARD, FORWARD, WEIGHTS, Action

_SPLIT = ("zero_bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of inputs and of weights apart."""


# The loss is then inside of the stages. A forward that returns its loss, as those of Hugging Face do, is run
# forward and backward at once: gradients are kept beside the parameters until the user's backward reaches the
# loss, and then multiplied by its gradient.


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known, times a scale: its own gradient takes the place of that."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: list[Tensor | None], scale: float, *weights: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        if ctx.gradients is None:
            raise UnsupportedError(
                "a second backward goes through one forward of a pipeline, whose gradients were used up.",
                remedy="Add the losses and call backward once, or use pipeline_scheduler='gpipe'.",
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient.double() / ctx.scale
        return None, None, None, *(None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)


class _BesideLoss(torch.autograd.Function):
    """Another result, whose gradient would come too late."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise UnsupportedError(
            "a gradient goes into a result of the forward that is not its loss, when the backward pass of "
            "the pipeline is over.",
            remedy="Compute all of the loss in the forward, or use pipeline_scheduler='gpipe'.",
        )


class Turns:
    """One call of a pipeline on one rank, forward and backward in turns.

    Args:
        call: The call.
        microbatches: The values of each microbatch, which what stages give is added to.
        loss: The name of the loss.
        schedule: The name of the schedule.
        keeps: Names of the values that the forward returns; others are freed once they are not needed.
        scale: The factor of the loss in the backward.
    """

    def __init__(
        self,
        call: Call,
        microbatches: list[dict[str, Tensor]],
        loss: str,
        schedule: str,
        *,
        keeps: frozenset[str],
        scale: float,
    ) -> None:
        self._call = call
        self._values = microbatches
        self._loss = loss
        self._keeps = keeps
        self._scale = scale
        self._splits = schedule in _SPLIT
        split = call.own if self._splits else ()
        self._whole = {stage.number for stage in split if not can_split(stage, call.flows)}
        names = {fqn: None for stage in call.own for fqn in stage.graph.parameters.values()}
        self._weights = {fqn: call.weights[fqn] for fqn in names}
        self._leaves = {
            fqn: weight.detach().requires_grad_(weight.requires_grad) for fqn, weight in self._weights.items()
        }
        self._trained = {
            stage.number: [
                self._leaves[fqn]
                for fqn in dict.fromkeys(stage.graph.parameters.values())
                if self._leaves[fqn].requires_grad
            ]
            for stage in call.own
        }
        self._used: Any = ChainMap(self._leaves, call.weights)  # type: ignore[arg-type] # it is only read
        self._given: dict[tuple[int, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self._gradients: dict[tuple[int, str], Tensor] = {}
        self._later: dict[tuple[int, int], Any] = {}

    def run(self, own: Sequence[Action]) -> None:
        """Do all that the schedule says."""
        device = self._call.runtime.device.type
        for passage in (self._call.between, self._call.passage):
            passage.begin_backward([self._loss])
        for kind, number, index in own:
            if kind == FORWARD:
                with torch.enable_grad():
                    self._forward(number, index)
            else:
                with torch.autocast(device, enabled=False):
                    self._backward(kind, number, index)

    def _forward(self, number: int, index: int) -> None:
        call, values = self._call, self._values[index]
        stage = call.lineup.stages[number]
        call.receive(stage, index, values)
        flowing = call.flows.intersection(stage.arguments)
        leaves = {name: values[name].detach().requires_grad_() for name in flowing}
        arguments = [leaves.get(name, values[name]) for name in stage.arguments]
        with call.measured(FORWARD, number, index):
            given = call.compute(stage, self._used, arguments)
            if self._splits and number not in self._whole:
                given = [value.clone() for value in given]  # torch detaches them in place, and views refuse
        made = dict(zip(stage.gives, given, strict=True))
        values |= {name: value.detach() for name, value in made.items()}
        self._given[number, index] = leaves, made
        call.send(stage, index, values)

    def _backward(self, kind: str, number: int, index: int) -> None:
        stage = self._call.lineup.stages[number]
        if kind == WEIGHTS:
            self._finish(number, index)
            return
        leaves, made = self._given.pop((number, index))
        incoming = self._call.receive_gradients(stage, index)
        outputs, gradients = [], []
        for name, value in made.items():
            gradient = self._gradients.pop((index, name), None)
            for other in incoming.get(name, ()):
                gradient = other if gradient is None else gradient + other
            if name == self._loss:
                own = torch.full_like(value, self._scale)
                gradient = own if gradient is None else gradient + own
            if gradient is not None and value.requires_grad:
                outputs.append(value)
                gradients.append(gradient)
        if outputs:
            with self._call.measured(kind, number, index):
                self._differentiate(kind, (number, index), leaves, outputs, gradients)
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                known = self._gradients.get((index, name))
                self._gradients[index, name] = leaf.grad if known is None else known + leaf.grad
        self._call.send_gradients(stage, index, self._gradients)
        self._free(number, index)

    def _free(self, number: int, index: int) -> None:
        """Let go of what the microbatch does not need any more: backward has come to this stage."""
        later = {name for stage in self._call.own if stage.number < number for name in stage.arguments}
        values, stage = self._values[index], self._call.lineup.stages[number]
        for name in (*stage.arguments, *stage.gives):
            if name not in later and name not in self._keeps:
                values.pop(name, None)

    def _differentiate(
        self,
        kind: str,
        key: tuple[int, int],
        leaves: Mapping[str, Tensor],
        outputs: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        if kind == BACKWARD or key[0] in self._whole:
            torch.autograd.backward(outputs, gradients)
        elif not leaves:
            self._later[key] = outputs, gradients
        else:
            weights: Any = iter(self._trained[key[0]])
            _, groups = stage_backward_input(outputs, gradients, list(leaves.values()), weights)
            self._later[key] = groups

    def _finish(self, number: int, index: int) -> None:
        """The gradients of weights that were left for later."""
        left = self._later.pop((number, index), None)
        with self._call.measured(WEIGHTS, number, index):
            if isinstance(left, tuple):
                torch.autograd.backward(*left)
            elif left:
                weights: Any = iter(self._trained[number])
                stage_backward_weight(weights, left)

    def results(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results that depend on parameters, as the user's code may differentiate them."""
        token = self._call.passage.token
        gradients = [torch.zeros_like(token), *(leaf.grad for leaf in self._leaves.values())]
        weights = (token, *self._weights.values())
        loss: Tensor = _Loss.apply(values[self._loss], gradients, self._scale, *weights)  # type: ignore[no-untyped-call]
        found = {name: _BesideLoss.apply(value, loss) for name, value in values.items()}  # type: ignore[no-untyped-call]
        return {**found, self._loss: loss}

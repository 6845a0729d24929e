"""Run the microbatches of a pipeline on one rank, forward and backward interleaved by a schedule.

The loss is computed inside of the stages. A forward that returns its loss, as those of Hugging Face do, runs
forward and backward at once. The gradients wait beside the parameters until the user's backward reaches the
loss, and are then multiplied by the gradient of the loss.
"""

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
"""Schedules that compute the gradients of inputs and of weights in separate actions."""


class _Loss(torch.autograd.Function):
    """A loss whose gradients, times a scale, are known; backward multiplies them by its own gradient."""

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
        # Scaled in place, which saves the memory of a second set of gradients.
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient.double() / ctx.scale
        return None, None, None, *(None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)


class _BesideLoss(torch.autograd.Function):
    """Another result of the forward, which refuses a gradient: the stages have run their backward."""

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
    """One call of a pipeline on one rank, forward and backward interleaved.

    Args:
        call: The call.
        microbatches: The values of each microbatch, to which the stages add their outputs.
        loss: The name of the loss.
        schedule: The name of the schedule.
        keeps: The names of the values that the forward returns; others are freed after their last use.
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
        # Stages that torch's split backward would differentiate wrongly; they compute both kinds at once.
        self._unsplit = {stage.number for stage in split if not can_split(stage, call.flows)}
        names = {fqn: None for stage in call.own for fqn in stage.graph.parameters.values()}
        self._weights = {fqn: call.weights[fqn] for fqn in names}
        # Leaves of their own: the parameters get gradients only in the user's backward, through `_Loss`.
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
        """Run all actions of this rank in the order of the schedule."""
        device = self._call.runtime.device.type
        # Both passages return gradients of the loss only: other results refuse theirs.
        for passage in (self._call.between, self._call.passage):
            passage.begin_backward([self._loss])
        for kind, number, index in own:
            if kind == FORWARD:
                with torch.enable_grad():
                    self._forward(number, index)
            else:
                # The forward may run under autocast, but backward must not, as in a plain loop.
                with torch.autocast(device, enabled=False):
                    self._backward(kind, number, index)

    def _forward(self, number: int, index: int) -> None:
        call, values = self._call, self._values[index]
        stage = call.lineup.stages[number]
        call.receive(stage, index, values)
        flowing = call.flows.intersection(stage.arguments)
        # A graph of its own for each stage and microbatch, so that the schedule can run each backward alone.
        leaves = {name: values[name].detach().requires_grad_() for name in flowing}
        arguments = [leaves.get(name, values[name]) for name in stage.arguments]
        with call.measured(FORWARD, number, index):
            given = call.compute(stage, self._used, arguments)
            # `stage_backward_input` detaches outputs in place, which torch refuses for views.
            if self._splits and number not in self._unsplit:
                given = [value.clone() for value in given]
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
        # A value has gradients from later stages of this rank, from other ranks, and as the loss itself.
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
        """Free the values of a microbatch after the backward of a stage."""
        # Earlier stages of this rank run their backward later, and may still need their arguments.
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
        if kind == BACKWARD or key[0] in self._unsplit:
            torch.autograd.backward(outputs, gradients)
        elif not leaves:
            # No input needs a gradient, so all of the backward waits for the action of the weights.
            self._later[key] = outputs, gradients
        else:
            weights: Any = iter(self._trained[key[0]])
            _, groups = stage_backward_input(outputs, gradients, list(leaves.values()), weights)
            self._later[key] = groups

    def _finish(self, number: int, index: int) -> None:
        """Compute the gradients of weights that the action of the inputs left."""
        left = self._later.pop((number, index), None)
        with self._call.measured(WEIGHTS, number, index):
            if isinstance(left, tuple):
                torch.autograd.backward(*left)
            elif left:
                weights: Any = iter(self._trained[number])
                stage_backward_weight(weights, left)

    def results(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results that depend on parameters, as tensors that the user's code may differentiate."""
        # Backward goes through the token to the messages that return gradients of borrowed weights.
        token = self._call.passage.token
        gradients = [torch.zeros_like(token), *(leaf.grad for leaf in self._leaves.values())]
        weights = (token, *self._weights.values())
        loss: Tensor = _Loss.apply(values[self._loss], gradients, self._scale, *weights)  # type: ignore[no-untyped-call]
        found = {name: _BesideLoss.apply(value, loss) for name, value in values.items()}  # type: ignore[no-untyped-call]
        return {**found, self._loss: loss}

"""Exchange messages between stages: values forward, gradients back, in the order of autograd.

Each stage's call on a microbatch is ordinary code for autograd. Functions between stages send values in
forward and receive their gradients in backward, or the other way round. Autograd runs the last recorded
function first. So every rank runs its stages and microbatches backward in the reverse order, and the messages
match. A *token* passes through every send of a rank: so backward reaches a rank whose values the loss does
not use. If the loss depends on some results only, values behind the other results have no gradient, as in one
process. All ranks derive this from the graph, and send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nnx_core._torch_compat import when_backward_ends
from nnx_core.agree.announced_waits import wait_for_collective
from nnx_core.errors import UnsupportedError

RETURNING = 1 << 30
"""The offset of the tags of messages in backward."""


class Look(NamedTuple):
    """The description of a tensor that another rank sends.

    Attributes:
        shape: The shape.
        dtype: The dtype.
        flows: True if a gradient goes back to the sender.
        name: The name of the value in the graph.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    flows: bool
    name: str = ""


class Line:
    """Messages between the ranks along a pipe.

    Args:
        group: The ranks along the pipe; None if there is only one.
        device: The device of received tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> None:
        """Start to send tensors, without waiting.

        Args:
            tensors: The tensors, in the order in which they are received.
            to: The index of the receiver along the pipe.
            tag: The first of the messages' tags; each tensor has the next one.
        """
        for number, tensor in enumerate(tensors):
            whole = tensor.detach().contiguous()
            # The list keeps the tensor alive: `isend` reads its memory after this function has returned.
            work = dist.isend(whole, group=self.group, group_dst=to, tag=tag + number)
            if work is not None:
                self._sent.append((work, whole))

    def receive(self, looks: Sequence[Look], source: int, tag: int) -> list[Tensor]:
        """Receive tensors, and wait for them.

        Args:
            looks: The descriptions of the tensors.
            source: The index of the sender along the pipe.
            tag: The first tag that the sender used.
        """
        # All receives start before the first wait, so that the messages overlap.
        tensors = [torch.empty(look.shape, dtype=look.dtype, device=self.device) for look in looks]
        works = [
            dist.irecv(tensor, group=self.group, group_src=source, tag=tag + number)
            for number, tensor in enumerate(tensors)
        ]
        for work in works:
            if work is not None:
                wait_for_collective(work, "a message of another stage")
        return tensors

    def settle(self) -> None:
        """Wait until all sent tensors have arrived."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            wait_for_collective(work, "another stage to receive a message")


def refuse_second_derivative() -> None:
    """Refuse a backward that records gradients, because messages have no second derivative.

    Raises:
        UnsupportedError: Gradients are recorded.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a second derivative is taken through the stages of a pipeline.",
            remedy="Use strategy 'nnscaler_dp', under which every rank computes the complete forward.",
        )


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passage: Passage, to: int, tag: int, looks: Sequence[Look], token: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.passage, ctx.to, ctx.tag, ctx.looks = passage, to, tag, looks
        sent = [tensor.to(look.dtype) for tensor, look in zip(tensors, looks, strict=True)]
        passage.line.send(sent, to, tag)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        returning = [ctx.passage.returns(look) for look in ctx.looks]
        looks = [look for look, returns in zip(ctx.looks, returning, strict=True) if returns]
        found = iter(ctx.passage.line.receive(looks, ctx.to, ctx.tag + RETURNING))
        gradients = [next(found) if returns else None for returns in returning]
        return None, None, None, None, gradient, *gradients


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passage: Passage, source: int, tag: int, looks: Sequence[Look], token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.passage, ctx.source, ctx.tag, ctx.looks = passage, source, tag, looks
        tensors = passage.line.receive(looks, source, tag)
        ctx.mark_non_differentiable(
            *(tensor for tensor, look in zip(tensors, looks, strict=True) if not look.flows)
        )
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        line: Line = ctx.passage.line
        returning = [
            gradient.to(look.dtype)
            for gradient, look in zip(gradients, ctx.looks, strict=True)
            if ctx.passage.returns(look)
        ]
        line.send(returning, ctx.source, ctx.tag + RETURNING)
        when_backward_ends(line.settle)
        return None, None, None, None, None


class _Share(torch.autograd.Function):
    """Broadcasts results along the pipe. Each rank has the loss, so no gradient needs a message."""

    @staticmethod
    def forward(
        ctx: Any,
        passage: Passage,
        homes: Sequence[int],
        looks: Sequence[Look],
        token: Tensor,
        *own: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.passage, ctx.looks, ctx.own = passage, looks, [value is not None for value in own]
        shared = [
            _shared(passage.line, home, look, value)
            for home, look, value in zip(homes, looks, own, strict=True)
        ]
        ctx.mark_non_differentiable(
            *(tensor for tensor, look in zip(shared, looks, strict=True) if not look.flows)
        )
        ctx.save_for_backward(token)
        return tuple(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        (token,) = ctx.saved_tensors
        ctx.passage.begin_backward(
            look.name for look, gradient in zip(ctx.looks, gradients, strict=True) if gradient is not None
        )
        # No collective: every rank has the loss, so each computes the gradients of its own values.
        own = [gradient if mine else None for gradient, mine in zip(gradients, ctx.own, strict=True)]
        return None, None, None, torch.zeros_like(token), *own


def _shared(line: Line, home: int, look: Look, value: Tensor | None) -> Tensor:
    if value is not None:
        tensor = value.detach().to(look.dtype).clone(memory_format=torch.contiguous_format)
    else:
        tensor = torch.empty(look.shape, dtype=look.dtype, device=line.device)
    if line.group is not None:
        dist.broadcast(tensor, group=line.group, group_src=home)
    return tensor


class Passage:
    """The messages of one call of a pipeline on one rank.

    Args:
        line: The messages' ranks.
        reached: A function from results with gradients to the values with gradients.
        records: True if gradients go back the same way.
    """

    def __init__(
        self, line: Line, reached: Callable[[frozenset[str]], frozenset[str]], *, records: bool
    ) -> None:
        self.line = line
        self._reached = reached
        self._with_gradients: frozenset[str] = frozenset()
        self._start: Tensor | None = None
        # A leaf that requires a gradient, so that autograd records sends even of tensors without one.
        if records:
            self._start = torch.zeros((), device=line.device, requires_grad=True)
        self._token = self._start

    @property
    def token(self) -> Tensor:
        """The token that all sends pass through."""
        assert self._token is not None, "no gradients are recorded"
        return self._token

    def end_forward(self) -> None:
        """Drop the token, because a reference cycle through it would be freed late."""
        self._start = self._token = None

    def begin_backward(self, results: Iterable[str]) -> None:
        """Note the results that the loss depends on; they are the same on every rank."""
        self._with_gradients = self._reached(frozenset(results))

    def returns(self, look: Look) -> bool:
        """Return True if the gradient of a value goes back to its sender."""
        return look.flows and look.name in self._with_gradients

    def send(self, tensors: Sequence[Tensor], looks: Sequence[Look], to: int, tag: int) -> None:
        """Send values to another rank; backward receives their gradients."""
        if self._token is None:
            sent = [tensor.to(look.dtype) for tensor, look in zip(tensors, looks, strict=True)]
            self.line.send(sent, to, tag)
        else:
            self._token = _Send.apply(self, to, tag, looks, self._token, *tensors)  # type: ignore[no-untyped-call]

    def receive(self, looks: Sequence[Look], source: int, tag: int) -> Sequence[Tensor]:
        """Receive values from another rank; backward returns their gradients."""
        if self._start is None or not any(look.flows for look in looks):
            return self.line.receive(looks, source, tag)
        found: tuple[Tensor, ...] = _Receive.apply(self, source, tag, looks, self._start)  # type: ignore[no-untyped-call]
        return found

    def share(
        self, own: Sequence[Tensor | None], looks: Sequence[Look], homes: Sequence[int]
    ) -> Sequence[Tensor]:
        """Broadcast the ranks' values to all ranks, and wait for all sent tensors.

        Args:
            own: The values of this rank; None for those of others.
            looks: The descriptions of all values.
            homes: The index along the pipe of the rank that has each value.
        """
        if self._token is None:
            shared: Sequence[Tensor] = [
                _shared(self.line, home, look, value)
                for home, look, value in zip(homes, looks, own, strict=True)
            ]
        else:
            shared = _Share.apply(self, homes, looks, self._token, *own)  # type: ignore[no-untyped-call]
        self.line.settle()
        return shared

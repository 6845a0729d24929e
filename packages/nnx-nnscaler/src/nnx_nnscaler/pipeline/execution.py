"""What passes between stages: values forward, gradients back, in an order that autograd keeps by itself.

A stage's call on a microbatch is ordinary code for autograd. Between stages stand functions that send values
in the forward pass and receive their gradients in the backward pass, or the other way round. Autograd runs
what was recorded last first, so every rank goes back through its stages and microbatches in the reverse
order, and the messages meet. A *token* runs through all that a rank sends: a rank that has no part of the
loss still goes back through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from nnx_checkpoint.collective import wait_for_collective
from nnx_core.errors import UnsupportedError

BACKWARD = 1 << 30
"""Added to the tag of what goes back."""


class Look(NamedTuple):
    """A tensor that another rank sends.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        flows: True if a gradient goes back to the sender.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    flows: bool


class Line:
    """Messages between the ranks along a pipe.

    Args:
        group: They; None if there is only one.
        device: The device of what is received.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> None:
        """Begin to send tensors; who sends goes on at once.

        Args:
            tensors: They, in the order in which they are received.
            to: The place of the receiver along the pipe.
            tag: Tells what is sent from other messages, with as many numbers above it as there are tensors.
        """
        for number, tensor in enumerate(tensors):
            whole = tensor.detach().contiguous()
            work = dist.isend(whole, group=self.group, group_dst=to, tag=tag + number)
            if work is not None:
                self._sent.append((work, whole))

    def receive(self, looks: Sequence[Look], source: int, tag: int) -> list[Tensor]:
        """Wait for tensors.

        Args:
            looks: Their looks.
            source: The place of the sender along the pipe.
            tag: The sender's.
        """
        tensors = [torch.empty(look.shape, dtype=look.dtype, device=self.device) for look in looks]
        works = [
            dist.irecv(tensor, group=self.group, group_src=source, tag=tag + number)
            for number, tensor in enumerate(tensors)
        ]
        for work in works:
            if work is not None:
                wait_for_collective(work)
        return tensors

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            wait_for_collective(work)


def refuse_second_derivative() -> None:
    """Raise where gradients are recorded in a backward pass.

    Raises:
        UnsupportedError: They are.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a second derivative is taken through the stages of a pipeline.",
            remedy="Use strategy 'nnscaler_dp', under which every rank computes the whole forward.",
        )


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, line: Line, to: int, tag: int, looks: Sequence[Look], token: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.line, ctx.to, ctx.tag, ctx.looks = line, to, tag, looks
        line.send([_as(tensor, look) for tensor, look in zip(tensors, looks, strict=True)], to, tag)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        flowing = [look for look in ctx.looks if look.flows]
        found = iter(ctx.line.receive(flowing, ctx.to, ctx.tag + BACKWARD))
        gradients = [next(found) if look.flows else None for look in ctx.looks]
        return None, None, None, None, gradient, *gradients


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, line: Line, source: int, tag: int, looks: Sequence[Look], token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.line, ctx.source, ctx.tag, ctx.looks = line, source, tag, looks
        tensors = line.receive(looks, source, tag)
        ctx.mark_non_differentiable(
            *(tensor for tensor, look in zip(tensors, looks, strict=True) if not look.flows)
        )
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        flowing = [
            _as(gradient, look) for gradient, look in zip(gradients, ctx.looks, strict=True) if look.flows
        ]
        ctx.line.send(flowing, ctx.source, ctx.tag + BACKWARD)
        Variable._execution_engine.queue_callback(ctx.line.settle)
        return None, None, None, None, None


class _Share(torch.autograd.Function):
    """Values of some ranks, given to all along the pipe; each rank has the loss, so each has its gradient."""

    @staticmethod
    def forward(
        ctx: Any, line: Line, homes: Sequence[int], looks: Sequence[Look], token: Tensor, *own: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.own = [value is not None for value in own]
        shared = [
            _shared(line, home, look, value) for home, look, value in zip(homes, looks, own, strict=True)
        ]
        ctx.mark_non_differentiable(
            *(tensor for tensor, look in zip(shared, looks, strict=True) if not look.flows)
        )
        ctx.save_for_backward(token)
        return tuple(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        (token,) = ctx.saved_tensors
        own = [gradient if mine else None for gradient, mine in zip(gradients, ctx.own, strict=True)]
        return None, None, None, torch.zeros_like(token), *own


def _shared(line: Line, home: int, look: Look, value: Tensor | None) -> Tensor:
    if value is not None:
        tensor = _as(value.detach(), look).clone(memory_format=torch.contiguous_format)
    else:
        tensor = torch.empty(look.shape, dtype=look.dtype, device=line.device)
    if line.group is not None:
        dist.broadcast(tensor, group=line.group, group_src=home)
    return tensor


def _as(tensor: Tensor, look: Look) -> Tensor:
    """A tensor with the dtype that the receiver expects."""
    return tensor.to(look.dtype)


class Passage:
    """What one call of a pipeline sends and receives on one rank.

    Args:
        line: The ranks.
        records: True if gradients go back the same way.
    """

    def __init__(self, line: Line, *, records: bool) -> None:
        self._line = line
        self._start: Tensor | None = None
        if records:
            self._start = torch.zeros((), device=line.device, requires_grad=True)
        self._token = self._start

    @property
    def token(self) -> Tensor:
        """What all that was sent hangs on."""
        assert self._token is not None, "nothing is recorded"
        return self._token

    def send(self, tensors: Sequence[Tensor], looks: Sequence[Look], to: int, tag: int) -> None:
        """Send values to another rank, so that their gradients come back."""
        if self._token is None:
            sent = [_as(tensor, look) for tensor, look in zip(tensors, looks, strict=True)]
            self._line.send(sent, to, tag)
        else:
            self._token = _Send.apply(self._line, to, tag, looks, self._token, *tensors)  # type: ignore[no-untyped-call]

    def receive(self, looks: Sequence[Look], source: int, tag: int) -> Sequence[Tensor]:
        """Receive values from another rank, to which their gradients go back."""
        if self._start is None or not any(look.flows for look in looks):
            return self._line.receive(looks, source, tag)
        found: tuple[Tensor, ...] = _Receive.apply(self._line, source, tag, looks, self._start)  # type: ignore[no-untyped-call]
        return found

    def share(
        self, own: Sequence[Tensor | None], looks: Sequence[Look], homes: Sequence[int]
    ) -> Sequence[Tensor]:
        """Give every rank what some have, and wait for all that was sent.

        Args:
            own: The values of this rank; None for those of others.
            looks: The looks of all.
            homes: The place along the pipe of the rank that has each.
        """
        if self._token is None:
            shared: Sequence[Tensor] = [
                _shared(self._line, home, look, value)
                for home, look, value in zip(homes, looks, own, strict=True)
            ]
        else:
            shared = _Share.apply(self._line, homes, looks, self._token, *own)  # type: ignore[no-untyped-call]
        self._line.settle()
        return shared

"""FP32 master weights of parameters in half precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core._torch_compat import foreach_copy_
from nnx_nnscaler.runtime.buckets import assign_buckets, views_like

_HALF = (torch.float16, torch.bfloat16)

_GROUP_BYTES = 8 << 20
"""Bytes of parameters that are copied together: enough to hide launches, few enough for temporary copies."""


class Masters:
    """Float32 copies of half precision parameters, which an optimizer steps in their place.

    Otherwise rounding would lose updates that are small next to the weights. Parameter objects stay: during a
    step their data are the copies. A write to a weight outside of a step, such as by an averaging callback,
    is copied to the master first.

    Args:
        parameters: The parameters, of any dtype; only float16 and bfloat16 ones get copies.

    Attributes:
        copies: The copy of each parameter.
        lent: The data and the gradient of each parameter that stands for its copy now.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._groups: list[_Group] = []
        self.copies: dict[nn.Parameter, Tensor] = {}
        self.lent: dict[nn.Parameter, _Lent] = {}
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the half precision parameters that have no copy yet."""
        halves = [p for p in parameters if p.dtype in _HALF and p not in self.copies]
        buckets = assign_buckets(halves, [_GROUP_BYTES])
        for group in [_Group([halves[place] for place in places]) for places in buckets]:
            self._groups.append(group)
            self.copies |= group.copies

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Free the copies of a module's parameters, which were added together."""
        gone = set(parameters)
        self._groups = [group for group in self._groups if gone.isdisjoint(group.copies)]
        self.copies = {parameter: copy for group in self._groups for parameter, copy in group.copies.items()}

    @torch.no_grad()
    def take_over(self) -> None:
        """Take writes to parameters, by anything but a step, over into their copies."""
        for group in self._groups:
            group.take_over()

    def of(self, optimizer: Optimizer) -> LentMasters:
        """Return the parameters of an optimizer for its step and its closure."""
        return LentMasters(self, optimizer)

    @torch.no_grad()
    def lend(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the data and gradients of parameters to those of their copies."""
        wanted = set(parameters)
        for group in self._groups:
            lent = [parameter for parameter in group.copies if parameter in wanted]
            if lent:
                group.take_over()
            gradients = _in_float32([parameter.grad for parameter in lent])
            for parameter, gradient in zip(lent, gradients, strict=True):
                self.lent[parameter] = _Lent(parameter.data, parameter.grad, gradient)
                parameter.grad = None
                parameter.data = self.copies[parameter]
                parameter.grad = gradient

    @torch.no_grad()
    def take_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Restore lent parameters, with the values of their copies."""
        wanted = set(parameters)
        for group in self._groups:
            lent = [parameter for parameter in group.copies if parameter in wanted]
            for parameter in lent:
                before = self.lent.pop(parameter)
                gradient = before.gradient_after(parameter.grad)
                parameter.grad = None
                parameter.data = before.data
                parameter.grad = gradient
            group.publish(lent)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters to the parameters, after the masters were loaded."""
        for group in self._groups:
            group.publish(list(group.copies))


class _Lent:
    """The half precision data and gradient of a parameter that is its float32 copy now.

    Args:
        data: The data.
        gradient: The gradient, or None.
        in_float32: The float32 gradient in its place.
    """

    def __init__(self, data: Tensor, gradient: Tensor | None, in_float32: Tensor | None) -> None:
        self.data, self._gradient, self._in_float32 = data, gradient, in_float32
        self._version = 0 if in_float32 is None else in_float32._version

    def gradient_after(self, gradient: Tensor | None) -> Tensor | None:
        """Return the half precision gradient, after a step may have changed or dropped it.

        Args:
            gradient: The gradient that the step has left.
        """
        if gradient is None or (gradient is self._in_float32 and gradient._version == self._version):
            return None if gradient is None else self._gradient
        own = self._gradient
        if own is None or own.layout != gradient.layout or own.is_sparse:
            return gradient.to(self.data.dtype)
        return own.copy_(gradient)


class LentMasters:
    """The half precision parameters of one optimizer, in whose place it steps the float32 copies.

    Args:
        masters: The copies.
        optimizer: The optimizer.
    """

    def __init__(self, masters: Masters, optimizer: Optimizer) -> None:
        self._masters, self._optimizer = masters, optimizer

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context manager in which the parameters are their float32 copies, gradients included."""
        groups = self._optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p in self._masters.copies]
        self._masters.lend(parameters)
        try:
            yield
        finally:
            self._masters.take_back(parameters)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Restore the half precision parameters inside of `stepping`, for a closure."""
        parameters = list(self._masters.lent)
        self._masters.take_back(parameters)
        try:
            yield
        finally:
            self._masters.lend(parameters)


class _Group:
    """Parameters of one dtype and device with copies in one buffer, so that a few kernels serve all.

    Args:
        parameters: The parameters, about `_GROUP_BYTES` or a single larger one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._copies = _flat(parameters).float()
        views = views_like(self._copies, dict(enumerate(parameters)))
        self.copies = dict(zip(parameters, views.values(), strict=True))

    def take_over(self) -> None:
        """Copy writes to parameters outside of a step to the masters."""
        halves = _flat(list(self.copies))
        unchanged = self._copies.to(halves.dtype) == halves
        torch.where(unchanged, self._copies, halves.float(), out=self._copies)

    def publish(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy the masters of some parameters to the parameters."""
        halves = [parameter.data for parameter in parameters]
        if halves:
            foreach_copy_(halves, [self.copies[parameter] for parameter in parameters])


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the elements of parameters of one dtype and device in a row; read only."""
    data = [parameter.data for parameter in parameters]
    if len(data) == 1 and data[0].is_contiguous():
        return data[0].view(-1)
    buffer = data[0].new_empty(sum(tensor.numel() for tensor in data))
    foreach_copy_(list(views_like(buffer, dict(enumerate(data))).values()), data)
    return buffer


def _in_float32(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return float32 copies of gradients; dense ones are copied together."""
    dense = [gradient for gradient in gradients if gradient is not None and not gradient.is_sparse]
    made = [torch.empty_like(gradient, dtype=torch.float32) for gradient in dense]
    if dense:
        foreach_copy_(made, dense)
    rest = iter(made)
    return [
        gradient if gradient is None else gradient.float() if gradient.is_sparse else next(rest)
        for gradient in gradients
    ]

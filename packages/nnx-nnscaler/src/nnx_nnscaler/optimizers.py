"""Float32 copies for parameters in half precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Masters:
    """Float32 copies of half precision parameters, which an optimizer steps in their place.

    Updates that are small next to the weights would be rounded away otherwise. Parameter objects stay: for
    the time of a step their data are the copies. A weight that was changed since by anything but a step, an
    averaging callback say, is taken over.

    Args:
        parameters: The parameters, of any dtype; those that are not float16 or bfloat16 are left alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.copies: dict[nn.Parameter, Tensor] = {
            parameter: parameter.data.float()
            for parameter in parameters
            if parameter.dtype in (torch.float16, torch.bfloat16)
        }
        self._lent: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def lent(self, optimizer: Optimizer) -> Iterator[None]:
        """Within it an optimizer's parameters are their float32 copies, gradients included."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in self.copies]
        self._lend(parameters)
        try:
            yield
        finally:
            self._take_back(parameters)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Within it, inside of `lent`, they are the half precision ones again: for a closure."""
        parameters = list(self._lent)
        self._take_back(parameters)
        try:
            yield
        finally:
            self._lend(parameters)

    @torch.no_grad()
    def _lend(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            half, copy, gradient = parameter.data, self.copies[parameter], parameter.grad
            unchanged = copy.to(half.dtype) == half
            copy.copy_(torch.where(unchanged, copy, half.float()))
            self._lent[parameter] = half, gradient
            parameter.grad = None
            parameter.data = copy
            parameter.grad = None if gradient is None else gradient.float()

    @torch.no_grad()
    def _take_back(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            half, gradient = self._lent.pop(parameter)
            parameter.grad = None
            half.copy_(self.copies[parameter])
            parameter.data = half
            parameter.grad = gradient

    @torch.no_grad()
    def publish(self) -> None:
        """Give the parameters the values of their copies, after these were loaded."""
        for parameter, copy in self.copies.items():
            parameter.data.copy_(copy)

"""Which optimizers may step on parameters in parts, and float32 copies for those in half precision.

An optimizer that looks at one element at a time (SGD, Adam, Lion, ...) does the same on a part as on the
whole. One that looks at norms, rows or columns (Adafactor, Muon, LAMB, LBFGS) does not, and is found out by
trying: no list of names.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx.errors import UnsupportedError

__all__ = ["Masters", "is_elementwise", "refuse_unless_elementwise"]

_SHAPE = (4, 6)
_STEPS = 3
_TOLERANCE = 1e-9


def refuse_unless_elementwise(optimizer: Optimizer, in_parts: Callable[[nn.Parameter], bool]) -> None:
    """Refuse an optimizer that would compute something else on parts than on the whole.

    Args:
        optimizer: The user's.
        in_parts: Whether this rank holds only a part of a parameter.

    Raises:
        UnsupportedError: It holds parameters in parts, and its updates depend on what the other parts hold.
    """
    for group in optimizer.param_groups:
        if not any(in_parts(parameter) for parameter in group["params"]):
            continue
        if is_elementwise(optimizer, group):
            return  # the groups of an optimizer differ in numbers, not in what is done with them
        raise UnsupportedError(
            f"{type(optimizer).__name__} looks at more than one element of a parameter at a time, and this "
            "rank holds only parts of some parameters.",
            remedy="Use an elementwise optimizer, such as AdamW, or strategy 'nnscaler_dp', under which "
            "parameters stay whole.",
        )


def is_elementwise(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer steps on the halves of a tensor as it does on the whole; tried on a small one.

    Args:
        optimizer: Whose class and hyper-parameters are tried; it is left alone.
        group: The param group whose hyper-parameters count.

    Example:
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> is_elementwise(sgd, sgd.param_groups[0])
        True
    """
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.manual_seed(0)
        start = torch.rand(_SHAPE, dtype=torch.float64) + 0.5
        gradients = [torch.randn(_SHAPE, dtype=torch.float64) for _ in range(_STEPS)]
    try:
        whole = _stepped(optimizer, group, start, gradients)
        for dim in (0, 1):
            halves = [
                _stepped(optimizer, group, part, [gradient.chunk(2, dim)[half] for gradient in gradients])
                for half, part in enumerate(start.chunk(2, dim))
            ]
            if not torch.allclose(torch.cat(halves, dim), whole, rtol=_TOLERANCE, atol=_TOLERANCE):
                return False
    except Exception:  # whatever a foreign optimizer raises on a tensor of the probe's
        return False
    return True


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], start: Tensor, gradients: Sequence[Tensor]
) -> Tensor:
    """What becomes of a tensor in some steps of an optimizer like this one."""
    parameter = nn.Parameter(start.clone())
    trial = _like(optimizer, {**group, "params": [parameter]})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        type(optimizer).step(trial, lambda: 0.0)
    return parameter.detach()


def _like(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class and attributes over other parameters, without state and hooks."""
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer))
    trial.__dict__.pop("step", None)  # it may be a scheduler's or the engine's
    for name, value in list(vars(trial).items()):
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            setattr(trial, name, OrderedDict())
    tensors = {name: value for name, value in group.items() if isinstance(value, Tensor)}
    group = {**group, **{name: value.detach().cpu().double() for name, value in tensors.items()}}
    if group.get("capturable"):
        group["capturable"] = False  # only where the parameter is on a device
    trial.param_groups = [group]
    trial.state = defaultdict(dict)
    if "_params" in vars(trial):  # LBFGS
        trial._params = group["params"]
        trial._numel_cache = None
    return trial  # type: ignore[no-any-return]


class Masters:
    """Float32 copies of half precision parameters, which an optimizer steps in their place.

    Updates that are small next to the weights would be rounded away otherwise. Parameter objects stay: for
    the time of a step their data are the copies. A weight that was changed since by anything but a step, an
    averaging callback say, is taken over.

    Args:
        parameters: Of any dtype; those that are not float16 or bfloat16 are left alone.
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

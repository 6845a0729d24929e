"""Parameters that a step does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core._torch_compat import shadow_of
from nnx_core.errors import UnsupportedError
from nnx_deepspeed._operators_compat import counts_by_number
from nnx_deepspeed.partitions import (
    Partitions,
)

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def shadow_for_partitions(optimizer: OptimizerT) -> OptimizerT:
    """An optimizer of the same class and settings over the parameters that train, without state or hooks."""
    groups = [
        {**group, "params": trainable}
        for group in optimizer.param_groups
        if (trainable := [parameter for parameter in group["params"] if parameter.requires_grad])
    ]
    return shadow_of(optimizer, groups)


# They stay as they are, as in PyTorch, where their gradient is None.
#
# DeepSpeed steps whole flat partitions, in which such a parameter has a gradient of zero: momentum, Adam and
# weight decay would move it. So its elements of masters and optimizer state are put back right after the
# optimizer's step, before weights are made of the masters. What remains is that a partition counts its steps
# as one, by which Adam corrects its averages: a parameter that is used again is refused where that matters.


_USES = ((True, False), (True, True), (True, False), (True, True), (True, True))
"""In a trial, which of two parameters each step uses."""


class UnusedParameters:
    """Keeps what a step does not use as it is.

    Args:
        partitions: The partitions in which parameters lie; they count the steps that were missed.
        shadow: The optimizer that DeepSpeed steps.
        names: The names of the parameters, for errors.
    """

    def __init__(
        self, partitions: Partitions, shadow: Optimizer, *, names: Mapping[nn.Parameter, str]
    ) -> None:
        self._partitions, self._shadow, self._names = partitions, shadow, names
        self._allows_gaps: bool | None = None

    @contextmanager
    def left_alone(self, unused: Sequence[nn.Parameter]) -> Iterator[None]:
        """Around DeepSpeed's step.

        Args:
            unused: The trained parameters whose gradient is None, the same on every rank.

        Raises:
            UnsupportedError: One that missed a step is used again, and the optimizer counts steps.
        """
        self._refuse_return(unused)
        if not unused:
            yield
        else:
            kept: dict[Tensor, list[_Kept]] = {}
            for parameter in unused:
                found = self._partitions.range_of(parameter)
                if found is not None:
                    flat, start, length = found
                    kept.setdefault(flat, []).append(
                        _Kept(flat, start, length, self._shadow.state.get(flat, {}))
                    )
            hook = self._shadow.register_step_post_hook(_putting_back(kept))
            try:
                yield
            finally:
                hook.remove()
        self._partitions.count_step(unused)

    def _refuse_return(self, unused: Sequence[nn.Parameter]) -> None:
        returning = self._partitions.missed.keys() - set(unused)
        if not returning:
            return
        if self._allows_gaps is None:
            self._allows_gaps = allows_gaps(self._shadow)
        if not self._allows_gaps:
            name = next(self._names[p] for p in self._partitions.parameters() if p in returning)
            raise UnsupportedError(
                f"{name} is used in this step and was not in an earlier one; DeepSpeed "
                f"counts the steps of {type(self._shadow).__name__} for all parameters of a group together.",
                remedy="Use every parameter in each step, freeze it (`requires_grad_(False)`) where it is "
                "built, train with SGD, or use strategy 'fsdp_auto'.",
            )


class _Kept:
    """The elements of a flat partition that belong to one parameter, and of the state beside it."""

    def __init__(self, flat: Tensor, start: int, length: int, state: Mapping[str, Any]) -> None:
        self._flat, self._range = flat, (0, start, length)
        self._master = flat.detach().narrow(*self._range).clone()
        self._state = {
            name: value.narrow(*self._range).clone()
            for name, value in state.items()
            if _lies_like(value, flat)
        }

    @torch.no_grad()
    def put_back(self, state: Mapping[str, Any]) -> None:
        """Write them where they were; state that the step has made begins with zeros."""
        self._flat.detach().narrow(*self._range).copy_(self._master)
        for name, value in state.items():
            if not _lies_like(value, self._flat):
                continue
            if name in self._state:
                value.narrow(*self._range).copy_(self._state[name])
            else:
                value.narrow(*self._range).zero_()


def _lies_like(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _putting_back(kept: Mapping[Tensor, Sequence[_Kept]]) -> Any:
    """A hook that runs after each step of an optimizer, which may be one of one group."""

    def put_back(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"]:
                for elements in kept.get(flat, ()):
                    elements.put_back(optimizer.state[flat])

    return put_back


def allows_gaps(shadow: Optimizer) -> bool:
    """Return True if a parameter that misses steps is updated as if it were alone; found out by trying."""
    if counts_by_number(shadow):  # DeepSpeed's own, whose operators take no tensors of a trial
        return False
    try:
        with torch.random.fork_rng(devices=()):
            alone, together = _trial(shadow, in_one=False), _trial(shadow, in_one=True)
    except Exception:  # whatever a foreign optimizer raises on tensors of the trial's
        return False
    return torch.allclose(alone, together, rtol=1e-9, atol=1e-12, equal_nan=True)


def _trial(shadow: Optimizer, *, in_one: bool) -> Tensor:
    """Values after steps some of which leave a parameter out: in one partition with another, or apart."""
    optimizer = shadow_for_partitions(shadow)
    results = []
    for group in shadow.param_groups:
        values = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
        tensors = [nn.Parameter(part.clone()) for part in ([values] if in_one else torch.split(values, 4))]
        rate = {"lr": 0.1} if "lr" in group else {}  # which may be zero now
        optimizer.param_groups = [{**group, **rate, "params": tensors}]
        for number, uses in enumerate(_USES):
            gradients = torch.cos(values * (number + 1))
            if in_one:
                tensors[0].grad = torch.cat([gradients[:4], gradients[4:] if uses[1] else gradients[4:] * 0])
                kept = [] if uses[1] else [_Kept(tensors[0], 4, 4, optimizer.state[tensors[0]])]
                optimizer.step()
                for elements in kept:
                    elements.put_back(optimizer.state[tensors[0]])
            else:
                for tensor, gradient, is_used in zip(tensors, torch.split(gradients, 4), uses, strict=True):
                    tensor.grad = gradient.clone() if is_used else None
                optimizer.step()
        results.append(torch.cat([tensor.detach() for tensor in tensors]))
    return torch.cat(results)

"""Leave parameters that a step does not use unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core._torch_compat import shadow_of
from nnx_core.errors import UnsupportedError
from nnx_deepspeed._operators_compat import counts_steps_as_int
from nnx_deepspeed.partitions import (
    Partitions,
)

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def shadow_for_partitions(optimizer: OptimizerT) -> OptimizerT:
    """Return an optimizer of the same class and settings for trained parameters, without state or hooks."""
    groups = [
        {**group, "params": trainable}
        for group in optimizer.param_groups
        if (trainable := [parameter for parameter in group["params"] if parameter.requires_grad])
    ]
    return shadow_of(optimizer, groups)


# PyTorch leaves a parameter unchanged if its gradient is None. nnx does the same under DeepSpeed.
#
# DeepSpeed steps full flat partitions, in which an unused parameter has a gradient of zero. Momentum, Adam
# and weight decay would move it. So nnx restores its elements of masters and optimizer state right after the
# optimizer's step, before DeepSpeed makes weights from the masters. One difference remains: a partition has
# one count of steps, and Adam corrects its averages by it. So nnx refuses a parameter that is used again, if
# the optimizer depends on that count.


_USES = ((True, False), (True, True), (True, False), (True, True), (True, True))
"""The steps of a trial: for each of two parameters, True if the step uses it."""


class UnusedParameters:
    """Leaves parameters that a step does not use unchanged.

    Args:
        partitions: The partitions of the parameters, which also count missed steps.
        shadow: The optimizer that DeepSpeed steps.
        names: The names of the parameters, for errors.
    """

    def __init__(
        self, partitions: Partitions, shadow: Optimizer, *, names: Mapping[nn.Parameter, str]
    ) -> None:
        self._partitions, self._shadow, self._names = partitions, shadow, names
        self._allows_gaps: bool | None = None

    @contextmanager
    def preserved(self, unused: Sequence[nn.Parameter]) -> Iterator[None]:
        """Preserve unused parameters during DeepSpeed's step.

        Args:
            unused: The trained parameters with a gradient of None, the same on every rank.

        Raises:
            UnsupportedError: A parameter that missed a step is used again, and the optimizer counts steps.
        """
        self._refuse_return(unused)
        if not unused:
            yield
        else:
            snapshots: dict[Tensor, list[_Snapshot]] = {}
            for parameter in unused:
                found = self._partitions.range_of(parameter)
                if found is not None:
                    flat, start, length = found
                    snapshots.setdefault(flat, []).append(
                        _Snapshot(flat, start, length, self._shadow.state.get(flat, {}))
                    )
            hook = self._shadow.register_step_post_hook(_restoring_hook(snapshots))
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
                f"{name} is used in this step and was not used in an earlier one; DeepSpeed "
                f"counts the steps of {type(self._shadow).__name__} for all parameters of a group together.",
                remedy="Use every parameter in each step, freeze it (`requires_grad_(False)`) before "
                "training, train with SGD, or use strategy 'fsdp_auto'.",
            )


class _Snapshot:
    """A copy of the elements of a flat partition that belong to one parameter, and of their state."""

    def __init__(self, flat: Tensor, start: int, length: int, state: Mapping[str, Any]) -> None:
        self._flat, self._range = flat, (0, start, length)
        self._master = flat.detach().narrow(*self._range).clone()
        self._state = {
            name: value.narrow(*self._range).clone()
            for name, value in state.items()
            if _has_layout_of(value, flat)
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Write the copy back, and zero state that the step has created."""
        self._flat.detach().narrow(*self._range).copy_(self._master)
        for name, value in state.items():
            if not _has_layout_of(value, self._flat):
                continue
            if name in self._state:
                value.narrow(*self._range).copy_(self._state[name])
            else:
                value.narrow(*self._range).zero_()


def _has_layout_of(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _restoring_hook(snapshots: Mapping[Tensor, Sequence[_Snapshot]]) -> Any:
    """Return a post-step hook that restores snapshots. The optimizer may hold one group of several."""

    def restore(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"]:
                for snapshot in snapshots.get(flat, ()):
                    snapshot.restore(optimizer.state[flat])

    return restore


def allows_gaps(shadow: Optimizer) -> bool:
    """Return True if a trial updates a parameter that misses steps as if it had a partition of its own."""
    if counts_steps_as_int(shadow):  # DeepSpeed's own operators do not accept a trial's tensors
        return False
    try:
        with torch.random.fork_rng(devices=()):
            alone, together = _trial(shadow, in_one=False), _trial(shadow, in_one=True)
    except Exception:  # a foreign optimizer may raise anything on the trial's tensors
        return False
    return torch.allclose(alone, together, rtol=1e-9, atol=1e-12, equal_nan=True)


def _trial(shadow: Optimizer, *, in_one: bool) -> Tensor:
    """Return values after steps that leave a parameter out at times.

    The two parameters share a partition if `in_one` is true, and have one each otherwise.
    """
    optimizer = shadow_for_partitions(shadow)
    results = []
    for group in shadow.param_groups:
        values = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
        tensors = [
            nn.Parameter(tensor.clone()) for tensor in ([values] if in_one else torch.split(values, 4))
        ]
        rate = {"lr": 0.1} if "lr" in group else {}  # the present rate may be zero, which hides differences
        optimizer.param_groups = [{**group, **rate, "params": tensors}]
        for number, uses in enumerate(_USES):
            gradients = torch.cos(values * (number + 1))
            if in_one:
                tensors[0].grad = torch.cat([gradients[:4], gradients[4:] if uses[1] else gradients[4:] * 0])
                snapshots = [] if uses[1] else [_Snapshot(tensors[0], 4, 4, optimizer.state[tensors[0]])]
                optimizer.step()
                for snapshot in snapshots:
                    snapshot.restore(optimizer.state[tensors[0]])
            else:
                for tensor, gradient, is_used in zip(tensors, torch.split(gradients, 4), uses, strict=True):
                    tensor.grad = gradient.clone() if is_used else None
                optimizer.step()
        results.append(torch.cat([tensor.detach() for tensor in tensors]))
    return torch.cat(results)

"""Private names of torch that the core uses. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer


def exchange_in_transforms(kind: type, exchange: Callable[[Any], Any]) -> None:
    """Exchange tensors that ``torch.func.grad``, ``vjp``, ``jvp`` and their like are given and would wrap.

    Args:
        kind: The kind of the tensors.
        exchange: From each to what takes its place. It runs outside of all transforms.
    """
    wrap = eager_transforms._wrap_tensor_for_grad

    def wrap_exchanged(argument: Any, level: int) -> Any:
        if isinstance(argument, kind):
            with temporarily_clear_interpreter_stack():
                argument = exchange(argument)
        return wrap(argument, level)

    eager_transforms._wrap_tensor_for_grad = wrap_exchanged  # type: ignore[assignment] # of any type


def run_step_hooks(
    optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any], *, before: bool
) -> None:
    """Do what torch does around the step of an optimizer that does not run on this rank.

    Args:
        optimizer: Whose hooks are called; its schedulers see that it was stepped.
        args: The arguments of the step.
        kwargs: The keyword arguments of the step.
        before: True for the hooks before the step, False for those after it.
    """
    hooks = optimizer._optimizer_step_pre_hooks if before else optimizer._optimizer_step_post_hooks
    for hook in tuple(hooks.values()):
        hook(optimizer, tuple(args), dict(kwargs))
    optimizer._opt_called = True  # type: ignore[attr-defined] # what a scheduler asks for


def storage_users(tensor: Tensor) -> int:
    """How many tensors and others hold the storage of a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

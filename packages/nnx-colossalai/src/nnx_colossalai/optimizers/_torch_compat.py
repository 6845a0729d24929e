"""Private names of torch's optimizers that this package uses. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as base


def has_hooks_that_see_the_result(optimizer: Optimizer) -> bool:
    """Whether something runs after the step, or around every optimizer's step."""
    after = optimizer._optimizer_step_post_hooks
    return bool(after or base._global_optimizer_post_hooks or base._global_optimizer_pre_hooks)


def shadow_of(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]
) -> Optimizer:
    """An optimizer of the same class and settings over other tensors, without the user's hooks."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    vars(shadow).pop("step", None)  # which schedulers and the core have replaced on the object
    vars(shadow).update(
        param_groups=groups,
        state=defaultdict(dict, state),
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return shadow


@contextmanager
def without_guards() -> Iterator[None]:
    """Within it, parameters whose step is pending are taken as they are, without waiting."""
    with torch._C.DisableTorchFunctionSubclass():
        yield

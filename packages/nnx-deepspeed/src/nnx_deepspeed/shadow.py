"""The optimizer that DeepSpeed steps: the user's own, over flat partitions, in an object of its own.

DeepSpeed puts its flat partitions into the param groups of the optimizer that it is given, empties them
between steps (stage 3), and calls ``step`` once for each group. The user's object would show all that to
schedulers, hooks and callbacks. So DeepSpeed gets a shadow: the same class and settings, other groups and
state. The user's object keeps the module's parameters, whose ``.grad`` is None when it steps, so that its own
step changes nothing and still runs its hooks. Its state would be empty, so it is hidden.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

__all__ = ["copy_hyperparameters", "shadow_of"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def shadow_of(optimizer: OptimizerT) -> OptimizerT:
    """An optimizer of the same class and settings over the same parameters, without state or hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    for wrapped in ("step", "zero_grad"):  # what schedulers and strategies put on the user's object
        shadow.__dict__.pop(wrapped, None)
    for hooks in _HOOKS:
        shadow.__dict__[hooks] = OrderedDict()
    shadow.state = defaultdict(dict)
    shadow.param_groups = [
        {**group, "params": trainable}
        for group in optimizer.param_groups
        if (trainable := [parameter for parameter in group["params"] if parameter.requires_grad])
    ]
    return shadow


def copy_hyperparameters(groups: Sequence[dict[str, Any]], shadow: Optimizer) -> None:
    """Give the shadow the learning rates, and all else, that the user's groups have now.

    Args:
        groups: The user's groups that the shadow's stand for, in order.
        shadow: The shadow.
    """
    for source, target in zip(groups, shadow.param_groups, strict=True):
        target.update({key: value for key, value in source.items() if key != "params"})

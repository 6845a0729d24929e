"""The optimizer that DeepSpeed steps: the user's own, over flat partitions, in an object of its own.

DeepSpeed puts its flat partitions into the param groups of the optimizer that it is given, empties them
between steps (stage 3), and calls ``step`` once for each group. The user's object would show all that to
schedulers, hooks and callbacks. So DeepSpeed gets a shadow: the same class and settings, other groups and
state. The user's object keeps the module's parameters, whose ``.grad`` is None when it steps, so that its own
step changes nothing and still runs its hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Adagrad, Optimizer, SparseAdam

from nnx.errors import UnsupportedError

__all__ = ["copy_hyperparameters", "refuse_other_dtypes", "refuse_unfit", "shadow_of"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_NOT_BY_ELEMENT = ("Muon", LBFGS.__name__, Adafactor.__name__, SparseAdam.__name__)
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def refuse_unfit(optimizer: Optimizer) -> None:
    """Refuse optimizers whose update of an element depends on more than that element.

    Raises:
        UnsupportedError: With what can be used instead.
    """
    name = type(optimizer).__name__
    if name in _NOT_BY_ELEMENT:
        raise UnsupportedError(
            f"{name} cannot work on DeepSpeed's flat partitions: its update needs more than single elements.",
            remedy="Use one that works element by element (Adam, AdamW, SGD, ...), or strategy 'fsdp_auto'.",
        )
    if isinstance(optimizer, Adagrad) and len(optimizer.param_groups) > 1:
        raise UnsupportedError(
            f"DeepSpeed rebuilds Adagrad with one param group; this one has {len(optimizer.param_groups)}.",
            remedy="Use one group, or another optimizer.",
        )


def refuse_other_dtypes(module: nn.Module) -> None:
    """Refuse trained parameters that are not float32, in which DeepSpeed keeps its masters.

    Raises:
        UnsupportedError: With the first of them.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"DeepSpeed trains float32 parameters; {name} is {dtype}.",
                remedy="Convert it, and let precision='bf16-mixed' choose smaller types, or use 'fsdp_auto'.",
            )


class _Borrowed:
    """A compiled operator of DeepSpeed's own optimizers, which the user's object owns and frees."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return _nothing if name.startswith("destroy_") else getattr(self._operator, name)


def _nothing(*_: Any) -> None:
    pass


def shadow_of(optimizer: OptimizerT) -> OptimizerT:
    """An optimizer of the same class and settings over the same parameters, without state or hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    for wrapped in ("step", "zero_grad"):  # what schedulers and strategies put on the user's object
        shadow.__dict__.pop(wrapped, None)
    for name, operator in optimizer.__dict__.items():
        if name.startswith("ds_opt_"):
            shadow.__dict__[name] = _Borrowed(operator)
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

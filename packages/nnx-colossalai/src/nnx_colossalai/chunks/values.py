"""Tensors inside of what modules and steps are given and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["cast_to", "is_transparent", "kept_outputs", "needs_no_backward", "tensors_with_gradient"]


def cast_to(dtype: torch.dtype, value: Any) -> Any:
    """A nested value with its floating-point tensors at another dtype.

    Example:
        >>> cast_to(torch.bfloat16, (torch.ones(1), torch.tensor([2]), "three"))
        (tensor([1.], dtype=torch.bfloat16), tensor([2]), 'three')
    """
    # The usual first: looking into any value takes longer than a small kernel.
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is tuple:
        return tuple([cast_to(dtype, one) for one in value])
    if type(value) is dict and not value:
        return value
    return tree_map_only(Tensor, partial(cast_to, dtype), value)


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """The tensors in a nested value that require gradients.

    Example:
        >>> len(tensors_with_gradient({"loss": torch.ones(1, requires_grad=True), "size": (1, "two")}))
        1
    """
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def needs_no_backward(value: Any) -> bool:
    """Whether nothing in a nested value can start a backward; objects of unknown classes may.

    Example:
        >>> needs_no_backward(None), needs_no_backward([torch.ones(1), 0.5]), needs_no_backward(object())
        (True, True, False)
    """
    return is_transparent(value) and not tensors_with_gradient(value)


def is_transparent(value: Any) -> bool:
    """Whether all tensors in a nested value are found: there are no objects of unknown classes."""
    return all(isinstance(leaf, (Tensor, int, float, str, type(None))) for leaf in _leaves(value))


def kept_outputs(module: nn.Module) -> list[Tensor]:
    """What a forward has left on modules beside its result, such as an auxiliary loss, to be used in another.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.penalty = layer.weight.square().sum()
        >>> [tensor.ndim for tensor in kept_outputs(nn.Sequential(layer))]
        [0]
    """
    return [
        value
        for one in module.modules()
        for value in vars(one).values()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _leaves(getattr(value, part.name, None))
    else:
        yield value

"""Classify torch functions: those that read a shard, and those that need the unsharded tensor."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any


class Sees(Enum):
    """The kinds of answers to a torch function of a parameter."""

    UNSHARDED = auto()
    """The gathered value, with gradient."""
    IN_PLACE = auto()
    """The gathered value, which it changes."""
    DATA = auto()
    """The gathered value, without gradient."""
    ASSIGNS = auto()
    """It replaces the data."""
    GRADIENT = auto()
    """The unsharded gradient."""
    ASSIGNS_GRADIENT = auto()
    """It replaces the gradient."""
    HOOK = auto()
    """It listens to the gradient."""
    SHAPE = auto()
    """Logical shape and strides, without a gather."""
    LOCAL = auto()
    """The object itself, for functions that do not depend on the values."""
    MEMORY = auto()
    """The memory of this rank's shard."""


_OF_SHAPE = frozenset({"shape", "ndim", "nbytes"})


_OF_VALUES = frozenset({"T", "H", "mT", "mH", "real", "imag"})


_SHAPE_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "storage_offset", "__len__"}
)


_LOCAL_METHODS = frozenset(
    {
        *("requires_grad_", "retain_grad", "is_floating_point", "is_complex", "is_signed", "is_inference"),
        *("_is_view", "get_device", "element_size", "is_distributed", "is_same_size", "_is_zerotensor"),
        *("is_neg", "is_conj", "__hash__"),
    }
)


STORAGES = frozenset({"untyped_storage", "storage", "_typed_storage"})


_MEMORY_METHODS = frozenset({*STORAGES, "data_ptr", "is_shared", "is_pinned", "is_set_to"})


_IN_PLACE_OPERATORS = frozenset(
    {
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
        *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    }
)


_METHODS = {
    **dict.fromkeys(_SHAPE_METHODS, Sees.SHAPE),
    **dict.fromkeys(_LOCAL_METHODS, Sees.LOCAL),
    **dict.fromkeys(_MEMORY_METHODS, Sees.MEMORY),
    "detach": Sees.DATA,
    "register_hook": Sees.HOOK,
    "register_post_accumulate_grad_hook": Sees.HOOK,
}


_ELEMENTWISE = frozenset(
    {
        *("copy_", "fill_", "zero_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "pow_"),
        *("subtract_", "multiply_", "divide_", "true_divide_", "neg_", "abs_", "sign_", "sqrt_", "square_"),
        *("exp_", "log_", "reciprocal_", "round_", "tanh_", "sigmoid_", "relu_", "nan_to_num_", "erfinv_"),
        *("masked_fill_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "maximum_", "minimum_"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"),
    }
)


_RANDOM = frozenset(
    {
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"),
        "geometric_",
    }
)


_known: dict[Callable[..., Any], Sees] = {}


def what_it_sees(func: Callable[..., Any]) -> Sees:
    """Return the kind of answer to a torch function whose first argument is a sharded parameter.

    Example:
        >>> import torch
        >>> what_it_sees(torch.Tensor.size).name, what_it_sees(torch.add).name
        ('SHAPE', 'UNSHARDED')
    """
    found = _known.get(func)
    if found is None:
        found = _known[func] = _find(func)
    return found


def is_elementwise_in_place(func: Callable[..., Any]) -> bool:
    """Return True if a function changes each element of its first argument, a tensor or list, by itself.

    Example:
        >>> import torch
        >>> is_elementwise_in_place(torch.Tensor.mul_), is_elementwise_in_place(torch._foreach_mul_)
        (True, True)
    """
    return getattr(func, "__name__", "").removeprefix("_foreach_") in _ELEMENTWISE


def is_random(func: Callable[..., Any]) -> bool:
    """Return True if a function fills a tensor with random numbers."""
    return getattr(func, "__name__", "") in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init"


def _find(func: Callable[..., Any]) -> Sees:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _of_attribute(
            getattr(getattr(func, "__self__", None), "__name__", ""), reads=name == "__get__"
        )
    if name in _METHODS:
        return _METHODS[name]
    if name in _IN_PLACE_OPERATORS or (_is_native(func) and name.endswith("_") and not name.endswith("__")):
        return Sees.IN_PLACE
    return Sees.UNSHARDED


def _of_attribute(name: str, *, reads: bool) -> Sees:
    if name == "data":
        return Sees.DATA if reads else Sees.ASSIGNS
    if name == "grad":
        return Sees.GRADIENT if reads else Sees.ASSIGNS_GRADIENT
    if name in _OF_SHAPE:
        return Sees.SHAPE
    return Sees.UNSHARDED if name in _OF_VALUES else Sees.LOCAL


def _is_native(func: Callable[..., Any]) -> bool:
    """Return True for a function of torch in C++; False for one in Python, as in `torch.nn.init`."""
    return isinstance(func, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType))

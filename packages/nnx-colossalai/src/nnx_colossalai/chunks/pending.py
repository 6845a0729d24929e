"""Parameters that must be waited for: whatever uses one first makes everyone wait who has to.

While an optimizer steps a chunk in the background, or its working weights are not on the device yet, its
parameter objects get a subclass of their own class. The first torch function that needs their values calls
`wait`, which takes the guard off and then does what there is to do. What tells nothing of the values (the
gradient, the shape, hooks) passes. So a callback, a penalty or a forward that takes another module's weight
is right without knowing of chunks, and nothing is slower when nobody waits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["guard", "is_guarded", "unguard"]

_PASSING_ATTRIBUTES = frozenset(
    {"grad", "requires_grad", "shape", "ndim", "is_leaf", "grad_fn", "layout", "names", "_backward_hooks"}
    | {"_post_accumulate_grad_hooks", "grad_dtype", "output_nr", "retains_grad", "is_sparse", "is_meta"}
    | {"dtype", "device", "_version"}
)
_PASSING_METHODS = frozenset(
    {"size", "dim", "numel", "nelement", "ndimension", "stride", "__len__", "__hash__", "requires_grad_"}
    | {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_floating_point"}
    | {"is_complex", "is_contiguous"}
)


class _Guard:
    """Comes before a class of parameters, and lets nobody see values before their time."""

    __slots__ = ()
    _nnx_wait: Callable[[], None]
    _nnx_plain: type[Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _passes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _wait_for(args)
        _wait_for(kwargs.values())
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy is complete, and of the plain class."""
        _wait_for((self,))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled complete, as of the plain class."""
        _wait_for((self,))
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        _wait_for((self,))
        return repr(self)


def guard(parameters: Iterable[nn.Parameter], wait: Callable[[], None]) -> None:
    """Make the next use of any of the parameters call `wait`; a guard that is there is replaced.

    Args:
        parameters: Of any class, DTensors too.
        wait: Must `unguard` all parameters that were given, and return when they can be used.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> guard([weight], lambda: (unguard([weight]), print("waiting")))
        >>> weight.shape, weight.grad, float(weight.sum())
        waiting
        (torch.Size([2]), None, 2.0)
    """
    for parameter in parameters:
        parameter._nnx_wait = wait  # type: ignore[attr-defined]
        if not isinstance(parameter, _Guard):
            parameter.__class__ = _guarded_class(type(parameter))


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters their own class back."""
    for parameter in parameters:
        if isinstance(parameter, _Guard):
            parameter.__class__ = parameter._nnx_plain  # type: ignore[assignment]
            del parameter._nnx_wait


def is_guarded(parameter: Tensor) -> bool:
    """Whether a use of the parameter would wait."""
    return isinstance(parameter, _Guard)


@cache
def _guarded_class(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    attributes = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__slots__": (),
        "_nnx_plain": plain,
    }
    return cast("type[nn.Parameter]", type(plain)(plain.__name__, (_Guard, plain), attributes))  # type: ignore[misc]


@cache
def _passes(func: Callable[..., Any]) -> bool:
    """Whether a torch function tells nothing of values, and does not need them."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _PASSING_ATTRIBUTES
    return name in _PASSING_METHODS


def _wait_for(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, _Guard):
            value._nnx_wait()
        elif isinstance(value, (list, tuple)):
            _wait_for(value)
        elif isinstance(value, dict):
            _wait_for(value.values())

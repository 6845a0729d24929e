"""Parameters of stage 3 as user code sees them: whole, from the first touch on.

Outside of its layers' forward and backward a parameter is cut: a rank holds a flat part of it. Meanwhile it
has a class of its own, `PartitionedParameter`. When user code computes with it, reads its data or writes into
it, it is gathered and stays whole until the step goes on, which takes what was written. All ranks must do so.
DeepSpeed's code and ours see the part.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nnx_deepspeed._deepspeed_compat import gather_for_user, is_cut

_TENSOR: Any = Tensor
_SET_GRAD = _TENSOR.grad.__set__
_local = torch._C.DisableTorchFunctionSubclass
_INNER = (
    *("deepspeed", "nnx_checkpoint", "nnx_core", "nnx_deepspeed"),
    *("torch.autograd", "torch.distributed", "torch.optim", "torch.utils"),
    *("lightning.pytorch.callbacks.weight_averaging", "lightning.pytorch.callbacks.stochastic_weight_avg"),
    *("pytorch_lightning.callbacks.weight_averaging", "pytorch_lightning.callbacks.stochastic_weight_avg"),
)
"""Modules whose code means this rank's part: averages are averages of parts."""


class PartitionedParameter(nn.Parameter):
    """A parameter that is cut. Parameters become it and cease to be it; none is made."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SET_GRAD:
            return assign_gradient(args[0], args[1])
        if func in _of_a_part() or _is_inner(sys._getframe(1).f_globals.get("__name__", "")):
            with _local():
                return func(*args, **kwargs)
        cut = list(dict.fromkeys(_cut_in((args, kwargs))))
        if not cut:  # a copy that was never laid out
            with _local():
                return func(*args, **kwargs)
        if func in _of_a_shape():
            like = torch.empty(cut[0].ds_shape, dtype=cut[0].dtype, device="meta")  # type: ignore[attr-defined]
            return func(like, *args[1:], **kwargs)
        gather_for_user(cut)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        gather_for_user([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        gather_for_user([self])
        return self.__reduce_ex__(protocol)  # of the class that it has now


def assign_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``p.grad``, also where the parameter is a part or has another dtype than the gradient."""
    with _local():
        parameter.grad = None  # before it may be of another dtype
        if gradient is None:
            return
        present = parameter.data
        parameter.data = present.new_empty(()).expand(gradient.shape)
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        parameter.data = present


@cache
def _is_inner(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _INNER)


@cache
def _of_a_part() -> frozenset[Any]:
    """What says nothing of values and sizes, or asks for memory."""
    names = (
        *("device", "dtype", "grad", "grad_dtype", "grad_fn", "is_cuda", "is_leaf", "is_sparse", "layout"),
        *("names", "output_nr", "requires_grad", "retains_grad", "_version", "_backward_hooks"),
    )
    attributes = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    getters = [attribute.__get__ for attribute in attributes if hasattr(attribute, "__get__")]
    setters = [attribute.__set__ for attribute in attributes if hasattr(attribute, "__set__")]
    methods = [
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        *(Tensor.untyped_storage, Tensor.data_ptr, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__),
    ]
    return frozenset([*getters, *setters, *methods])


@cache
def _of_a_shape() -> frozenset[Any]:
    """What is answered from the whole's shape."""
    return frozenset(
        [
            *(_TENSOR.shape.__get__, _TENSOR.ndim.__get__),
            *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.__len__, Tensor.stride),
        ]
    )


def _cut_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, PartitionedParameter):
        if is_cut(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _cut_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _cut_in(item)

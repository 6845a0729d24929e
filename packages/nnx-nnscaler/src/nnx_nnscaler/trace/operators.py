"""What tracing has to know of torch's operators: which draw, which write, which do nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from nnx_nnscaler.trace.steps import Step, tensor_of
from nnx_nnscaler.trace.views import UnsupportedViewError

__all__ = [
    "Functional",
    "functional",
    "is_check",
    "is_random",
    "makes_gradients",
    "same_as",
    "simplified",
    "writes_buffers",
]

_NO_GRADIENT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "bernoulli", "detach", "detach_", "multinomial",
}  # fmt: skip
_CHECKS = ("_assert", "sym_constrain_range")
# Position of the flag that lets a normalization update its running statistics, which its schema does not say.
_STATISTICS = {"batch_norm": 5, "instance_norm": 5}
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def name_of(target: Any) -> str:
    """An operator's name without namespace and overload.

    Example:
        >>> name_of(torch.ops.aten.add.Tensor)
        'add'
    """
    return str(target).split(".")[1]


def is_check(step: Step) -> bool:
    """Whether a step only checks something that the trace has settled."""
    return str(step.target).startswith(tuple(f"aten.{name}" for name in _CHECKS))


def is_random(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator moves the random state, so that it may not be left out."""
    namespace, name, overload = target.split(".")
    if namespace == "aten" and name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if namespace == "aten" and name in _DROPOUTS:
        return bool(args[2] and args[1])
    if namespace == "aten" and name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return False  # where it has dropout between layers, its result is used
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return any(tag.name == "nondeterministic_seeded" for tag in found.tags)


def makes_gradients(target: str) -> bool:
    """Whether results of an operator are connected with its operands for autograd."""
    return name_of(target) not in _NO_GRADIENT


def writes_buffers(step: Step) -> bool:
    """Whether an operator updates buffers although its schema does not say so."""
    flag = _STATISTICS.get(name_of(step.target))
    return flag is not None and step.args[3] is not None and bool(step.args[flag])


def same_as(step: Step, *, differentiable: bool) -> fx.Node | None:
    """The operand that a step only hands on; None where it does something."""
    name = name_of(step.target)
    if not step.args or not isinstance(step.args[0], fx.Node):
        return None
    source, made = tensor_of(step.args[0]), tensor_of(step.node)
    if source is None or made is None:
        return None
    if name in ("detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy"):
        same = not (differentiable and name.startswith("detach"))
    elif name in _DROPOUTS:
        same = not (step.args[2] and step.args[1])
    elif name == "to":
        # A conversion of floating point to what it is may be one under autocast.
        integral = source.dtype == made.dtype and not made.dtype.is_floating_point
        same = integral and source.device == made.device and not _asks_for_copy(step)
    else:
        same = name == "slice" and _same_size(source, made)
    return step.args[0] if same else None


def _asks_for_copy(step: Step) -> bool:
    return any(
        argument.name == "copy" and _given(step, position, argument.name)
        for position, argument in enumerate(step.target._schema.arguments)
    )


def _given(step: Step, position: int, name: str) -> Any:
    return step.args[position] if position < len(step.args) else step.kwargs.get(name)


def _same_size(source: Tensor, made: Tensor) -> bool:
    return [str(dim) for dim in source.shape] == [str(dim) for dim in made.shape] and (
        [str(dim) for dim in source.stride()] == [str(dim) for dim in made.stride()]
    )


def simplified(step: Step) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A call without arguments that say nothing, and conversions as ``aten.to.dtype``."""
    kwargs = {name: value for name, value in step.kwargs.items() if value is not None}
    if kwargs.get("layout") == torch.strided:
        del kwargs["layout"]
    if not kwargs.get("pin_memory", True):
        del kwargs["pin_memory"]
    source, made = tensor_of(step.args[0]) if step.args else None, tensor_of(step.node)
    moved = ("aten.to.dtype_layout", "aten.to.device", "aten.to.other")
    if str(step.target) in moved and source is not None and made is not None and source.device == made.device:
        return "aten.to.dtype", (step.args[0], made.dtype), {}
    return str(step.target), step.args, kwargs


class Functional(NamedTuple):
    """What computes the value that a write leaves behind.

    Attributes:
        target: The operator.
        args: Its arguments; the first is what is written into, where the operator takes it.
        kwargs: Its keyword arguments.
        dtype: What its result has to be converted to; None where that is what comes out.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None


def functional(step: Step) -> Functional:
    """The operator without a write that computes the same.

    Raises:
        UnsupportedViewError: There is none.
    """
    name = name_of(step.target)[:-1]
    overload = str(step.target).split(".")[2]
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload, None) or getattr(packet, "default", None)
    if found is None or found._schema.is_mutable:
        raise UnsupportedViewError(step)
    return Functional(str(found), step.args, step.kwargs, _converted(step))


def _converted(step: Step) -> torch.dtype | None:
    """The dtype of what is written into, where other operands would promote it."""
    own = tensor_of(step.args[0])
    others = [tensor_of(arg) for arg in step.args[1:]]
    differs = any(other is not None and own is not None and other.dtype != own.dtype for other in others)
    return own.dtype if own is not None and differs and own.dtype.is_floating_point else None

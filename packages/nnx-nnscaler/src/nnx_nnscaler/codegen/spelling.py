"""Write calls of torch's operators in generated code as a person would write them.

An operator that is not in these tables is called by its full name, ``torch.ops.aten.name.overload(...)``,
which is always correct. The spelling never changes the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnx_nnscaler.ir.graph import Argument

Render = Callable[[Argument], str]
"""A function that writes one argument as Python code."""


_End = 2**63 - 1


INFIX = {
    "aten.add.Tensor": "+",
    "aten.add.Scalar": "+",
    "aten.sub.Tensor": "-",
    "aten.sub.Scalar": "-",
    "aten.mul.Tensor": "*",
    "aten.mul.Scalar": "*",
    "aten.div.Tensor": "/",
    "aten.div.Scalar": "/",
    "aten.pow.Tensor_Scalar": "**",
    "aten.pow.Tensor_Tensor": "**",
    "aten.pow.Scalar": "**",
    "aten.matmul.default": "@",
    "aten.eq.Tensor": "==",
    "aten.eq.Scalar": "==",
    "aten.ne.Tensor": "!=",
    "aten.ne.Scalar": "!=",
    "aten.lt.Tensor": "<",
    "aten.lt.Scalar": "<",
    "aten.le.Tensor": "<=",
    "aten.le.Scalar": "<=",
    "aten.gt.Tensor": ">",
    "aten.gt.Scalar": ">",
    "aten.ge.Tensor": ">=",
    "aten.ge.Scalar": ">=",
    "aten.bitwise_and.Tensor": "&",
    "aten.bitwise_or.Tensor": "|",
    "aten.__and__.Tensor": "&",
    "aten.__or__.Tensor": "|",
}
"""Operators with two operands, if they have no further argument."""


PREFIX = {"aten.neg.default": "-", "aten.bitwise_not.default": "~"}


METHODS = {
    f"aten.{name}": name.partition(".")[0]
    for name in [
        "view.default",
        "reshape.default",
        "transpose.int",
        "permute.default",
        "expand.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "flatten.using_ints",
        "unflatten.int",
        "contiguous.default",
        "clone.default",
        "detach.default",
        "t.default",
        "masked_fill.Scalar",
        "masked_fill.Tensor",
        "split.Tensor",
        "split.sizes",
        "split_with_sizes.default",
        "chunk.default",
        "narrow.default",
        "repeat.default",
        "unbind.int",
        "sum.default",
        "sum.dim_IntList",
        "mean.default",
        "mean.dim",
        "amax.default",
        "amin.default",
        "cumsum.default",
        "var.correction",
        "std.correction",
        "prod.default",
        "argmax.default",
        "argmin.default",
        "all.default",
        "any.default",
        "all.dim",
        "any.dim",
        "tril.default",
        "triu.default",
        "gather.default",
        "index_select.default",
        "type_as.default",
        "view_as.default",
        "expand_as.default",
        "clamp.default",
        "clamp_min.default",
        "roll.default",
        "flip.default",
        "add_.Tensor",
        "mul_.Tensor",
        "copy_.default",
        "max.dim",
        "min.dim",
        "max.default",
        "min.default",
        "topk.default",
        "sort.default",
        "to.dtype",
        "diagonal.default",
        "movedim.int",
        "new_zeros.default",
        "new_ones.default",
    ]
}
"""Operators that are a method of their first argument, with the others in the same order."""


_TORCH = (
    "exp.default log.default log1p.default sqrt.default rsqrt.default sin.default cos.default tanh.default "
    "sigmoid.default abs.default erf.default floor.default ceil.default round.default sign.default "
    "reciprocal.default square.default logical_not.default logical_and.default logical_or.default "
    "softmax.int log_softmax.int logsumexp.default cat.default stack.default where.self where.Scalar "
    "where.ScalarOther where.ScalarSelf bmm.default mm.default addmm.default baddbmm.default outer.default "
    "einsum.default maximum.default minimum.default arange.default arange.start arange.start_step "
    "full.default zeros.default ones.default empty.memory_format zeros_like.default ones_like.default "
    "full_like.default rand.default randn.default rand_like.default randn_like.default bernoulli.default "
    "eye.default linspace.default group_norm.default batch_norm.default nan_to_num.default isnan.default "
    "isinf.default isfinite.default atan2.default polar.default rsub.Scalar rsub.Tensor conv1d.default "
    "conv2d.default conv3d.default conv_transpose1d.default lerp.Scalar lerp.Tensor dot.default mv.default"
)


_FUNCTIONAL = (
    "linear.default gelu.default relu.default silu.default elu.default leaky_relu.default softplus.default "
    "mish.default hardswish.default hardsigmoid.default hardtanh.default glu.default "
    "logsigmoid:log_sigmoid.default "
    "dropout.default "
    "scaled_dot_product_attention.default rms_norm.default avg_pool2d.default max_pool2d.default "
    "max_pool1d.default avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool1d.default "
    "one_hot.default prelu.default pixel_shuffle.default cosine_similarity.default"
)


def _functions(names: str, prefix: str) -> dict[str, str]:
    found = {}
    for entry in names.split():
        spelling, _, name = entry.rpartition(":")
        found[f"aten.{name}"] = f"{prefix}.{spelling or name.partition('.')[0]}"
    return found


FUNCTIONS = _functions(_TORCH, "torch") | _functions(_FUNCTIONAL, "F")
"""Operators that are a function with the same arguments in the same order."""


_REDUCTIONS = ("none", "mean", "sum")


def spell(target: str, args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str:
    """Return one call as Python code.

    Args:
        target: The name of the operator, such as ``"aten.linear.default"``.
        args: The positional arguments.
        kwargs: The keyword arguments.
        render: A function that writes one argument.

    Example:
        >>> spell("aten.add.Tensor", ("x", "y"), {}, str)
        'x + y'
        >>> spell("aten.add.Tensor", ("x", "y"), {"alpha": 2}, str)
        'torch.ops.aten.add.Tensor(x, y, alpha=2)'
    """
    kwargs = {name: value for name, value in kwargs.items() if (name, value) not in _NOISE}
    custom = CUSTOM.get(target)
    if custom is not None:
        text = custom(args, kwargs, render)
        if text is not None:
            return text
    if len(args) == 2 and not kwargs and target in INFIX:
        return f"{_operand(args[0], render)} {INFIX[target]} {_operand(args[1], render)}"
    if len(args) == 1 and not kwargs and target in PREFIX:
        return f"{PREFIX[target]}{_operand(args[0], render)}"
    if target in METHODS and args:
        return f"{render(args[0])}.{METHODS[target]}({_listed(args[1:], kwargs, render)})"
    name = FUNCTIONS.get(target, f"torch.ops.{target}")
    return f"{name}({_listed(args, kwargs, render)})"


_NOISE: tuple[tuple[str, Any], ...] = (("pin_memory", False), ("alpha", 1))


def _listed(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str:
    return ", ".join([*map(render, args), *(f"{name}={render(value)}" for name, value in kwargs.items())])


def _operand(argument: Argument, render: Render) -> str:
    """Return an operand of an infix operator, in parentheses if it needs them."""
    text = render(argument)
    is_plain = text.replace("_", "a").replace(".", "a").isalnum() or text.endswith("]")
    return text if is_plain else f"({text})"


def _padded(args: tuple[Argument, ...], defaults: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Return the positional arguments, completed with the schema's defaults."""
    return (*args, *defaults[len(args) - len(defaults) :]) if len(args) < len(defaults) else args


def _embedding(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    weight, indices, padding, by_frequency, sparse = _padded(args, (None, None, -1, False, False))
    if kwargs or by_frequency or sparse:
        return None
    padded = "" if padding == -1 else f", padding_idx={render(padding)}"
    return f"F.embedding({render(indices)}, {render(weight)}{padded})"


def _layer_norm(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    return None if kwargs else f"F.layer_norm({_listed(args[:5], {}, render)})"


def _cross_entropy(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    if kwargs:
        return None
    scores, target, weight, reduction, ignored, smoothing = _padded(args, (None, None, None, 1, -100, 0.0))
    options: dict[str, Argument] = {}
    if weight is not None:
        options["weight"] = weight
    if ignored != -100:
        options["ignore_index"] = ignored
    if reduction != 1:
        options["reduction"] = _REDUCTIONS[reduction]
    if smoothing:
        options["label_smoothing"] = smoothing
    listed = "".join(
        f", {name}={value!r}" if name == "reduction" else f", {name}={render(value)}"
        for name, value in options.items()
    )
    return f"F.cross_entropy({render(scores)}, {render(target)}{listed})"


def _simple_loss(name: str) -> Callable[..., str | None]:
    def spelled(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
        predicted, target, reduction, *rest = _padded(args, (None, None, 1))
        if kwargs or rest:
            return None
        option = "" if reduction == 1 else f", reduction={_REDUCTIONS[reduction]!r}"
        return f"F.{name}({render(predicted)}, {render(target)}{option})"

    return spelled


def _slice(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    tensor, dim, start, end, step = _padded(args, (None, 0, None, None, 1))
    if kwargs or not isinstance(dim, int) or dim < 0:
        return None
    first = "" if start in (None, 0) else render(start)
    last = "" if end is None or (isinstance(end, int) and end >= _End) else render(end)
    stride = "" if step == 1 else f":{render(step)}"
    return f"{render(tensor)}[{':, ' * dim}{first}:{last}{stride}]"


def _select(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    tensor, dim, index = args
    if kwargs or not isinstance(dim, int) or dim < 0 or not isinstance(index, int):
        return None
    return f"{render(tensor)}[{':, ' * dim}{index}]"


def _index(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    if kwargs or len(args) != 2 or not isinstance(args[1], (list, tuple)) or not args[1]:
        return None
    places = ", ".join(":" if index is None else render(index) for index in args[1])
    return f"{render(args[0])}[{places}]"


def _type_of(args: tuple[Argument, ...], kwargs: Mapping[str, Argument], render: Render) -> str | None:
    """Return a call of ``to`` with all keywords; the layout is omitted, because all tensors here have one."""
    kept = {name: value for name, value in kwargs.items() if name in ("dtype", "device")}
    if len(args) != 1 or not kept or any(kwargs.get(name) for name in ("non_blocking", "copy")):
        return None
    if kwargs.get("memory_format") is not None:
        return None
    return f"{render(args[0])}.to({_listed((), kept, render)})"


CUSTOM: dict[str, Callable[[tuple[Argument, ...], Mapping[str, Argument], Render], str | None]] = {
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _layer_norm,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.mse_loss.default": _simple_loss("mse_loss"),
    "aten.l1_loss.default": _simple_loss("l1_loss"),
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.index.Tensor": _index,
    "aten.to.dtype_layout": _type_of,
}
"""Functions for operators with a form of their own; None if it does not fit a call."""

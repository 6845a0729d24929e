"""Split operators that compute per element or along dims, draw random numbers, or are losses."""

from __future__ import annotations

from collections.abc import Collection

from nnx_nnscaler.ir.graph import Graph, Op, Ref, TensorMeta
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules.rule import (
    Call,
    Labels,
    Rule,
    Writer,
    aligned,
    argument_of,
    dim_labels,
    is_floating,
    label_strategies,
    partial_strategy,
    placement_of,
    targets,
)

__all__ = ["RULES"]

# Operators that compute each element independently, with broadcasting.


_UNARY = (
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min clip "
    "cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fill floor frac gelu hardshrink "
    "hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 "
    "log_sigmoid logical_not logit mish nan_to_num rad2deg reciprocal relu relu6 round rsqrt selu sgn "
    "sigmoid sign sin sinc sinh softplus softshrink sqrt square silu tan tanh tanhshrink threshold "
    "trunc fix special_expit special_erf zeros_like ones_like full_like empty_like"
)
_BROADCAST = (
    "__and__ __or__ __xor__ atan2 bitwise_and bitwise_or bitwise_xor copysign eq floor_divide fmax "
    "fmin fmod ge greater greater_equal gt heaviside hypot le less less_equal logaddexp logaddexp2 "
    "logical_and logical_or logical_xor lt maximum minimum ne nextafter not_equal pow remainder rsub "
    "xlogy addcdiv addcmul lerp masked_fill isclose max.other min.other"
)


class Elementwise(Rule):
    """Sharded along any dim; operands that are broadcast along it stay replicated."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        inputs: dict[str, Labels | list[Labels]] = {}
        for name in self.operands(call):
            meta = call.meta(name)
            if meta is not None:
                inputs[name] = aligned(labels, call.output, meta)
        return [*label_strategies(call, inputs, [labels]), *self.partial(call)]

    def operands(self, call: Call) -> list[str]:
        """Return the names of the arguments that are broadcast to the result."""
        return call.tensors()

    def partial(self, call: Call) -> list[Strategy]:
        """Return the strategies on partial sums: none, because the operator is not linear."""
        return []


class _Linear(Elementwise):
    """Linear operators, which accept partial sums."""

    def partial(self, call: Call) -> list[Strategy]:
        return partial_strategy(call, ["self"])


class _Convert(Elementwise):
    """Conversions of dtype, device or memory format; they accept partial sums without more rounding."""

    def operands(self, call: Call) -> list[str]:
        return ["self"]  # another operand only gives its dtype

    def partial(self, call: Call) -> list[Strategy]:
        before, after = call.meta("self"), call.output
        if before is None or not _at_least_as_wide(after.dtype, before.dtype):
            return []
        return partial_strategy(call, ["self"])


class _Sum(Elementwise):
    """Sums and differences, of partial sums if all addends are partial."""

    def partial(self, call: Call) -> list[Strategy]:
        if not (isinstance(call["self"], Ref) and isinstance(call["other"], Ref)):
            return []
        return partial_strategy(call, ["self", "other"])


class _Product(Elementwise):
    """Products, in which one factor may be partial sums."""

    factors: tuple[str, ...] = ("self", "other")

    def partial(self, call: Call) -> list[Strategy]:
        return [
            strategy
            for name in self.factors
            if isinstance(call[name], Ref)
            for strategy in partial_strategy(call, [name])
        ]


class _Quotient(_Product):
    """Quotients, in which the numerator may be partial sums, unless the result is rounded."""

    factors = ("self",)

    def partial(self, call: Call) -> list[Strategy]:
        return [] if call["rounding_mode"] is not None else super().partial(call)


class _Choice(Elementwise):
    """A choice by a condition, in which both sides may be partial sums."""

    def partial(self, call: Call) -> list[Strategy]:
        if not (isinstance(call["self"], Ref) and isinstance(call["other"], Ref)):
            return []
        return partial_strategy(call, ["self", "other"])


class _Item(Rule):
    """One of several results, in its present placement."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        found = label_strategies(call, {"arg0": labels}, [labels])
        if is_floating(call.output):
            found.append(Strategy("partial", (P,), (P,)))
        return found


def _at_least_as_wide(dtype: str, than: str) -> bool:
    order = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
    if dtype == than:
        return True
    return order.get(dtype, 0) > order.get(than, 9)


_ELEMENTWISE, _LINEAR, _CONVERT = Elementwise(), _Linear(), _Convert()

_BY_ELEMENT: dict[str, Rule] = {
    **dict.fromkeys(targets(_UNARY), _ELEMENTWISE),
    **dict.fromkeys(targets(_BROADCAST), _ELEMENTWISE),
    **dict.fromkeys(
        targets("alias clone contiguous detach lift_fresh lift_fresh_copy neg negative positive"), _LINEAR
    ),
    **dict.fromkeys(targets("_to_copy double float to type_as"), _CONVERT),
    "aten.add": _Sum(),
    "aten.sub": _Sum(),
    "aten.mul": _Product(),
    "aten.multiply": _Product(),
    "aten.div": _Quotient(),
    "aten.divide": _Quotient(),
    "aten.true_divide": _Quotient(),
    "aten.where": _Choice(),
    "getitem": _Item(),
}


# Operators that work along some dims and keep the others: sums, norms, softmax, sorting, lookups.


class _Reduce(Rule):
    """Reductions that remove dims or reduce them to 1; the other dims can be sharded."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        labels = dim_labels(call, before.shape)
        reduced = _reduced(call, len(labels))
        kept = [None if index in reduced else label for index, label in enumerate(labels)]
        after = tuple(kept) if call["keepdim"] else tuple(label for label in kept if label is not None)
        if any(len(after) != len(meta.shape) for meta in call.outputs):
            return []
        operand = labels if self.sums else tuple(kept)
        summed = [label for index, label in enumerate(labels) if index in reduced and label is not None]
        found = label_strategies(call, {"self": operand}, [after] * len(call.outputs), summed=summed)
        return [*found, *(partial_strategy(call, ["self"]) if self.sums else [])]

    sums = False
    """True if the reduction is linear, so that sums over shards are partial sums."""


class _SumAlongDims(_Reduce):
    sums = True


class _Mean(_SumAlongDims):
    """Means over equal shards, which are partial sums after a division by the number of shards."""

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        call = writer.call(op)
        divided = strategy.outputs[0] == P and placement_of(op, strategy, "self").is_shard
        return f"{call} / {writer.size}" if divided else call


def _reduced(call: Call, ndim: int) -> Collection[int]:
    dims = call["dim"]
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return range(ndim)
    return {call.dim(dim, ndim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}


class _Along(Rule):
    """Operators along one dim that keep the number of dims; all other dims can be sharded."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        dim = call.dim(call["dim"], len(before.shape))
        labels = dim_labels(call, before.shape)
        whole = tuple(None if index == dim else label for index, label in enumerate(labels))
        return label_strategies(call, {"self": whole}, [whole] * len(call.outputs))


class _Trailing(Rule):
    """Operators along the last dims; the leading dims can be sharded.

    Args:
        operand: The name of the argument.
        trailing: The number of unsharded dims; by default the length of ``normalized_shape``.
    """

    def __init__(self, operand: str, trailing: int | None = None) -> None:
        self.operand = operand
        self.trailing = trailing

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        trailing = len(call["normalized_shape"]) if self.trailing is None else self.trailing
        labels = dim_labels(call, call.output.shape)
        whole = (*labels[: len(labels) - trailing], *[None] * trailing)
        return label_strategies(call, {self.operand: whole}, [whole])


class _Similarity(Rule):
    """Comparisons along one dim of two tensors that are broadcast to each other."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        first, second = call.meta("x1"), call.meta("x2")
        if first is None or second is None or len(first.shape) != len(second.shape):
            return []
        after = dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"], len(first.shape))
        sizes = [*call.output.shape[:dim], first.shape[dim], *call.output.shape[dim:]]
        whole = TensorMeta(tuple(sizes), first.dtype)
        labels: Labels = (*after[:dim], None, *after[dim:])
        if first.hints[dim] != second.hints[dim]:
            return []
        inputs: dict[str, Labels | list[Labels]] = {
            "x1": aligned(labels, whole, first),
            "x2": aligned(labels, whole, second),
        }
        return label_strategies(call, inputs, [after])


class _OneHot(Rule):
    """One-hot encoding, which adds a dim of classes after the others."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)[:-1]
        return label_strategies(call, {"self": labels}, [(*labels, None)]) if call["num_classes"] > 0 else []

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        return int(Call.of(op, graph, 1)["num_classes"])


class _Gather(Rule):
    """Lookups along one dim, by an index with the same number of dims."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        shape, labels = call.shape("self"), dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"])
        alike = [
            index != dim and own == made
            for index, (own, made) in enumerate(zip(shape, call.output.hints, strict=True))
        ]
        index = tuple(
            label if same or d == dim else None
            for d, (label, same) in enumerate(zip(labels, alike, strict=True))
        )
        table = tuple(label if same else None for label, same in zip(labels, alike, strict=True))
        found = label_strategies(call, {"self": table, "index": index}, [index])
        return [*found, *partial_strategy(call, ["self"])]

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        call = Call.of(op, graph, 1)
        return call.shape("self")[call.dim(call["dim"])]


class _IndexSelect(Rule):
    """Lookups along one dim, by an index with one dim, which can be sharded."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"])
        table: Labels = tuple(None if index == dim else label for index, label in enumerate(labels))
        found = label_strategies(call, {"self": table, "index": (labels[dim],)}, [labels])
        return [*found, *partial_strategy(call, ["self"])]

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        call = Call.of(op, graph, 1)
        return call.shape("self")[call.dim(call["dim"])]


class _Prelu(Rule):
    """PReLU, with a slope for every channel."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        slopes = labels[1:2] if isinstance(call["weight"], Ref) and call.shape("weight") != (1,) else (None,)
        return label_strategies(call, {"self": labels, "weight": slopes}, [labels])


_REDUCE, _ALONG = _Reduce(), _Along()

_REDUCING = (
    "all amax amin any argmax argmin linalg_vector_norm logsumexp max.default max.dim median.dim min.dim "
    "nanmedian.dim norm prod std std_mean var var_mean aminmax count_nonzero"
)
_WORKING_ALONG = (
    "argsort cummax cummin cumprod cumsum kthvalue log_softmax logcumsumexp softmax sort topk "
    "_softmax _log_softmax _safe_softmax glu"
)
_REDUCTIONS: dict[str, Rule] = {
    **dict.fromkeys(targets(_REDUCING), _REDUCE),
    **dict.fromkeys(targets(_WORKING_ALONG), _ALONG),
    "aten.sum": _SumAlongDims(),
    "aten.mean": _Mean(),
    "aten.layer_norm": _Trailing("input"),
    "aten.rms_norm": _Trailing("input"),
    "aten.tril": _Trailing("self", 2),
    "aten.triu": _Trailing("self", 2),
    "aten.cosine_similarity": _Similarity(),
    "aten.one_hot": _OneHot(),
    "aten.gather": _Gather(),
    "aten.index_select": _IndexSelect(),
    "aten.prelu": _Prelu(),
}


# Every rank draws the random numbers of one process, and keeps its shard.


class _Dropout(Rule):
    """Dropout, sharded along any dim; linear for a given mask, which all ranks draw alike."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        return [*label_strategies(call, {"input": labels}, [labels]), *partial_strategy(call, ["input"])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        p = argument_of(op, "p")
        if not (p and argument_of(op, "train")):
            return writer.call(op)
        arguments = [writer.value(argument_of(op, "input")), str(p)]
        placement = strategy.outputs[0]
        if placement.is_shard:
            arguments.append(f"dim={placement.dim}")
        if placement.groups > 1:
            arguments.append(f"groups={placement.groups}")
        return f"rt.dropout({', '.join(arguments)})"


class _Draw(Rule):
    """Random numbers without gradients, which all ranks draw completely."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        return []

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        return f"rt.drawn(lambda: {writer.call(op)})"


_DRAW = _Draw()
_DRAWING = "bernoulli multinomial normal rand rand_like randint randint_like randn randn_like randperm"
_RANDOM: dict[str, Rule] = {"aten.dropout": _Dropout(), **dict.fromkeys(targets(_DRAWING), _DRAW)}


# Losses, sharded by samples with means over all of them; cross entropy also by classes.


_NONE, _MEAN = 0, 1
"""The number of the mean among torch's reductions; 2 is the sum."""


class _ClassLoss(Rule):
    """A loss of scores over classes: ``(N, C, ...)`` against ``(N, ...)``.

    Args:
        mean: The runtime's function for a mean over sharded samples, with different counts per shard.
    """

    def __init__(self, mean: str) -> None:
        self.mean = mean

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        scores, target = call.meta("self"), call.meta("target")
        if scores is None or target is None or len(scores.shape) < 2:
            return []
        labels = dim_labels(call, (scores.shape[0], *scores.shape[2:]))
        of_scores: Labels = (labels[0], None, *labels[1:])
        probabilities = is_floating(target)
        inputs: dict[str, Labels | list[Labels]] = {
            "self": of_scores,
            "target": of_scores if probabilities else labels,
        }
        whole = call["reduction"] == _NONE
        names = [label for label in labels if label is not None]
        found = label_strategies(call, inputs, [labels if whole else ()], summed=() if whole else names)
        return found if probabilities else [*found, *self.with_all_targets(call)]

    def with_all_targets(self, call: Call) -> list[Strategy]:
        """Return the strategies that shard the scores and replicate the targets, which are classes."""
        return []

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.outputs[0] != P or argument_of(op, "reduction") != _MEAN:
            return writer.call(op)
        return _written(self.mean, op, writer, ("weight", "ignore_index", "label_smoothing"))

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        shape = Call.of(op, graph, 1).shape("self")
        return shape[min(1, len(shape) - 1)]


class _CrossEntropy(_ClassLoss):
    """Cross entropy, also by classes: ranks exchange maxima, sums and targets' scores, not all scores."""

    def with_all_targets(self, call: Call) -> list[Strategy]:
        found = []
        if call["weight"] is None and is_floating(call.output):
            found.append(call.strategy("vocabulary", {"self": S(1)}, [R], call="vocabulary_cross_entropy"))
        if call["reduction"] == _MEAN:  # each rank has all targets, so it knows the count
            found.append(call.strategy("targets", {"self": S(0)}, [P], call="cross_entropy_of_part"))
        return found

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.call:
            first = "reduction" if strategy.call == "vocabulary_cross_entropy" else "weight"
            return _written(strategy.call, op, writer, (first, "ignore_index", "label_smoothing"))
        return super().write(op, strategy, writer)


def _written(function: str, op: Op, writer: Writer, options: tuple[str, ...]) -> str:
    """Return a call of the runtime's function with all options that differ from the default."""
    usual = {"weight": None, "reduction": _MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    arguments = [writer.value(argument_of(op, name)) for name in ("self", "target")]
    for name in options:
        value = argument_of(op, name)
        if value is not None and value != usual[name]:
            arguments.append(f"{name}={writer.value(value)}")
    return f"rt.{function}({', '.join(arguments)})"


class _PairLoss(Rule):
    """A loss of every element, with broadcasting; means over equal shards are divided by their number."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        metas = {name: meta for name in call.tensors() if (meta := call.meta(name)) is not None}
        whole = _broadcast(list(metas.values()))
        labels = dim_labels(call, whole.shape)
        inputs: dict[str, Labels | list[Labels]] = {
            name: aligned(labels, whole, meta) for name, meta in metas.items()
        }
        reduced = call["reduction"] != _NONE
        names = [label for label in labels if label is not None]
        return label_strategies(call, inputs, [() if reduced else labels], summed=names if reduced else ())

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        call = writer.call(op)
        divided = strategy.outputs[0] == P and argument_of(op, "reduction") == _MEAN
        return f"{call} / {writer.size}" if divided else call


def _broadcast(metas: list[TensorMeta]) -> TensorMeta:
    """Return the shape that tensors are broadcast to."""
    ndim = max(len(meta.shape) for meta in metas)
    padded = [((1,) * (ndim - len(meta.shape)) + meta.shape) for meta in metas]
    shape = tuple(next((dim for dim in dims if dim != 1), 1) for dims in zip(*padded, strict=True))
    return TensorMeta(shape, metas[0].dtype)


_PAIR = _PairLoss()
_PAIRS = (
    "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss "
    "smooth_l1_loss soft_margin_loss"
)
_NLL = _ClassLoss("nll_loss_mean")

_LOSSES: dict[str, Rule] = {
    **dict.fromkeys(targets(_PAIRS), _PAIR),
    **dict.fromkeys(targets("nll_loss nll_loss2d nll_loss_nd"), _NLL),
    "aten.cross_entropy_loss": _CrossEntropy("cross_entropy_mean"),
}

RULES: dict[str, Rule] = {**_BY_ELEMENT, **_REDUCTIONS, **_RANDOM, **_LOSSES}

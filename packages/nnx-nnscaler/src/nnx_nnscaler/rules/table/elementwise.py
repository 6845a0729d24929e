"""Operators that compute every element by itself, with broadcasting."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op, Ref
from nnx_nnscaler.placement import P
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import (
    Labels,
    aligned,
    dim_labels,
    is_floating,
    label_strategies,
    partial_strategy,
)
from nnx_nnscaler.rules.rule import Call, Rule, targets

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
    """Cut along any dim, where operands that are broadcast along it stay whole."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        inputs: dict[str, Labels | list[Labels]] = {}
        for name in self.operands(call):
            meta = call.meta(name)
            if meta is not None:
                inputs[name] = aligned(labels, call.output, meta)
        return [*label_strategies(call, inputs, [labels]), *self.partial(call)]

    def operands(self, call: Call) -> list[str]:
        """Names of the arguments that are broadcast to the result."""
        return call.tensors()

    def partial(self, call: Call) -> list[Strategy]:
        """Strategies on partial sums: none, for what is not linear."""
        return []


class _Linear(Elementwise):
    """What maps a sum to the sum of its results: partial sums pass through."""

    def partial(self, call: Call) -> list[Strategy]:
        return partial_strategy(call, ["self"])


class _Convert(Elementwise):
    """Another dtype, device or memory format: partial sums pass through where they are not rounded more."""

    def operands(self, call: Call) -> list[str]:
        return ["self"]  # another only shows its dtype

    def partial(self, call: Call) -> list[Strategy]:
        before, after = call.meta("self"), call.output
        if before is None or not _at_least_as_wide(after.dtype, before.dtype):
            return []
        return partial_strategy(call, ["self"])


class _Sum(Elementwise):
    """Sums and differences: of partial sums, if all that is added is."""

    def partial(self, call: Call) -> list[Strategy]:
        if not (isinstance(call["self"], Ref) and isinstance(call["other"], Ref)):
            return []
        return partial_strategy(call, ["self", "other"])


class _Product(Elementwise):
    """Products: one factor may be partial sums."""

    factors: tuple[str, ...] = ("self", "other")

    def partial(self, call: Call) -> list[Strategy]:
        return [
            strategy
            for name in self.factors
            if isinstance(call[name], Ref)
            for strategy in partial_strategy(call, [name])
        ]


class _Quotient(_Product):
    """Quotients: the numerator may be partial sums, unless the result is rounded."""

    factors = ("self",)

    def partial(self, call: Call) -> list[Strategy]:
        return [] if call["rounding_mode"] is not None else super().partial(call)


class _Choice(Elementwise):
    """A condition chooses: both sides may be partial sums."""

    def partial(self, call: Call) -> list[Strategy]:
        if not (isinstance(call["self"], Ref) and isinstance(call["other"], Ref)):
            return []
        return partial_strategy(call, ["self", "other"])


class _Item(Rule):
    """One of several results, as it comes."""

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

RULES: dict[str, Rule] = {
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

"""Rules for convolutional models: convolutions, pools, interpolation, padding.

Owns which dims of them can be split. Halo exchange (splitting an image along its height) is not done.
"""

from __future__ import annotations

from nnx_nnscaler.ir import Argument, Graph, Op
from nnx_nnscaler.placement import P, R, S
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import Labels, label_strategies
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of, with_code

__all__ = [
    "RULES",
    "LeadingDimsRule",
]


# --- convolutions ---------------------------------------------------------------------------------


_MADE, _USED = "output channels", "input channels"


class ConvolutionRule(Rule):
    """Convolutions, plain, grouped and transposed: by batch, by output, by input channels, by groups."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        x, weight = call.shape("input"), call.shape("weight")
        batched: Labels = ("batch",) if len(x) == len(weight) else ()
        if call["groups"] == 1:
            transposed = op.target.startswith("aten.conv_transpose") or bool(call["transposed"])
            labels: dict[str, Labels | list[Labels]] = {
                "input": (*batched, _USED),
                "weight": (_USED, _MADE) if transposed else (_MADE, _USED),
                "bias": (_MADE,),
            }
            return label_strategies(call, labels, [(*batched, _MADE)], summed={_USED})
        by_batch = label_strategies(call, {"input": batched}, [batched])
        if call["groups"] % size:
            return by_batch
        channels = S(len(batched))
        by_group = {"input": channels, "weight": S(0), "bias": S(0)}
        return [*by_batch, call.strategy("groups", by_group, [channels])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.name == "groups":
            return writer.call(with_code(op, groups=str(argument_of(op, "groups") // writer.size)))
        bias = argument_of(op, "bias")
        if strategy.outputs == (P,) and bias is not None:
            return writer.call(with_code(op, bias=f"rt.once({writer.value(bias)})"))
        return writer.call(op)


class LeadingDimsRule(Rule):
    """Operators that do the same for every index of their leading dims: pools, interpolation.

    Args:
        trailing: The number of last dims of the operand cannot be split.
        linear: True if a sum of summands' results is the result of the sum.
    """

    def __init__(self, trailing: int, *, linear: bool = False) -> None:
        self.trailing = trailing
        self.linear = linear

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        call = Call.of(op, graph, size)
        name = call.tensors()[0]
        leading = max(len(call.shape(name)) - self.trailing, 0)
        labels = tuple(_dim_name(dim, leading) for dim in range(leading))
        found = label_strategies(call, {name: labels}, [labels] * len(call.outputs))
        if self.linear:
            found.append(call.strategy("partial", {name: P}, [P] * len(call.outputs)))
        return found


class PadRule(Rule):
    """Padding: any dim that is not padded; summands where the padding is zeros or comes from the values."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        name = call.tensors()[0]
        padded = _padded_dims(call["pad"] or call["padding"], len(call.shape(name)))
        labels = tuple(None if dim in padded else f"dim{dim}" for dim in range(len(call.shape(name))))
        found = label_strategies(call, {name: labels}, [labels])
        constant = "pad" in call.given and call["mode"] in (None, "constant")
        if not (constant and call["value"]):
            found.append(call.strategy("partial", {name: P}, [P]))
        return found


class GridSampleRule(Rule):
    """Sampling images at the points of a grid: by batch, or by channels with the grid on every rank."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        return [
            Strategy("batch", (S(0), S(0)), (S(0),)),
            Strategy("channels", (S(1), R), (S(1),)),
            Strategy("partial", (P, R), (P,)),
        ]


def _dim_name(dim: int, leading: int) -> str:
    """What the dims before the spatial ones are called, counted from them."""
    return {1: "channels", 2: "batch"}.get(leading - dim, f"dim{dim}")


def _padded_dims(pad: Argument, ndim: int) -> set[int]:
    """The dims that a list of paddings touches; it counts them from the last one, two numbers each."""
    return {ndim - 1 - index // 2 for index, amount in enumerate(pad) if amount != 0}


_CONVOLUTIONS = (
    *(f"conv{n}d" for n in (1, 2, 3)),
    *(f"conv_transpose{n}d" for n in (1, 2, 3)),
    "convolution",
)
_MAX_POOLS = ("max_pool{n}d", "adaptive_max_pool{n}d", "max_pool{n}d_with_indices")
_AVERAGE_POOLS = ("avg_pool{n}d", "adaptive_avg_pool{n}d", "_adaptive_avg_pool{n}d")
_INTERPOLATIONS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_bicubic2d _upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}
_PADS = (
    "pad",
    "constant_pad_nd",
    *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)),
)

_OF_WINDOWS: dict[str, Rule] = {
    **{f"aten.{name}": ConvolutionRule() for name in _CONVOLUTIONS},
    **{f"aten.{name.format(n=n)}": LeadingDimsRule(n) for name in _MAX_POOLS for n in (1, 2, 3)},
    **{
        f"aten.{name.format(n=n)}": LeadingDimsRule(n, linear=True)
        for name in _AVERAGE_POOLS
        for n in (1, 2, 3)
    },
    **{
        f"aten.{name}": LeadingDimsRule(trailing, linear=True)
        for trailing, names in _INTERPOLATIONS.items()
        for name in names.split()
    },
    **{f"aten.{name}": PadRule() for name in _PADS},
    **{f"aten.{name}": GridSampleRule() for name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")},
}
"""Rule of every operator of this family."""


# --- normalization --------------------------------------------------------------------------------
# Rules for normalisation over channels: batch norm, group norm, instance norm.
#
# Owns which dims of them can be split and which runtime function then keeps statistics right. Layer norm
# and RMS norm, whose statistics lie within one row, are among the transformers' operators.


_BY_CHANNEL = {
    "input": S(1),
    "weight": S(0),
    "bias": S(0),
    "running_mean": S(0),
    "running_var": S(0),
}


class BatchNormRule(Rule):
    """Batch norm: by channels, or by batch and other dims with statistics over the whole unit.

    Running statistics are buffers that every rank keeps whole, so what updates them needs a runtime function.
    """

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        over_unit = "batch_norm_over_unit" if call["training"] else ""
        dims = [dim for dim in range(len(call.shape("input"))) if dim != 1]
        found = [
            call.strategy("batch" if dim == 0 else f"dim{dim}", {"input": S(dim)}, [S(dim)], call=over_unit)
            for dim in dims
        ]
        if call["training"] and call["running_mean"] is not None:
            wanted = _BY_CHANNEL | {"running_mean": R, "running_var": R}
            return [*found, call.strategy("channels", wanted, [S(1)], call="batch_norm_of_channels")]
        return [*found, call.strategy("channels", _BY_CHANNEL, [S(1)])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if not strategy.call:
            return writer.call(op)
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        return f"rt.{strategy.call}({', '.join(writer.value(argument_of(op, name)) for name in names)})"


class GroupNormRule(Rule):
    """Group norm: by batch, or by whole groups of channels."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        by_batch = call.strategy("batch", {"input": S(0)}, [S(0)])
        if call["num_groups"] % size:
            return [by_batch]
        return [by_batch, call.strategy("groups", _BY_CHANNEL, [S(1)])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.name != "groups":
            return writer.call(op)
        return writer.call(with_code(op, num_groups=str(argument_of(op, "num_groups") // writer.size)))


class InstanceNormRule(Rule):
    """Instance norm: by batch and by channels, unless it updates running statistics."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        if call["use_input_stats"] and call["running_mean"] is not None:
            return []
        return [
            call.strategy("batch", {"input": S(0)}, [S(0)]),
            call.strategy("channels", _BY_CHANNEL, [S(1)]),
        ]


RULES: dict[str, Rule] = {
    **_OF_WINDOWS,
    "aten.batch_norm": BatchNormRule(),
    "aten.group_norm": GroupNormRule(),
    "aten.instance_norm": InstanceNormRule(),
}
"""Rule of every operator of this family."""

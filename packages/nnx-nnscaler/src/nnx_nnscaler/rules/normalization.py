"""Rules for normalisation over channels: batch norm, group norm, instance norm.

Owns which dims of them can be split and which runtime function then keeps statistics right. Layer norm and
RMS norm, whose statistics lie within one row, are among the transformers' operators.
"""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op
from nnx_nnscaler.placement import R, S
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of, with_code

__all__ = ["RULES", "BatchNormRule", "GroupNormRule", "InstanceNormRule"]

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

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
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

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:  # noqa: D102
        if not strategy.call:
            return writer.call(op)
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        return f"rt.{strategy.call}({', '.join(writer.value(argument_of(op, name)) for name in names)})"


class GroupNormRule(Rule):
    """Group norm: by batch, or by whole groups of channels."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        call = Call.of(op, graph, size)
        by_batch = call.strategy("batch", {"input": S(0)}, [S(0)])
        if call["num_groups"] % size:
            return [by_batch]
        return [by_batch, call.strategy("groups", _BY_CHANNEL, [S(1)])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:  # noqa: D102
        if strategy.name != "groups":
            return writer.call(op)
        return writer.call(with_code(op, num_groups=str(argument_of(op, "num_groups") // writer.size)))


class InstanceNormRule(Rule):
    """Instance norm: by batch and by channels, unless it updates running statistics."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        call = Call.of(op, graph, size)
        if call["use_input_stats"] and call["running_mean"] is not None:
            return []
        return [
            call.strategy("batch", {"input": S(0)}, [S(0)]),
            call.strategy("channels", _BY_CHANNEL, [S(1)]),
        ]


RULES: dict[str, Rule] = {
    "aten.batch_norm": BatchNormRule(),
    "aten.group_norm": GroupNormRule(),
    "aten.instance_norm": InstanceNormRule(),
}
"""Rule of every operator of this family."""

"""Operators that draw random numbers: every rank draws what one process would, and keeps its part."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import dim_labels, label_strategies, partial_strategy
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of, targets


class _Dropout(Rule):
    """Cut along any dim; linear for a given mask, which all ranks draw alike."""

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
    """Random numbers that nothing is differentiated through: all ranks draw all of them."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        return []

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        return f"rt.drawn(lambda: {writer.call(op)})"


_DRAW = _Draw()
_DRAWING = "bernoulli multinomial normal rand rand_like randint randint_like randn randn_like randperm"
RULES: dict[str, Rule] = {"aten.dropout": _Dropout(), **dict.fromkeys(targets(_DRAWING), _DRAW)}

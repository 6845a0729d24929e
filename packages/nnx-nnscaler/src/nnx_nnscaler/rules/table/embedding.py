"""Looking up rows of a table: cut by samples, by columns, or by rows of the vocabulary."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op
from nnx_nnscaler.placement import P
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import dim_labels, label_strategies
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of

_VOCABULARY = "vocabulary"


class _Embedding(Rule):
    """The table is cut by columns, or by rows: then each rank knows some, and makes zeros of the others."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        if call["scale_grad_by_freq"] or call["sparse"]:
            return []  # counts over all samples; gradients that cannot be summed as they are
        leading = dim_labels(call, call.output.shape)[:-1]
        inputs = {"weight": (_VOCABULARY, "column"), "indices": leading}
        found = label_strategies(call, inputs, [(*leading, "column")], summed=[_VOCABULARY])
        return [s for s in found if s.outputs[0] != P or s.inputs[0].groups == 1]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.outputs[0] != P:
            return writer.call(op)
        arguments = [writer.value(argument_of(op, name)) for name in ("weight", "indices")]
        padding = argument_of(op, "padding_idx")
        if padding != -1:
            arguments.append(f"padding_idx={padding}")
        return f"rt.embedding_rows({', '.join(arguments)})"

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        return Call.of(op, graph, 1).shape("weight")[0]


RULES: dict[str, Rule] = {"aten.embedding": _Embedding()}

"""Scaled dot product attention: cut by samples, by heads, or by queries."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op, TensorMeta
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import Labels, aligned, dim_labels, label_strategies
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of


class _Attention(Rule):
    """Heads are independent, and so are samples; a rank can also take some queries and all keys.

    Heads of keys and values may be fewer: each serves a run of query heads, so that equal parts fit together.
    With dropout a rank needs its part of the mask of all, which takes the place of the fused operator.
    """

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        query, key = call.meta("query"), call.meta("key")
        if query is None or key is None or len(query.shape) < 3:
            return []
        labels = self._labels(call, query)
        together = tuple(
            label if own == other or (call["enable_gqa"] and label == "heads") else None
            for label, own, other in zip(labels[:-2], query.shape, key.shape, strict=False)
        )
        inputs: dict[str, Labels | list[Labels]] = {
            "query": labels,
            "key": (*together, None, None),
            "value": (*together, None, None),
        }
        mask = call.meta("attn_mask")
        if mask is not None:
            scores = TensorMeta((*query.shape[:-1], key.shape[-2]), mask.dtype)
            inputs["attn_mask"] = aligned(labels, scores, mask)
        cut = label_strategies(call, inputs, [labels])
        return [s for s in cut if call.given and all(p.groups == 1 for p in s.inputs)]

    def _labels(self, call: Call, query: TensorMeta) -> Labels:
        leading = list(dim_labels(call, query.shape)[:-2])
        if len(query.shape) > 3:
            leading[-1] = "heads"
        return (*leading, None if call["is_causal"] else "query", None)

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if not argument_of(op, "dropout_p"):
            return writer.call(op)
        arguments = [writer.value(argument_of(op, name)) for name in ("query", "key", "value", "attn_mask")]
        arguments.append(f"p={argument_of(op, 'dropout_p')}")
        for name in ("is_causal", "scale", "enable_gqa"):
            if argument_of(op, name):
                arguments.append(f"{name}={writer.value(argument_of(op, name))}")
        if strategy.outputs[0].is_shard:
            arguments.append(f"dim={strategy.outputs[0].dim}")
        return f"rt.attention({', '.join(arguments)})"


RULES: dict[str, Rule] = {"aten.scaled_dot_product_attention": _Attention()}

"""Draw the random masks of a batch before it is cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nnx_core.errors import UnsupportedError
from nnx_nnscaler.ir.graph import Dim, Graph, Input, Op, Ref, TensorMeta
from nnx_nnscaler.plan.work import base_name
from nnx_nnscaler.rules.rule import (
    argument_of,
    operator_of,
)


@dataclass(frozen=True, slots=True)
class Draw:
    """A dropout mask that is drawn for the complete batch, as in one process.

    Attributes:
        name: The input for the mask.
        meta: The shape and dtype.
        p: The probability of a zero.
    """

    name: str
    meta: TensorMeta
    p: float


def draw_masks_first(graph: Graph) -> tuple[Graph, tuple[Draw, ...]]:
    """Return the graph with inputs for its dropout masks, and the masks to draw for them, in order.

    Args:
        graph: A traced forward.

    Raises:
        UnsupportedError: The graph draws random numbers in another way.
    """
    ops: list[Op] = []
    draws: list[Draw] = []
    constants = dict(graph.constants)
    for op in graph.ops:
        if not is_random(op):
            ops.append(op)
            continue
        mask = f"mask_of_{op.name}"
        if op.target == "aten.dropout.default" and isinstance(op.output, TensorMeta):
            operand = argument_of(op, "input")
            draws.append(Draw(mask, replace(op.output, differentiable=False), float(argument_of(op, "p"))))
            ops.append(replace(op, target="aten.mul.Tensor", args=(operand, Ref(mask)), kwargs={}))
        elif base_name(op) == "scaled_dot_product_attention":
            attention = _Attention(op, graph, mask)
            draws.append(attention.draw)
            ops += attention.ops
            constants |= attention.constants
        else:
            raise UnsupportedError(
                f"{op.target} draws random numbers ({op.source or op.module}); stages would differ.",
                remedy="Draw them outside of the forward, and pass them as an input.",
            )
    if not draws:
        return graph, ()
    inputs = [*graph.inputs, *(Input(draw.name, draw.meta) for draw in draws)]
    made = {name: meta_of(tensor) for name, tensor in constants.items() if name not in graph.constants}
    metas = {**graph.metas, **made, **{draw.name: draw.meta for draw in draws}}
    return replace(graph, inputs=inputs, metas=metas, ops=ops, constants=constants), tuple(draws)


def meta_of(tensor: Tensor) -> TensorMeta:
    """Return the description of a constant."""
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class _Attention:
    """Attention with dropout as single operators, of which one multiplies the weights by a mask.

    Args:
        op: The operator.
        graph: The graph of the operator.
        mask: The name of the mask.
    """

    def __init__(self, op: Op, graph: Graph, mask: str) -> None:
        self.ops: list[Op] = []
        self.constants: dict[str, Tensor] = {}
        self._op = op
        query, key, value = (argument_of(op, name) for name in ("query", "key", "value"))
        metas = {name: graph.meta(argument_of(op, name).name) for name in ("query", "key", "value")}
        scores = (*metas["query"].shape[:-1], metas["key"].shape[-2])
        shared = 1
        if argument_of(op, "enable_gqa"):
            shared = metas["query"].hints[-3] // metas["key"].hints[-3]
        key_shape, value_shape = metas["key"].shape, metas["value"].shape
        if shared > 1:
            key_shape = (*key_shape[:-3], metas["query"].shape[-3], *key_shape[-2:])
            value_shape = (*value_shape[:-3], metas["query"].shape[-3], *value_shape[-2:])
            key = self._step("keys", "aten.repeat_interleave.self_int", (key, shared, -3), key_shape)
            value = self._step("values", "aten.repeat_interleave.self_int", (value, shared, -3), value_shape)
        turned = (*key_shape[:-2], key_shape[-1], key_shape[-2])
        key = self._step("turned_keys", "aten.transpose.int", (key, -2, -1), turned)
        found = self._step("products", "aten.matmul.default", (query, key), scores)
        scale = argument_of(op, "scale")
        scale = metas["query"].hints[-1] ** -0.5 if scale is None else scale
        found = self._step("scores", "aten.mul.Tensor", (found, scale), scores)
        found = self._masked(found, graph, scores)
        found = self._step("weights", "aten._safe_softmax.default", (found, -1), scores)
        found = self._step("dropped", "aten.mul.Tensor", (found, Ref(mask)), scores)
        self.ops.append(replace(op, target="aten.matmul.default", args=(found, value), kwargs={}))
        dtype = metas["query"].dtype
        self.draw = Draw(mask, TensorMeta(scores, dtype), float(argument_of(op, "dropout_p")))

    def _masked(self, found: Ref, graph: Graph, scores: tuple[Dim, ...]) -> Ref:
        """Return the scores with masked positions removed."""
        mask = argument_of(self._op, "attn_mask")
        if argument_of(self._op, "is_causal"):
            queries, keys = scores[-2:]
            if not (isinstance(queries, int) and isinstance(keys, int)):
                raise UnsupportedError(
                    f"{self._op.name} is causal attention with dropout over a length that may change.",
                    remedy="Pass the mask of the attention, or set its dropout to 0.",
                )
            name = f"later_keys_of_{self._op.name}"
            self.constants[name] = torch.ones(queries, keys, dtype=torch.bool).triu(1)
            arguments = (found, Ref(name), float("-inf"))
            return self._step("causal_scores", "aten.masked_fill.Scalar", arguments, scores)
        if mask is None:
            return found
        meta = graph.meta(mask.name)
        if meta.dtype != "bool":
            return self._step("masked_scores", "aten.add.Tensor", (found, mask), scores)
        hidden = self._step("hidden", "aten.logical_not.default", (mask,), meta.shape, "bool")
        return self._step("masked_scores", "aten.masked_fill.Scalar", (found, hidden, float("-inf")), scores)

    def _step(
        self, name: str, target: str, args: tuple[Any, ...], shape: tuple[Dim, ...], dtype: str = ""
    ) -> Ref:
        """Add an operator, and return a reference to its result."""
        output = self._op.output
        assert isinstance(output, TensorMeta)
        meta = TensorMeta(shape, dtype or output.dtype, output.differentiable and not dtype)
        name = f"{self._op.name}_{name}"
        self.ops.append(replace(self._op, name=name, target=target, args=args, kwargs={}, output=meta))
        return Ref(name)


def is_random(op: Op) -> bool:
    """Return True if an operator draws random numbers."""
    operator = operator_of(op.target)
    if operator is None or torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    name = base_name(op)
    if name == "scaled_dot_product_attention":
        return bool(argument_of(op, "dropout_p"))
    if name == "dropout":
        return bool(argument_of(op, "p")) and bool(argument_of(op, "train"))
    return True

"""Matrix products: cut by rows, columns and batch dims, or along the dim that is summed."""

from __future__ import annotations

from collections.abc import Mapping

from nnx_nnscaler.ir import Graph, Op, Ref
from nnx_nnscaler.placement import P
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import Labels, aligned, dim_labels, label_strategies
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of, with_code

__all__ = ["RULES"]

_Inputs = Mapping[str, Labels | list[Labels]]

SUMMED = "row"
"""The label of the dim that a product sums over: a weight is cut by rows of the matrix it multiplies with."""


class _MatrixProduct(Rule):
    """What all matrix products share.

    Attributes:
        addend: Name of the argument that is added to the product: of partial sums, one contains it.
    """

    addend = ""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        inputs, output = self.labels(call)
        return label_strategies(call, inputs, [output], summed=[SUMMED])

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        """Labels of the arguments and of the result."""
        raise NotImplementedError

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        addend = argument_of(op, self.addend) if self.addend else None
        if strategy.outputs[0] != P or not isinstance(addend, Ref):
            return writer.call(op)
        return writer.call(with_code(op, **{self.addend: f"rt.once({writer.value(addend)})"}))


class _Linear(_MatrixProduct):
    addend = "bias"

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        leading = dim_labels(call, call.output.shape)[:-1]
        if len(call.shape("weight")) == 1:
            leading = dim_labels(call, call.output.shape)
            return {"input": (*leading, SUMMED), "weight": (SUMMED,), "bias": ()}, leading
        inputs = {"input": (*leading, SUMMED), "weight": ("column", SUMMED), "bias": ("column",)}
        return inputs, (*leading, "column")


class _Matmul(_MatrixProduct):
    """Products of stacks of matrices; the dims before the last two are broadcast."""

    names = ("self", "other")

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        left, right = self.names
        output = list(dim_labels(call, call.output.shape))
        if len(call.shape(right)) > 1:
            output[-1] = "column"
        stack = len(output) - (len(call.shape(left)) > 1) - (len(call.shape(right)) > 1)
        rows = [output[stack]] if len(call.shape(left)) > 1 else []
        columns = ["column"] if len(call.shape(right)) > 1 else []
        return {
            left: self._stacked(call, left, output[:stack], [*rows, SUMMED]),
            right: self._stacked(call, right, output[:stack], [SUMMED, *columns]),
        }, tuple(output)

    def _stacked(self, call: Call, name: str, stack: list[str | None], matrix: list[str | None]) -> Labels:
        """Labels of one factor, whose stack may be broadcast."""
        shape = call.shape(name)
        own = len(shape) - len(matrix)
        wanted = call.output.hints[len(stack) - own : len(stack)]
        broadcast = [
            label if size == target else None
            for label, size, target in zip(stack[len(stack) - own :], shape[:own], wanted, strict=True)
        ]
        return (*broadcast, *matrix)


class _BatchedProduct(_Matmul):
    names = ("self", "mat2")


class _AddedProduct(_Matmul):
    """A product and an addend that is broadcast to it."""

    addend = "self"

    def __init__(self, left: str, right: str) -> None:
        self.names = (left, right)

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        inputs, output = super().labels(call)
        addend = call.meta("self")
        assert addend is not None  # its schema says so
        return {"self": aligned(output, call.output, addend), **inputs}, output


class _Outer(_MatrixProduct):
    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        output = dim_labels(call, call.output.shape)
        return {"self": output[:1], "vec2": output[1:]}, output


class _Einsum(Rule):
    """Products by an equation of letters, without ellipsis; every letter that no result has is summed."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        equation = str(call["equation"]).replace(" ", "")
        if "->" not in equation or "." in equation:
            return []
        left, _, right = equation.partition("->")
        terms = left.split(",")
        metas = call.metas("tensors")
        sizes: dict[str, int] = {}
        for term, meta in zip(terms, metas, strict=True):
            for letter, hint in zip(term, meta.hints, strict=True):
                sizes[letter] = max(hint, sizes.get(letter, 1))
        inputs: list[Labels] = [
            tuple(
                letter if hint == sizes[letter] else None
                for letter, hint in zip(term, meta.hints, strict=True)
            )
            for term, meta in zip(terms, metas, strict=True)
        ]
        summed = [letter for letter in sizes if letter not in right]
        if any(None in labels for labels in inputs):
            summed = []  # a letter that is broadcast and summed counts for more than it shows
        return label_strategies(call, {"tensors": inputs}, [tuple(right)], summed=summed)


_MATMUL, _BATCHED = _Matmul(), _BatchedProduct()

RULES: dict[str, Rule] = {
    "aten.linear": _Linear(),
    "aten.matmul": _MATMUL,
    "aten.__matmul__": _MATMUL,
    "aten.mm": _BATCHED,
    "aten.bmm": _BATCHED,
    "aten.addmm": _AddedProduct("mat1", "mat2"),
    "aten.baddbmm": _AddedProduct("batch1", "batch2"),
    "aten.outer": _Outer(),
    "aten.einsum": _Einsum(),
}

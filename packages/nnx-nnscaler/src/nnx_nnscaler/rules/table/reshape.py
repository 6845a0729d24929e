"""Operators that keep all elements in their order and only give them another shape."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nnx_nnscaler.ir import Dim, Graph, Op, Size, TensorMeta, hint_of
from nnx_nnscaler.placement import Placement, S
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import MOST_GROUPS, dim_labels, groups_at, partial_strategy
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of, targets


class _Side(NamedTuple):
    """One side of a reshape: a shape, and those of its dims that hold the same elements as the other's."""

    value: str
    shape: tuple[Dim, ...]
    dims: list[int]


class Reshape(Rule):
    """Another shape, whatever the operator is called.

    Dims before and after fall into blocks of equal size. Within a block, a cut is told by how many equal
    parts the elements fall into before each is cut: of ``S(d, groups)``, the product of the sizes before
    ``d`` and the groups. The same number on the other side is the same cut.
    """

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        names = dim_labels(call, call.output.shape)
        found = []
        for source, target in self._pairs(call, before.shape):
            groups = f"/{target.groups}" if target.groups > 1 else ""
            inputs = {"self": source, "other": target}  # which some take the shape of
            found.append(call.strategy(f"{names[target.dim]}{groups}", inputs, [target]))
        return [*found, *partial_strategy(call, ["self"])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:  # noqa: D102
        if not strategy.outputs[0].is_shard or not isinstance(op.output, TensorMeta):
            return writer.call(op)
        shape = writer.shape(op.output, strategy.outputs[0])
        return f"{writer.value(argument_of(op, 'self'))}.reshape({shape})"

    def _pairs(self, call: Call, shape: tuple[Dim, ...]) -> list[tuple[Placement, Placement]]:
        """The cuts before and after that leave every rank the same elements."""
        found: dict[tuple[Placement, Placement], None] = {}
        for dims_before, dims_after in _blocks(call, shape, call.output.shape):
            before = _Side(call.op.operands()[0], shape, dims_before)
            after = _Side(call.op.name, call.output.shape, dims_after)
            for source in _cuts(call, before):
                target = _same_cut(source, before, after, call.size)
                if target is not None and _is_wanted(call, before, after, source, target):
                    found[source, target] = None
            for target in _cuts(call, after):
                origin = _same_cut(target, after, before, call.size)
                if origin is not None and _is_wanted(call, before, after, origin, target):
                    found[origin, target] = None
        return list(found)


def _cuts(call: Call, side: _Side) -> Iterator[Placement]:
    for dim in side.dims:
        for groups in sorted({1, *groups_at(call.graph, call.size, side.value, dim)}):
            yield S(dim, groups=groups)


def _same_cut(placement: Placement, side: _Side, other: _Side, size: int) -> Placement | None:
    """The placement on the other side that leaves every rank the same elements."""
    parts = placement.groups
    for dim in side.dims[: side.dims.index(placement.dim)]:
        if isinstance(side.shape[dim], Size):
            return None  # as many parts as there are samples
        parts *= hint_of(side.shape[dim])
    leading = 1
    for dim in other.dims:
        extent = hint_of(other.shape[dim])
        if parts % leading == 0 and extent % (parts // leading * size) == 0:
            return S(dim, groups=parts // leading)
        if isinstance(other.shape[dim], Size):
            return None
        leading *= extent
    return None


def _is_wanted(call: Call, before: _Side, after: _Side, source: Placement, target: Placement) -> bool:
    """Whether a pair is worth a strategy: not grouped, or asked for beside, or a dim split into few.

    What is cut last of many parts is features of every head, which no operator needs: up to three parts are
    more likely to be queries, keys and values.
    """
    few = MOST_GROUPS if target.dim != after.dims[-1] else MOST_GROUPS - 1
    if target.groups == 1 and source.groups <= few:
        return True
    noted = (groups_at(call.graph, call.size, s.value, p.dim) for s, p in ((before, source), (after, target)))
    return any(p.groups in groups for groups, p in zip(noted, (source, target), strict=True))


def _blocks(call: Call, before: Sequence[Dim], after: Sequence[Dim]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dims before and after with equal products; dims of size 1 are left out."""
    left, right = _sizes(call.graph, before), _sizes(call.graph, after)
    while left and right:
        dims_left, dims_right = [left[0][0]], [right[0][0]]
        product_left, product_right = left.pop(0)[1], right.pop(0)[1]
        while product_left != product_right:
            if product_left[0] < product_right[0] and left:
                dim, sizes = left.pop(0)
                dims_left.append(dim)
                product_left = (product_left[0] * sizes[0], product_left[1] * sizes[1])
            elif product_left[0] > product_right[0] and right:
                dim, sizes = right.pop(0)
                dims_right.append(dim)
                product_right = (product_right[0] * sizes[0], product_right[1] * sizes[1])
            else:
                return  # equal for the traced sizes only, or not a form that is known
        yield dims_left, dims_right


def _sizes(graph: Graph, shape: Sequence[Dim]) -> list[tuple[int, tuple[int, int]]]:
    """Every dim with its traced size and its size for other values of the symbols."""
    symbols = other_symbols(graph)
    found = []
    for index, dim in enumerate(shape):
        other = size_at(dim, symbols)
        if dim != 1:
            found.append((index, (hint_of(dim), -index - 1 if other is None else other)))
    return found


_RESHAPE = Reshape()

RULES: dict[str, Rule] = dict.fromkeys(
    targets("_unsafe_view flatten ravel reshape reshape_as squeeze unflatten unsqueeze view.default view_as"),
    _RESHAPE,
)


# --- sizes -----------------------------------------------------------------------------------------------
#
# Values of symbolic sizes, by reading their expressions; nothing is executed.


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def other_symbols(graph: Graph) -> dict[str, int]:
    """Other values for a graph's symbols than those traced, to tell sizes that happen to be equal."""
    return {name: 10_007 + 2 * index for index, name in enumerate(graph.symbols)}


def size_at(dim: Dim, symbols: Mapping[str, int]) -> int | None:
    """The value of a size for given symbols; None where its expression has other forms than arithmetic.

    Example:
        >>> from nnx_nnscaler.ir import Size
        >>> size_at(Size("16*B + 1", 33), {"B": 3})
        49
    """
    if isinstance(dim, int):
        return dim
    try:
        return _value(ast.parse(dim.expr, mode="eval").body, symbols)
    except (KeyError, SyntaxError, TypeError, ZeroDivisionError):
        return None


def _value(node: ast.expr, symbols: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, symbols), _value(node.right, symbols))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, symbols)
    raise TypeError(node)

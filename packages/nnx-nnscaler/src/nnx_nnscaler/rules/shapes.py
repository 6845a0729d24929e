"""Split operators that compute nothing: shapes, orders, repeats, splits, concatenations."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nnx_nnscaler.ir.graph import Argument, Dim, Graph, Op, Size, TensorMeta, hint_of
from nnx_nnscaler.ir.placement import Placement, S, Strategy
from nnx_nnscaler.rules.rule import (
    MOST_GROUPS,
    Call,
    Labels,
    Rule,
    Writer,
    aligned,
    argument_of,
    dim_labels,
    groups_at,
    input_values,
    label_strategies,
    output_values,
    partial_strategy,
    targets,
)

__all__ = ["RULES"]

# Operators that keep all elements in their order and only change the shape.


class _Side(NamedTuple):
    """One side of a reshape: a shape, and the dims that hold the same elements as the other side's."""

    value: str
    shape: tuple[Dim, ...]
    dims: list[int]


class Reshape(Rule):
    """Any reshaping operator.

    Dims before and after form blocks of equal size. Within a block, the number of equal runs of elements
    before each run is sharded identifies a shard: for ``S(d, groups)``, the product of the sizes before ``d``
    and the groups. The same number on the other side is the same shard.
    """

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        names = dim_labels(call, call.output.shape)
        found = []
        for source, target in self._pairs(call, before.shape):
            groups = f"/{target.groups}" if target.groups > 1 else ""
            inputs = {"self": source, "other": target}  # some operators take the shape of `other`
            found.append(call.strategy(f"{names[target.dim]}{groups}", inputs, [target]))
        return [*found, *partial_strategy(call, ["self"])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if not strategy.outputs[0].is_shard or not isinstance(op.output, TensorMeta):
            return writer.call(op)
        shape = writer.shape(op.output, strategy.outputs[0])
        return f"{writer.value(argument_of(op, 'self'))}.reshape({shape})"

    def _pairs(self, call: Call, shape: tuple[Dim, ...]) -> list[tuple[Placement, Placement]]:
        """Return the shards before and after that leave every rank the same elements."""
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
    """Return the placement on the other side that leaves every rank the same elements."""
    parts = placement.groups
    for dim in side.dims[: side.dims.index(placement.dim)]:
        if isinstance(side.shape[dim], Size):
            return None  # it would need as many runs as there are samples
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
    """Return True if a pair is worth a strategy: not grouped, or a neighbor asks for it, or of few groups.

    Many groups mean features of every head, which no operator needs. Up to three groups are more likely to be
    queries, keys and values.
    """
    few = MOST_GROUPS if target.dim != after.dims[-1] else MOST_GROUPS - 1
    if target.groups == 1 and source.groups <= few:
        return True
    noted = (groups_at(call.graph, call.size, s.value, p.dim) for s, p in ((before, source), (after, target)))
    return any(p.groups in groups for groups, p in zip(noted, (source, target), strict=True))


def _blocks(call: Call, before: Sequence[Dim], after: Sequence[Dim]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of dims before and after with equal products, without dims of size 1."""
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
                return  # equal for the traced sizes only, or an unknown form
        yield dims_left, dims_right


def _sizes(graph: Graph, shape: Sequence[Dim]) -> list[tuple[int, tuple[int, int]]]:
    """Return every dim with its traced size and its size for other values of the symbols."""
    symbols = other_symbols(graph)
    found = []
    for index, dim in enumerate(shape):
        other = size_at(dim, symbols)
        if dim != 1:
            found.append((index, (hint_of(dim), -index - 1 if other is None else other)))
    return found


_RESHAPE = Reshape()

_SAME_ORDER: dict[str, Rule] = dict.fromkeys(
    targets("_unsafe_view flatten ravel reshape reshape_as squeeze unflatten unsqueeze view.default view_as"),
    _RESHAPE,
)


# Evaluate symbolic sizes by parsing their expressions, without executing code.


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def other_symbols(graph: Graph) -> dict[str, int]:
    """Return other values of a graph's symbols, to recognize sizes that are equal by chance."""
    return {name: 10_007 + 2 * index for index, name in enumerate(graph.symbols)}


def size_at(dim: Dim, symbols: Mapping[str, int]) -> int | None:
    """Return the value of a size for given symbols; None if its expression is more than arithmetic.

    Example:
        >>> from nnx_nnscaler.ir.graph import Size
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


# Operators that permute, repeat, split or concatenate, without computing anything.


class _View(Rule):
    """An operator whose operand's dims all reappear in its result, or are replicated."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = self.labels(call)
        if labels is None:
            return []
        return [*label_strategies(call, {"self": labels[0]}, [labels[1]]), *partial_strategy(call, ["self"])]

    def labels(self, call: Call) -> tuple[Labels, Labels] | None:
        """Return the labels of the operand and of the result; None for an unknown form."""
        raise NotImplementedError


class _Permute(_View):
    def labels(self, call: Call) -> tuple[Labels, Labels] | None:
        order = self.order(call, len(call.output.shape))
        after = dim_labels(call, call.output.shape)
        return tuple(after[order.index(dim)] for dim in range(len(order))), after

    def order(self, call: Call, ndim: int) -> list[int]:
        """Return the operand's dim behind every dim of the result."""
        return [call.dim(dim) for dim in call["dims"]]


class _Transpose(_Permute):
    def order(self, call: Call, ndim: int) -> list[int]:
        order = list(range(ndim))
        first, second = self.swapped(call)
        order[first], order[second] = order[second], order[first]
        return order

    def swapped(self, call: Call) -> tuple[int, int]:
        """Return the two dims that change places."""
        names = ("dim0", "dim1") if call["dim0"] is not None else ("axis0", "axis1")
        return call.dim(call[names[0]]), call.dim(call[names[1]])


class _MatrixTranspose(_Transpose):
    def swapped(self, call: Call) -> tuple[int, int]:
        return (0, 0) if len(call.output.shape) < 2 else (call.dim(-2), call.dim(-1))


class _ReverseDims(_Permute):
    def order(self, call: Call, ndim: int) -> list[int]:
        return list(reversed(range(ndim)))


class _MoveDim(_Permute):
    def order(self, call: Call, ndim: int) -> list[int]:
        source, destination = _as_list(call["source"]), _as_list(call["destination"])
        moved = {call.dim(to): call.dim(dim) for dim, to in zip(source, destination, strict=True)}
        rest = iter([dim for dim in range(ndim) if dim not in moved.values()])
        return [moved[dim] if dim in moved else next(rest) for dim in range(ndim)]


class _Expand(Rule):
    """Expansion along dims of size 1 and new dims, where every rank makes its shard from all elements."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        after = dim_labels(call, call.output.shape)
        inputs: dict[str, Labels | list[Labels]] = {
            "self": aligned(after, call.output, before),
            "other": after,
        }
        return [*label_strategies(call, inputs, [after]), *partial_strategy(call, ["self"])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if not strategy.outputs[0].is_shard or not isinstance(op.output, TensorMeta):
            return writer.call(op)
        shape = writer.shape(op.output, strategy.outputs[0])
        return f"{writer.value(argument_of(op, 'self'))}.expand({shape})"


class _AlongDim(_View):
    """Operators along one dim that leave all others unchanged."""

    def labels(self, call: Call) -> tuple[Labels, Labels] | None:
        after = dim_labels(call, call.output.shape)
        before = call.meta("self")
        if before is None or len(before.shape) != len(after):
            return None
        whole = tuple(label if index not in self.worked(call) else None for index, label in enumerate(after))
        return whole, whole

    def worked(self, call: Call) -> list[int]:
        """Return the dims that it works along."""
        dims = _as_list(call["dims"] if call["dims"] is not None else call["dim"])
        return [call.dim(dim) for dim in dims] or list(range(len(call.output.shape)))


class _Slice(_AlongDim):
    def worked(self, call: Call) -> list[int]:
        whole = call["step"] == 1 and call.shape("self") == call.output.hints
        return [] if whole else super().worked(call)


class _Select(_View):
    def labels(self, call: Call) -> tuple[Labels, Labels] | None:
        after = dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"], len(after) + 1)
        return (*after[:dim], None, *after[dim:]), after


class _Repeat(_View):
    """Copies one after the other, along dims that are not sharded.

    Args:
        times: The name of the argument with the number of copies.
    """

    def __init__(self, times: str) -> None:
        self.times = times

    def labels(self, call: Call) -> tuple[Labels, Labels] | None:
        after = dim_labels(call, call.output.shape)
        repeats = [1] * (len(after) - len(_as_list(call[self.times]))) + _as_list(call[self.times])
        whole = tuple(label if times == 1 else None for label, times in zip(after, repeats, strict=True))
        return whole[len(repeats) - len(call.shape("self")) :], whole


class _RepeatInterleave(_AlongDim):
    """Repeats each element next to itself, so that shards stay shards."""

    def worked(self, call: Call) -> list[int]:
        return []

    def labels(self, call: Call) -> tuple[Labels, Labels] | None:
        return None if call["dim"] is None or call["output_size"] is not None else super().labels(call)


class _Parts(Rule):
    """Splits of a tensor along a dim: sharded along another dim, or equally within every result."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        dim = call.dim(call["dim"], len(call.shape("self")))
        before = dim_labels(call, call.output.shape)
        whole = tuple(label if index != dim else None for index, label in enumerate(before))
        found = label_strategies(call, {"self": whole}, [whole] * len(call.outputs))
        found += self._cut_alike(call, dim)
        return [*found, *partial_strategy(call, ["self"])]

    def _cut_alike(self, call: Call, dim: int) -> list[Strategy]:
        parts = len(call.outputs)
        extents = {meta.hints[dim] for meta in call.outputs}
        if len(extents) != 1 or parts * extents.pop() != call.shape("self")[dim]:
            return []
        values = zip(
            [*input_values(call.op)[:1], *output_values(call.op)], [parts, *[1] * parts], strict=True
        )
        wanted = {
            groups // within
            for value, within in values
            for groups in groups_at(call.graph, call.size, value, dim)
            if groups % within == 0
        }
        return [
            call.strategy(
                f"parts/{parts * groups}",
                {"self": S(dim, groups=parts * groups)},
                [S(dim, groups=groups)] * parts,
            )
            for groups in sorted({1, *wanted})
        ]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        dim = argument_of(op, "dim")
        pieces = argument_of(op, "split_size") or argument_of(op, "split_sizes")
        if pieces is None or not _is_cut(strategy.outputs[0], dim, op):
            return writer.call(op)
        if isinstance(pieces, (list, tuple)):
            local = "[" + ", ".join(writer.dim(piece, sharded=True) for piece in pieces) + "]"
        else:
            local = writer.dim(pieces, sharded=True)
        return f"{writer.value(argument_of(op, 'self'))}.split({local}, {dim})"


class _Unbind(Rule):
    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        after = dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"], len(after) + 1)
        before = (*after[:dim], None, *after[dim:])
        found = label_strategies(call, {"self": before}, [after] * len(call.outputs))
        return [*found, *partial_strategy(call, ["self"])]


class _Cat(Rule):
    """Concatenations along a dim; if a neighbor asks for groups, from shards of each operand."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        dim = call.dim(call["dim"])
        metas = call.metas("tensors")
        after = dim_labels(call, call.output.shape)
        whole = tuple(label if index != dim else None for index, label in enumerate(after))
        if any(len(meta.shape) != len(after) for meta in metas):  # `cat` ignores empty operands of one dim
            labels: list[Labels] = [whole if len(meta.shape) == len(after) else () for meta in metas]
            return label_strategies(call, {"tensors": labels}, [whole])
        found = label_strategies(call, {"tensors": [whole] * len(metas)}, [whole])
        if len({meta.hints[dim] for meta in metas}) == 1:
            for groups in sorted(groups_at(graph, size, op.name, dim)):
                if groups % len(metas) == 0:
                    part = S(dim, groups=groups // len(metas))
                    inputs = {"tensors": [part] * len(metas)}
                    found.append(call.strategy(f"parts/{groups}", inputs, [S(dim, groups=groups)]))
        return [*found, *partial_strategy(call, ["tensors"])]


class _Stack(Rule):
    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        dim = call.dim(call["dim"])
        after = dim_labels(call, call.output.shape)
        whole = tuple(label if index != dim else None for index, label in enumerate(after))
        before: Labels = (*after[:dim], *after[dim + 1 :])
        found = label_strategies(call, {"tensors": [before] * len(call.metas("tensors"))}, [whole])
        return [*found, *partial_strategy(call, ["tensors"])]


def _as_list(argument: Argument) -> list[Argument]:
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def _is_cut(placement: Placement, dim: int, op: Op) -> bool:
    """Return True if the results of an operator are sharded along the dim that it works along."""
    outputs = op.output if isinstance(op.output, tuple) else (op.output,)
    ndim = next(len(meta.shape) for meta in outputs if meta is not None)
    return placement.is_shard and placement.dim == dim % ndim


_PERMUTE, _TRANSPOSE, _MATRIX_TRANSPOSE, _ALONG = _Permute(), _Transpose(), _MatrixTranspose(), _AlongDim()
_PARTS, _EXPAND, _MOVE = _Parts(), _Expand(), _MoveDim()

_VIEWS: dict[str, Rule] = {
    "aten.permute": _PERMUTE,
    "aten.transpose": _TRANSPOSE,
    "aten.swapaxes": _TRANSPOSE,
    "aten.swapdims": _TRANSPOSE,
    "aten.t": _MATRIX_TRANSPOSE,
    "aten.mT": _MATRIX_TRANSPOSE,
    "aten.numpy_T": _ReverseDims(),
    "aten.movedim": _MOVE,
    "aten.moveaxis": _MOVE,
    "aten.expand": _EXPAND,
    "aten.expand_as": _EXPAND,
    "aten.broadcast_to": _EXPAND,
    "aten.slice": _Slice(),
    "aten.narrow": _ALONG,
    "aten.flip": _ALONG,
    "aten.roll": _ALONG,
    "aten.select": _Select(),
    "aten.repeat": _Repeat("repeats"),
    "aten.tile": _Repeat("dims"),
    "aten.repeat_interleave.self_int": _RepeatInterleave(),
    "aten.split.Tensor": _PARTS,
    "aten.split_with_sizes": _PARTS,
    "aten.split.sizes": _PARTS,
    "aten.chunk": _PARTS,
    "aten.unbind": _Unbind(),
    "aten.cat": _Cat(),
    "aten.concat": _Cat(),
    "aten.stack": _Stack(),
}

RULES: dict[str, Rule] = {**_SAME_ORDER, **_VIEWS}

"""Cut a batch into microbatches: find the placement of each value, and the results that need a division.

The rules that split operators over ranks decide it: an operator that ranks can compute on their shard of the
batch also runs on a microbatch. Each value is then cut along a dim, a summand of the total (``P``), or equal
in all microbatches (``R``). Sizes are expressions in the batch's size, so a graph needs few changes. Means
are divided by the number of microbatches. Means over the samples that count are divided by their number in
the complete batch. An operator that mixes samples and depends on inputs alone, such as the sum of a mask,
runs on the complete batch before. If another operator mixes samples, the batch passes through the stages
uncut, and the reason is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnx_nnscaler.codegen.writer import OpWriter, bound
from nnx_nnscaler.ir.graph import Argument, Code, Graph, Input, Op, Ref, Size, TensorMeta, refs_in
from nnx_nnscaler.ir.placement import P, Placement, R, S, Strategy
from nnx_nnscaler.pipeline.random_masks import is_random
from nnx_nnscaler.plan.work import base_name
from nnx_nnscaler.rules.registry import is_in_place, rule_for, strategies_of
from nnx_nnscaler.rules.rule import (
    Rule,
    argument_of,
    input_values,
    is_floating,
    operator_of,
    output_values,
    outputs_of,
    replicate,
)

_FILLS = frozenset(["zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"])
_NATURAL = frozenset(
    [
        *("view", "reshape", "_unsafe_view", "flatten", "ravel", "reshape_as", "squeeze", "unflatten"),
        *("unsqueeze", "view_as", "expand", "expand_as", "broadcast_to"),
        *("cat", "concat", "stack", "split", "split_with_sizes", "chunk", "unbind"),
        *("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "outer", "einsum"),
        *("conv1d", "conv2d", "conv3d", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("embedding", "group_norm", "instance_norm", "batch_norm", "mean"),
        *("dropout", "scaled_dot_product_attention"),
    ]
)
"""Operators whose rules rewrite them for a shard only because of its sizes."""
_SUMS = frozenset(["add", "sub", "rsub"])
_ADDENDS = {"linear": "bias", "addmm": "self", "baddbmm": "self"}
_MEAN = 1
"""The number of the mean among torch's reductions; 2 is the sum."""
_SUM = 2


@dataclass(frozen=True, slots=True)
class Count:
    """The number of samples that count, as divisor of a sum over a microbatch.

    Attributes:
        name: The name of the mean's operator.
        target: The value with the targets.
        weight: The value with the weight of each class; None for equal weights.
        ignore_index: The target of samples that do not count.
    """

    name: str
    target: str
    weight: str | None
    ignore_index: int


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A graph for one microbatch.

    Attributes:
        graph: The graph; the given one if the batch cannot be cut.
        placements: The placement of each value over the microbatches; empty if the batch cannot be cut.
        counts: The samples to count in the complete batch first.
        ahead: The names of the values that the complete batch gives before; they are inputs here.
        hindrance: The reason why the batch cannot be cut; empty if it can.
        at_least: The minimum number of samples in a microbatch.
    """

    graph: Graph
    placements: Mapping[str, Placement]
    counts: tuple[Count, ...] = ()
    ahead: tuple[str, ...] = ()
    hindrance: str = ""
    at_least: int = 1


class _HindranceError(Exception):
    """The batch cannot be cut into microbatches."""


def cut_batch(graph: Graph) -> Microbatches:
    """Return the graph for a microbatch.

    Args:
        graph: A graph without random operators. A symbol for its size marks the batch.
    """
    try:
        return _Cut(graph).result()
    except _HindranceError as error:
        return Microbatches(graph, {}, hindrance=str(error))


def possible_counts(
    cut: Microbatches, symbols: Mapping[str, int], most: int, divisible: Sequence[tuple[str, int]] = ()
) -> Iterator[int]:
    """Return the numbers of microbatches that a batch can be cut into, the best first.

    Args:
        cut: The graph of a microbatch.
        symbols: The size of the batch, by its symbol.
        most: The largest requested number.
        divisible: The sizes of a microbatch that must be multiples of a number.
    """
    if not cut.hindrance:
        ((symbol, batch),) = symbols.items()
        for count in range(min(most, batch), 1, -1):
            part = {symbol: batch // count}
            fits = batch % count == 0 and batch // count >= cut.at_least
            if fits and all(eval(size, {}, part) % number == 0 for size, number in divisible):
                yield count
    yield 1


class _Cut:
    """A walk through one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ops: list[Op] = []
        self._counts: list[Count] = []
        self._placements: dict[str, Placement] = {}
        self._free = values_of_inputs(graph)
        self._ahead: dict[str, TensorMeta] = {}
        self._apart: set[str] = set()
        self._rows: dict[str, Op] = {}
        self._size = _some_divisor(graph)
        self._at_least = 1

    def result(self) -> Microbatches:
        """Return the graph for one microbatch."""
        graph = self._graph
        for leaf in graph.inputs:
            if leaf.meta is not None:
                self._placements[leaf.name] = self._of_meta(leaf.meta, f"input {leaf.name!r}")
        for name in (*graph.parameters, *graph.buffers, *graph.constants):
            self._placements[name] = R
        for op in graph.ops:
            self._walk(op)
        if all(self._placements[op.name] == R for op in self._ops if self._computes_with_parameters(op)):
            raise _HindranceError("no output has a batch dimension")
        for count in self._counts:
            needed = {count.target, *({count.weight} if count.weight else ())}
            if not needed <= self._free:
                raise _HindranceError(f"the targets of {count.name} are computed with parameters")
        used = {name for op in self._ops for name in op.operands()}.union(output_refs(graph))
        ahead = {name: meta for name, meta in self._ahead.items() if name in used}
        inputs = [*graph.inputs, *(Input(name, meta) for name, meta in ahead.items())]
        made = replace(graph, inputs=inputs, metas={**graph.metas, **ahead}, ops=self._ops)
        return Microbatches(
            made, self._placements, tuple(self._counts), tuple(ahead), at_least=self._at_least
        )

    def _computes_with_parameters(self, op: Op) -> bool:
        """Return True if a floating point result depends on parameters; evaluation differentiates nothing."""
        meta = op.output
        return isinstance(meta, TensorMeta) and is_floating(meta) and op.name not in self._free

    def _of_meta(self, meta: TensorMeta, what: str) -> Placement:
        """Return the microbatch of an input, or of equal elements, if it has a batch dimension."""
        dims = symbolic_dims(meta)
        if len(dims) > 1:
            raise _HindranceError(f"{what} has the batch's size in several dims")
        return S(dims[0]) if dims else R

    def _walk(self, op: Op) -> None:
        if writes_in_place(op):
            raise _HindranceError(f"{_where(op)} writes in place, which each microbatch would repeat")
        if base_name(op).startswith("squeeze") and self._drops_batch_of_one(op):
            self._at_least = 2
        if base_name(op) in _FILLS and isinstance(op.output, TensorMeta):
            self._placements[op.name] = self._of_meta(op.output, _where(op))
            self._ops.append(self._with_whole_sizes(op))
            return
        if shared := self._with_shared_addend(op):
            self._ops += shared
            return
        try:
            if self._numbers_rows(op):
                return
            strategy = self._strategy(op)
        except _HindranceError:
            if op.name not in self._free:
                raise
            strategy = None
        if strategy is None or (P in strategy.outputs and op.name in self._free):
            self._compute_ahead(op)
            return
        for name, placement in zip(output_values(op), strategy.outputs, strict=True):
            self._placements[name] = placement
        if isinstance(op.output, tuple) and len(strategy.outputs):
            self._placements[op.name] = strategy.outputs[0]
        self._ops += self._rewritten(self._with_whole_sizes(op), strategy)

    def _compute_ahead(self, op: Op) -> None:
        """Compute a value that depends on inputs alone on the complete batch, and take its microbatch."""
        if not isinstance(op.output, TensorMeta):
            self._apart.add(op.name)  # so are values that are taken out of it
            return
        dims = symbolic_dims(op.output)
        sizes = [size.expr for size in op.output.shape if isinstance(size, Size)]
        if len(dims) > 1 or not self._graph.symbols.keys() >= set(sizes):
            raise _HindranceError(f"{_where(op)} mixes the samples of a batch")
        self._placements[op.name] = S(dims[0]) if dims else R
        self._ahead[op.name] = op.output

    def _with_shared_addend(self, op: Op) -> list[Op]:
        """Return the operators of a summand plus a shared value, of which each microbatch adds its share."""
        if base_name(op) not in _SUMS or not self._computes_with_parameters(op) or len(op.args) < 2:
            return []
        operands = [self._placements[a.name] if isinstance(a, Ref) else R for a in op.args[:2]]
        if set(operands) != {P, R}:
            return []
        place = operands.index(R)
        addend, divisor = op.args[place], Code("rt.microbatches")
        self._placements[op.name] = P
        if not isinstance(addend, Ref):
            share = replace(op, args=_replaced(op.args, place, Code(f"{addend!r} / {divisor.text}")))
            return [share]
        name = f"share_of_{addend.name}_in_{op.name}"
        self._placements[name] = R
        meta = self._graph.meta(addend.name)
        part = replace(
            op, name=name, target="aten.div.Tensor", args=(addend, divisor), kwargs={}, output=meta
        )
        return [part, replace(op, args=_replaced(op.args, place, Ref(name)))]

    def _numbers_rows(self, op: Op) -> bool:
        """Accept an operator that numbers the samples of the batch, or picks each sample by its number.

        All models of transformers have ``mask[torch.arange(len(mask))[:, None], columns]``. Numbers within
        the microbatch pick the same elements there. Other uses of such numbers mix samples.
        """
        numbers = [self._rows[name] for name in op.operands() if name in self._rows]
        name = base_name(op)
        if not numbers and not (name == "arange" and isinstance(op.args[0], Size)):
            return False
        dims = symbolic_dims(op.output) if isinstance(op.output, TensorMeta) else []
        if not numbers:
            begins = op.target == "aten.arange.default" and op.args[0].expr in self._graph.symbols
        elif name == "index":
            begins = self._picks_rows(op)
        else:
            begins = name in ("unsqueeze", "view", "reshape")
        if not begins or len(dims) != 1:
            raise _HindranceError(f"{_where(numbers[0] if numbers else op)} numbers the samples of a batch")
        self._placements[op.name] = S(dims[0])
        if name != "index":
            self._rows[op.name] = numbers[0] if numbers else op
        self._ops.append(op)
        return True

    def _picks_rows(self, op: Op) -> bool:
        """Return True if an operator takes the same elements of each sample."""
        picked, (rows, *others) = argument_of(op, "self"), argument_of(op, "indices")
        if rows is None or rows.name not in self._rows or self._placements[picked.name] != S(0):
            return False
        return all(other is None or self._placements[other.name] == R for other in others)

    def _drops_batch_of_one(self, op: Op) -> bool:
        """Return True if a batch of one sample would lose its dim."""
        operand = argument_of(op, "self")
        return any(isinstance(dim, Size) for dim in self._graph.meta(operand.name).shape)

    def _strategy(self, op: Op) -> Strategy:
        """Return the effect of an operator on its operands."""
        if op.target == "module":
            raise _HindranceError(f"{op.module} falls back to eager")
        if self._apart.intersection(op.operands()):
            raise _HindranceError(f"{_where(op)} mixes the samples of a batch")
        coming = tuple(self._placements[name] for name in input_values(op))
        choices = [replicate(op)] if all(placement == R for placement in coming) else []
        choices += [s for s in strategies_of(*self._with_counts(op), self._size) if s.inputs == coming]
        for strategy in choices:
            if not strategy.call and self._agrees(op, strategy):
                return strategy
        raise _HindranceError(f"{_where(op)} mixes the samples of a batch")

    def _with_counts(self, op: Op) -> tuple[Op, Graph]:
        """Return the operator as if integers were floats, because rules allow partial sums of floats only."""
        counts = {
            name: replace(self._graph.meta(name), dtype="float32")
            for name in op.operands()
            if self._placements[name] == P and not is_floating(self._graph.meta(name))
        }
        output = op.output
        if (counts or base_name(op) == "sum") and isinstance(output, TensorMeta) and not is_floating(output):
            output = replace(output, dtype="float32")
        graph = replace(self._graph, metas={**self._graph.metas, **counts}) if counts else self._graph
        return replace(op, output=output), graph

    def _agrees(self, op: Op, strategy: Strategy) -> bool:
        """Return True if the results are cut exactly along the dims whose size depends on the batch's."""
        for meta, placement in zip(outputs_of(op), strategy.outputs, strict=True):
            dims = symbolic_dims(meta)
            if (placement.is_shard and dims != [placement.dim]) or (dims and not placement.is_shard):
                return False
        made = P in strategy.outputs and P not in strategy.inputs
        addend = _ADDENDS.get(base_name(op))
        if made and addend is not None and isinstance(argument_of(op, addend), Ref):
            return False  # each microbatch would add it again
        known = base_name(op) in _NATURAL or _reduction(op) is not None
        return known or type(rule_for(op)).write is Rule.write or _writes_plainly(op, strategy)

    def _rewritten(self, op: Op, strategy: Strategy) -> Iterator[Op]:
        """Yield the operator for a microbatch, and the division of its result."""
        made = P in strategy.outputs and P not in strategy.inputs
        is_mean = base_name(op) == "mean" or _reduction(op) == _MEAN
        if not (made and is_mean):
            yield op
            return
        assert isinstance(op.output, TensorMeta)
        divisor = "rt.microbatches"
        part = replace(op, name=f"{op.name}_of_part")
        if self._counts_samples(op):
            if op.output.dtype == "float16":
                raise _HindranceError(f"{_where(op)} would sum up in float16")
            target, weight = argument_of(op, "target"), argument_of(op, "weight")
            name = weight.name if isinstance(weight, Ref) else None
            ignored = argument_of(op, "ignore_index")
            self._counts.append(Count(op.name, target.name, name, ignored))
            part = _with_argument(part, "reduction", _SUM)
            divisor = f"rt.counts[{op.name!r}]"
        self._placements[part.name] = P
        yield part
        yield replace(op, target="aten.div.Tensor", args=(Ref(part.name), Code(divisor)), kwargs={})

    def _counts_samples(self, op: Op) -> bool:
        """Return True for a mean over the samples that count."""
        if argument_of(op, "ignore_index") is None:
            return False
        target = self._graph.meta(argument_of(op, "target").name)
        return not target.dtype.startswith(("float", "bfloat"))

    def _with_whole_sizes(self, op: Op) -> Op:
        """Return the operator with numbers that mean sizes of the complete batch; shapes stay local."""
        if not any(_has_size(argument) for argument in (*op.args, *op.kwargs.values())):
            return op
        operator = operator_of(op.target)
        kinds = {} if operator is None else {a.name: str(a.type) for a in operator._schema.arguments}
        names = list(kinds)
        symbols = self._graph.symbols
        args = tuple(
            argument if _is_shape(kinds.get(name, "")) else _whole_sizes(argument, symbols)
            for name, argument in zip([*names, *[""] * len(op.args)], op.args, strict=False)
        )
        kwargs = {
            name: argument if _is_shape(kinds.get(name, "")) else _whole_sizes(argument, symbols)
            for name, argument in op.kwargs.items()
        }
        return replace(op, args=args, kwargs=kwargs)


def symbolic_dims(meta: TensorMeta) -> list[int]:
    """Return the dims whose size depends on the batch's."""
    return [index for index, dim in enumerate(meta.shape) if isinstance(dim, Size)]


def writes_in_place(op: Op) -> bool:
    """Return True if an operator changes an operand, as batch norm does in training."""
    return is_in_place(op) or ("_norm" in base_name(op) and _updates_statistics(op))


def _updates_statistics(op: Op) -> bool:
    training = argument_of(op, "training")
    used = argument_of(op, "use_input_stats") if training is None else training
    return bool(used) and isinstance(argument_of(op, "running_mean"), Ref)


def values_of_inputs(graph: Graph) -> set[str]:
    """Return the values that depend on inputs, buffers and constants alone, not on parameters."""
    given = [leaf.name for leaf in graph.inputs if leaf.meta is not None]
    free = {*given, *graph.buffers, *graph.constants}
    for op in graph.ops:
        plain = not (is_random(op) or writes_in_place(op) or op.target == "module")
        if plain and free.issuperset(op.operands()):
            free.add(op.name)
    return free


def _some_divisor(graph: Graph) -> int:
    """Return a number of equal parts that the traced batch can be cut into."""
    if len(graph.symbols) != 1:
        raise _HindranceError("the batch has a fixed size")
    ((name, dim),) = graph.symbols.values()
    size = graph.metas[name].hints[dim]
    return next((number for number in range(2, size + 1) if size % number == 0), 2)


def _reduction(op: Op) -> int | None:
    value = argument_of(op, "reduction")
    return value if isinstance(value, int) else None


def _writes_plainly(op: Op, strategy: Strategy) -> bool:
    """Return True if a rule that may rewrite an operator for a shard does not."""
    codes = [f"x{index}" for index in range(len(op.operands()))]
    left = list(codes)
    here = replace(
        op,
        args=tuple(bound(argument, left) for argument in op.args),
        kwargs={name: bound(argument, left) for name, argument in op.kwargs.items()},
    )
    writer = OpWriter(1, dict(zip(op.operands(), codes, strict=True)), {})
    return rule_for(op).write(here, strategy, writer) == writer.call(here)


def _has_size(argument: Argument) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(_has_size, argument))
    return isinstance(argument, Size)


def _is_shape(kind: str) -> bool:
    """Return True if arguments of a type are sizes and positions, not numbers to compute with."""
    return "int" in kind.lower()


def _whole_sizes(argument: Argument, symbols: Mapping[str, Any]) -> Argument:
    if isinstance(argument, (list, tuple)):
        return type(argument)(_whole_sizes(item, symbols) for item in argument)
    if not isinstance(argument, Size):
        return argument
    names = "|".join(map(re.escape, symbols))
    return Size(re.sub(rf"\b({names})\b", r"(\1 * rt.microbatches)", argument.expr), argument.hint)


def _with_argument(op: Op, name: str, value: Argument) -> Op:
    """Return the operator with another value of an argument."""
    operator = operator_of(op.target)
    assert operator is not None
    index = [argument.name for argument in operator._schema.arguments].index(name)
    if index < len(op.args):
        return replace(op, args=_replaced(op.args, index, value))
    return replace(op, kwargs={**op.kwargs, name: value})


def _replaced(arguments: tuple[Argument, ...], index: int, value: Argument) -> tuple[Argument, ...]:
    return (*arguments[:index], value, *arguments[index + 1 :])


def _where(op: Op) -> str:
    return f"{op.target} ({op.source or op.module or 'forward'})"


def output_refs(graph: Graph) -> list[str]:
    """Return the names of the values that a graph returns, once each."""
    return list(dict.fromkeys(refs_in(graph.outputs)))

"""Define the rules of operators: how ranks can run them, and rules by names for dims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch

from nnx_nnscaler._torch_compat import OpOverload
from nnx_nnscaler.ir.graph import Argument, Code, Dim, Graph, Op, Ref, Size, TensorMeta, refs_in
from nnx_nnscaler.ir.placement import P, Placement, R, S, Strategy

# The interface of a rule for one kind of operator.


class Writer(Protocol):
    """The interface by which a rule writes a call; `codegen` implements it.

    Attributes:
        size: The number of ranks of the unit.
    """

    size: int

    def value(self, argument: Argument) -> str:
        """Return an argument as Python code.

        A Ref is the local variable in the placement of the strategy, and a Size its global expression.
        """

    def dim(self, dim: Dim, *, sharded: bool = False) -> str:
        """Return a size as code: the global one, or the size of one rank's shard."""

    def shape(self, meta: TensorMeta, placement: Placement) -> str:
        """Return a local shape as code: ``"[B // 2, 16, 64]"``."""

    def call(self, op: Op) -> str:
        """Return the operator's call on its arguments, in the most readable form: ``F.linear(x, w, b)``."""


class Rule(ABC):
    """The splits of one kind of operator."""

    @abstractmethod
    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        """Return every even split of work or data for the traced sizes; the caller adds `replicate`.

        Args:
            op: The operator.
            graph: The graph of the operator, with the metas of its operands.
            size: The number of ranks of the unit, at least 2.
        """

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        """Return the right-hand side for this rank's result: the operator itself, unless overridden."""
        return writer.call(op)

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        """Return the upper bound of integer operands that are indices, for random data; None without any."""
        return None


def outputs_of(op: Op) -> tuple[TensorMeta, ...]:
    """Return the metas of an operator's results; None among several results is left out."""
    if op.output is None:
        return ()
    if isinstance(op.output, TensorMeta):
        return (op.output,)
    return tuple(meta for meta in op.output if meta is not None)


def replicate(op: Op) -> Strategy:
    """Return the strategy by which every rank runs the complete operator."""
    return Strategy("replicate", (R,) * len(op.operands()), (R,) * len(outputs_of(op)))


# `Call`: an operator with arguments by name, its shapes, and strategies by argument name.


_Inputs = Mapping[str, Placement | Sequence[Placement]]


@cache
def operator_of(target: str) -> Any:
    """Return the torch operator of a target such as ``"aten.linear.default"``; None if there is none.

    Example:
        >>> operator_of("aten.linear.default")
        <OpOverload(op='aten.linear', overload='default')>
    """
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, OpOverload) else None


@cache
def _schema(target: str) -> tuple[tuple[str, Any], ...]:
    operator = operator_of(target)
    if operator is None:
        return ()
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def targets(names: str) -> list[str]:
    """Return the targets of torch's own operators.

    Example:
        >>> targets("abs max.other")
        ['aten.abs', 'aten.max.other']
    """
    return [f"aten.{name}" for name in names.split()]


def bound(op: Op) -> dict[str, Argument]:
    """Return the operator's arguments by name, in its order; ``arg0``, ``arg1`` ... without a schema."""
    names = [name for name, _ in _schema(op.target)] or [f"arg{index}" for index in range(len(op.args))]
    return dict(zip(names, op.args, strict=False)) | op.kwargs


def argument_of(op: Op, name: str) -> Argument:
    """Return an argument of an operator by name, or its default."""
    given = bound(op)
    return given[name] if name in given else dict(_schema(op.target)).get(name)


def placement_of(op: Op, strategy: Strategy, name: str) -> Placement:
    """Return the placement of a tensor argument in a strategy; for a list, of its first tensor.

    Raises:
        KeyError: The operator has no such tensor argument.
    """
    position = 0
    for argument_name, argument in bound(op).items():
        count = len(list(refs_in(argument)))
        if argument_name == name and count:
            return strategy.inputs[position]
        position += count
    raise KeyError(name)


def with_code(op: Op, **code: str) -> Op:
    """Return the operator with some arguments replaced by Python code, for `Writer.call`."""
    names = list(bound(op))[: len(op.args)]
    return replace(
        op,
        args=tuple(Code(code[n]) if n in code else value for n, value in zip(names, op.args, strict=True)),
        kwargs={n: Code(code[n]) if n in code else value for n, value in op.kwargs.items()},
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One operator in its graph, with its arguments by name.

    Attributes:
        op: The operator.
        graph: The graph of the operator.
        size: The number of ranks of the unit.
        given: The arguments of the operator, in its order: positional ones, then keywords.
    """

    op: Op
    graph: Graph
    size: int
    given: Mapping[str, Argument]

    @classmethod
    def of(cls, op: Op, graph: Graph, size: int) -> Call:
        """Return the call of an operator."""
        return cls(op, graph, size, bound(op))

    def __getitem__(self, name: str) -> Argument:
        return self.given[name] if name in self.given else argument_of(self.op, name)

    def meta(self, name: str) -> TensorMeta | None:
        """Return the meta of a tensor argument; None if it is no tensor."""
        argument = self[name]
        return self.graph.meta(argument.name) if isinstance(argument, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor argument for the traced sample."""
        meta = self.meta(name)
        return () if meta is None else meta.hints

    def metas(self, name: str) -> list[TensorMeta]:
        """Return the metas of the tensors in a list argument."""
        return [self.graph.meta(ref) for ref in refs_in(self[name])]

    def tensors(self) -> list[str]:
        """Return the names of the arguments that are one tensor."""
        return [name for name, argument in self.given.items() if isinstance(argument, Ref)]

    @property
    def outputs(self) -> tuple[TensorMeta, ...]:
        """The metas of its results."""
        return outputs_of(self.op)

    @property
    def output(self) -> TensorMeta:
        """The meta of its only result."""
        return self.outputs[0]

    def dim(self, value: int, ndim: int | None = None) -> int:
        """Return a dim argument as a number that is not negative."""
        ndim = len(self.output.shape) if ndim is None else ndim
        return value + ndim if value < 0 else value

    def strategy(
        self, name: str, inputs: _Inputs, outputs: Sequence[Placement], *, call: str = ""
    ) -> Strategy:
        """Return a strategy from placements by argument name; all other arguments are ``R``."""
        placements: list[Placement] = []
        for argument_name, argument in self.given.items():
            refs = list(refs_in(argument))
            wanted = inputs.get(argument_name, R)
            placements.extend([wanted] * len(refs) if isinstance(wanted, Placement) else wanted)
        return Strategy(name, tuple(placements), tuple(outputs), call)


# Strategies from labels of dims, like an einsum equation for any operator. A rule gives every dim of every
# operand and result a label, or None to dims that must not be sharded. To shard one label over the ranks is a
# strategy: a tensor with the label is ``S`` there, and an operand without it is ``R``. A result without it is
# ``P``, which is right if the operator sums over the label.


Labels = tuple[str | None, ...]
"""A label for each dim of a tensor."""


def dim_labels(call: Call, shape: Sequence[object]) -> Labels:
    """Return labels for the dims of an elementwise result: ``batch``, ``dim1`` ..."""
    symbolic = bool(call.graph.symbols)
    batch = next((index for index, dim in enumerate(shape) if isinstance(dim, Size) or not symbolic), None)
    return tuple("batch" if index == batch else f"dim{index}" for index in range(len(shape)))


def aligned(labels: Labels, whole: TensorMeta, operand: TensorMeta) -> Labels:
    """Return the labels of an operand that is broadcast to a shape with these labels."""
    missing = len(labels) - len(operand.shape)
    return tuple(
        label if size == target else None
        for label, target, size in zip(labels[missing:], whole.hints[missing:], operand.hints, strict=True)
    )


def is_floating(meta: TensorMeta) -> bool:
    """Return True if a tensor holds floating point numbers, complex ones included."""
    return meta.dtype.startswith(("float", "bfloat", "complex"))


def label_strategies(
    call: Call,
    inputs: Mapping[str, Labels | list[Labels]],
    outputs: Sequence[Labels],
    *,
    summed: Collection[str] = (),
) -> list[Strategy]:
    """Return one strategy for every label, and for every grouping that a neighbor asks for.

    Args:
        call: The operator.
        inputs: The labels by argument name, a list of them for a list of tensors; others are replicated.
        outputs: The labels of the results.
        summed: The labels that the operator sums over; others that a result lacks cannot be sharded.
    """
    of_inputs = list(_in_order(call, inputs))
    found = []
    for label in _labels_of([*outputs, *of_inputs]):
        if _repeated(label, [*of_inputs, *outputs]):
            continue
        if any(label not in labels for labels in outputs) and not _can_sum(label, call, summed):
            continue
        for groups in _groups_of(label, call.op, call, of_inputs, outputs):
            name = label if groups == 1 else f"{label}/{groups}"
            found.append(
                Strategy(
                    name,
                    tuple(_placed(labels, label, groups, R) for labels in of_inputs),
                    tuple(_placed(labels, label, groups, P) for labels in outputs),
                )
            )
    return found


def partial_strategy(call: Call, partial: Collection[str]) -> list[Strategy]:
    """Return the strategy of a linear operator with some partial arguments and partial results."""
    metas = [*call.outputs, *(meta for name in partial for meta in call.metas(name))]
    if not partial or not call.outputs or not all(is_floating(meta) for meta in metas):
        return []
    return [call.strategy("partial", dict.fromkeys(partial, P), [P] * len(call.outputs))]


def _in_order(call: Call, inputs: Mapping[str, Labels | list[Labels]]) -> Iterator[Labels]:
    """Yield the labels of every operand, in the order of `Op.operands`."""
    for name, argument in call.given.items():
        count = len(list(refs_in(argument)))
        labels = inputs.get(name, ())
        yield from labels if isinstance(labels, list) else [labels] * count


def _labels_of(tensors: Sequence[Labels]) -> list[str]:
    return list(dict.fromkeys(label for labels in tensors for label in labels if label is not None))


def _repeated(label: str, tensors: Sequence[Labels]) -> bool:
    return any(labels.count(label) > 1 for labels in tensors)


def _can_sum(label: str, call: Call, summed: Collection[str]) -> bool:
    return label in summed and all(is_floating(meta) for meta in call.outputs)


def _placed(labels: Labels, label: str, groups: int, absent: Placement) -> Placement:
    return S(labels.index(label), groups=groups) if label in labels else absent


def _groups_of(
    label: str, op: Op, call: Call, inputs: Sequence[Labels], outputs: Sequence[Labels]
) -> list[int]:
    """Return the groupings of a label that some neighbor can use, 1 among them."""
    found = {1}
    values = [*zip(input_values(op), inputs, strict=True), *zip(output_values(op), outputs, strict=True)]
    for value, labels in values:
        if label in labels:
            found |= groups_at(call.graph, call.size, value, labels.index(label))
    return sorted(found)


# Grouped shards to consider: the places where they begin, and their spread along a graph. A fused
# query-key-value projection is sharded by heads with ``S(dim, groups=3)``, because its result is split into
# three. So groups begin at splits and views, and every operator passes them on.


MOST_GROUPS = 4
"""The maximum groups that a view proposes for a dim: query, key, value, and a gate."""

_SWEEPS = 12
_Found = dict[str, set[tuple[int, int]]]
"""The dims and numbers of groups by value."""


def input_values(op: Op) -> list[str]:
    """Return a name for every operand, in order; one of several results has its index."""
    if op.target == "getitem":
        return [f"{op.args[0].name}[{op.args[1]}]"]
    return op.operands()


def output_values(op: Op) -> list[str]:
    """Return a name for every result that is a tensor."""
    if not isinstance(op.output, tuple):
        return [op.name]
    return [f"{op.name}[{index}]" for index, meta in enumerate(op.output) if meta is not None]


def groups_at(graph: Graph, size: int, value: str, dim: int) -> set[int]:
    """Return the numbers of groups above 1 to consider for a dim of a value."""
    return {groups for noted, groups in grouped_cuts(graph, size, value) if noted == dim}


def grouped_cuts(graph: Graph, size: int, value: str) -> frozenset[tuple[int, int]]:
    """Return the dims of a value, and their numbers of groups, to consider."""
    found: _Found = graph.derived.get(("groups", size), {})
    return frozenset(found.get(value, ()))


def spread_groups(graph: Graph, size: int, strategies_of: Callable[[Op], list[Strategy]]) -> None:
    """Find the grouped shards of a complete graph, once; `groups_at` answers from then on.

    Args:
        graph: The graph.
        size: The number of ranks of the unit.
        strategies_of: A function that returns the strategies of an operator, by earlier results.
    """
    key, stamp = ("groups", size), ("groups of", size)
    if graph.derived.get(stamp) == len(graph.ops):
        return
    found: _Found = {}
    graph.derived[key], graph.derived[stamp] = found, len(graph.ops)
    ops = list(graph.ops)
    for _ in range(_SWEEPS):
        new = [_note(found, op, strategies_of(op)) for op in ops]
        if not any(new):
            return
        ops.reverse()


def _note(found: _Found, op: Op, strategies: list[Strategy]) -> bool:
    """Note the groups of an operator's strategies; return True if some are new."""
    values = [*input_values(op), *output_values(op)]
    new = False
    for strategy in strategies:
        for value, placement in zip(values, (*strategy.inputs, *strategy.outputs), strict=True):
            if placement.groups > 1:
                cut = (placement.dim, placement.groups)
                cuts = found.setdefault(value, set())
                new = new or cut not in cuts
                cuts.add(cut)
    return new

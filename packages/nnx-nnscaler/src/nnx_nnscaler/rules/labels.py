"""Strategies from names for dims: what an einsum equation says, for any operator.

A rule gives every dim of every operand and result a label, and None to dims that must stay whole. Cutting one
label over the ranks is a strategy: what carries the label is ``S`` there, operands without it are ``R``, and
results without it are ``P``, which is right where the operator sums over the label.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from nnx_nnscaler.ir import Graph, Op, Size, TensorMeta, refs_in
from nnx_nnscaler.placement import P, Placement, R, S
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.rule import Call

Labels = tuple[str | None, ...]
"""A label for each dim of a tensor."""


def dim_labels(call: Call, shape: Sequence[object]) -> Labels:
    """Labels for the dims of a result that is computed element by element: ``batch``, ``dim1`` ..."""
    symbolic = bool(call.graph.symbols)
    batch = next((index for index, dim in enumerate(shape) if isinstance(dim, Size) or not symbolic), None)
    return tuple("batch" if index == batch else f"dim{index}" for index in range(len(shape)))


def aligned(labels: Labels, whole: TensorMeta, operand: TensorMeta) -> Labels:
    """Labels of an operand that is broadcast to a shape with these labels."""
    missing = len(labels) - len(operand.shape)
    return tuple(
        label if size == target else None
        for label, target, size in zip(labels[missing:], whole.hints[missing:], operand.hints, strict=True)
    )


def is_floating(meta: TensorMeta) -> bool:
    """Whether a tensor holds floating point numbers, complex ones included."""
    return meta.dtype.startswith(("float", "bfloat", "complex"))


def label_strategies(
    call: Call,
    inputs: Mapping[str, Labels | list[Labels]],
    outputs: Sequence[Labels],
    *,
    summed: Collection[str] = (),
) -> list[Strategy]:
    """One strategy for every label and every grouping that is asked for next to the operator.

    Args:
        call: The operator.
        inputs: Labels by argument name, a list of them for a list of tensors; others are used whole.
        outputs: Labels of the results.
        summed: Labels that the operator sums over; others that a result lacks cannot be cut.
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
    """The strategy in which some arguments are partial sums and so are the results, of a linear operator."""
    metas = [*call.outputs, *(meta for name in partial for meta in call.metas(name))]
    if not partial or not call.outputs or not all(is_floating(meta) for meta in metas):
        return []
    return [call.strategy("partial", dict.fromkeys(partial, P), [P] * len(call.outputs))]


def _in_order(call: Call, inputs: Mapping[str, Labels | list[Labels]]) -> Iterator[Labels]:
    """Labels of every operand, in the order of `Op.operands`."""
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
    """The groupings of a label that some neighbour can use, 1 among them."""
    found = {1}
    values = [*zip(input_values(op), inputs, strict=True), *zip(output_values(op), outputs, strict=True)]
    for value, labels in values:
        if label in labels:
            found |= groups_at(call.graph, call.size, value, labels.index(label))
    return sorted(found)


# --- groups ----------------------------------------------------------------------------------------------
#
# Which grouped cuts are worth considering: where they arise, and how far they spread along a graph.
#
# A fused query-key-value projection is cut by heads with ``S(dim, groups=3)`` because its result is split
# into three. So groups begin at splits and views, and every operator beside hands them on.


MOST_GROUPS = 4
"""Into how many parts a dim may fall for a view to propose groups: query, key, value, and a gate."""

_SWEEPS = 12
_Found = dict[str, set[tuple[int, int]]]
"""Dims and numbers of groups by value."""


def input_values(op: Op) -> list[str]:
    """A name for every operand, in order; one of several results is told by its index."""
    if op.target == "getitem":
        return [f"{op.args[0].name}[{op.args[1]}]"]
    return op.operands()


def output_values(op: Op) -> list[str]:
    """A name for every result that is a tensor."""
    if not isinstance(op.output, tuple):
        return [op.name]
    return [f"{op.name}[{index}]" for index, meta in enumerate(op.output) if meta is not None]


def groups_at(graph: Graph, size: int, value: str, dim: int) -> set[int]:
    """The numbers of groups, 1 apart, that are worth considering for a dim of a value."""
    return {groups for noted, groups in grouped_cuts(graph, size, value) if noted == dim}


def grouped_cuts(graph: Graph, size: int, value: str) -> frozenset[tuple[int, int]]:
    """The dims of a value, and numbers of groups, that are worth considering."""
    found: _Found = graph.derived.get(("groups", size), {})
    return frozenset(found.get(value, ()))


def spread_groups(graph: Graph, size: int, strategies_of: Callable[[Op], list[Strategy]]) -> None:
    """Find the grouped cuts of a whole graph, once; `groups_at` answers from then on.

    Args:
        graph: The graph.
        size: Ranks of the unit.
        strategies_of: The strategies of an operator, which use what was found so far.
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
    """Note the groups of an operator's strategies; whether there are new ones."""
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

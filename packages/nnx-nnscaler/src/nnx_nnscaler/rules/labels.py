"""Strategies from names for dims: what an einsum equation says, for any operator.

A rule gives every dim of every operand and result a label, and None to dims that must stay whole. Cutting one
label over the ranks is a strategy: what carries the label is ``S`` there, operands without it are ``R``, and
results without it are ``P``, which is right where the operator sums over the label.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from nnx_nnscaler.ir import Op, Size, TensorMeta, refs_in
from nnx_nnscaler.placement import P, Placement, R, S
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.call import Call
from nnx_nnscaler.rules.groups import groups_at, input_values, output_values

__all__ = ["Labels", "aligned", "dim_labels", "is_floating", "label_strategies", "partial_strategy"]

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

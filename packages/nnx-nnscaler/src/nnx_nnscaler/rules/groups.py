"""Which grouped cuts are worth considering: where they arise, and how far they spread along a graph.

A fused query-key-value projection is cut by heads with ``S(dim, groups=3)`` because its result is split into
three. So groups begin at splits and views, and every operator beside hands them on.
"""

from __future__ import annotations

from collections.abc import Callable

from nnx_nnscaler.ir import Graph, Op
from nnx_nnscaler.plan.program_plan import Strategy

__all__ = ["MOST_GROUPS", "grouped_cuts", "groups_at", "input_values", "output_values", "spread_groups"]

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

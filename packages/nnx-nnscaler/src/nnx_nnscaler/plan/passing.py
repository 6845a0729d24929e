"""Parameters whose partial gradients operators that every rank repeats may pass on to them.

A replicated operator on a parameter, such as a position embedding, usually gets its gradient complete, by a
collective where the result is used for a part of the work. As a gradient is linear, the sum over the ranks
can as well be taken of the parameter's gradient, where the reducer takes it along with the others. `codegen`
writes no collective behind operators on synchronized parameters alone; this module finds the parameters that
gain by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from nnx_nnscaler.cost.model import Stored
from nnx_nnscaler.ir import Graph, Op, TensorMeta, refs_in
from nnx_nnscaler.placement import R
from nnx_nnscaler.plan.evaluation import Assignment

__all__ = ["synchronize_what_passes_on"]


def synchronize_what_passes_on(graph: Graph, assignment: Assignment) -> Assignment:
    """The same assignment, with the reducer summing what would take a collective of its own.

    Args:
        graph: The graph; one for evaluation has no gradients and is left alone by the caller.
        assignment: Of the graph.
    """
    if not any(stored.synchronized for stored in assignment.stored.values()):
        return assignment  # the reduction over the unit would be there for this alone
    ways = _Ways(graph, assignment)
    stored = dict(assignment.stored)
    for name in graph.parameters:
        meta = graph.meta(name)
        if stored[name] != Stored(R) or not meta.differentiable:
            continue
        ends = ways.ends(name)
        if ends is not None and prod(meta.hints) <= 2 * sum(prod(end.hints) for end in ends):
            stored[name] = Stored(R, synchronized=True)
    return replace(assignment, stored=stored)


class _Ways:
    """Where values go through replicated operators that depend on one parameter alone."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self._graph = graph
        self._choices = assignment.choices
        self._users: Mapping[str, list[Op]] = graph.users()
        self._results = set(refs_in(graph.outputs))

    def ends(self, name: str) -> list[TensorMeta] | None:
        """The values whose gradients are partial; None where one is needed complete."""
        if name in self._results:
            return None
        found: list[TensorMeta] = []
        for op in self._users.get(name, ()):
            ends = self._through(op, name)
            if ends is None:
                return None
            found += ends
        return found or None

    def _through(self, op: Op, name: str) -> list[TensorMeta] | None:
        strategy = self._choices.get(op.name)
        if strategy is None:
            return None
        if not strategy.is_replicated:
            return [self._graph.meta(name)]  # it hands back a partial gradient, or that of its part
        alone = not (set(self._differentiable(op)) - {name}) and isinstance(op.output, TensorMeta)
        return self.ends(op.name) if alone and op.target != "module" and not strategy.call else None

    def _differentiable(self, op: Op) -> Iterator[str]:
        for operand in op.operands():
            if self._graph.meta(operand).differentiable:
                yield operand

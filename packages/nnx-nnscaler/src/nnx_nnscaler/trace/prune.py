"""Leaving out what nothing needs, except what draws random numbers or changes a buffer."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op, refs_in
from nnx_nnscaler.trace.operators import is_random

__all__ = ["prune"]


def prune(graph: Graph, lasting: set[str]) -> None:
    """Drop operators whose results are not used, then parameters, buffers and constants likewise.

    Args:
        graph: Changed in place.
        lasting: Names of operators that change a buffer, and stay.
    """
    needed = set(refs_in(graph.outputs))
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in needed or op.name in lasting or op.target == "module" or _draws(op):
            ops.append(op)
            needed |= set(op.operands())
    graph.ops = ops[::-1]
    for values in (graph.parameters, graph.buffers, graph.constants):
        for name in [name for name in values if name not in needed]:
            del values[name]
    inputs = {leaf.name for leaf in graph.inputs}
    for name in [name for name in graph.metas if name not in needed and name not in inputs]:
        del graph.metas[name]


def _draws(op: Op) -> bool:
    return op.target not in ("getitem", "module") and is_random(op.target, op.args, op.kwargs)

"""Which operators nobody knows how to split, for a message that is said once."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op
from nnx_nnscaler.rules.registry import has_rule, strategies_of

__all__ = ["unsupported_message", "unsupported_operators"]

_MOST_LINES = 3


def unsupported_operators(graph: Graph, size: int) -> dict[str, list[str]]:
    """The operators without a rule for which none was found by trying either: every rank does all of them.

    Args:
        graph: A traced forward.
        size: Ranks of the unit.

    Returns:
        The source lines that call each operator, by its name, in order of first use.
    """
    found: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        if _matters(op, graph) and not has_rule(op) and len(strategies_of(op, graph, size)) == 1:
            found.setdefault(op.target, {})[op.source or f"in {op.module or 'forward'}"] = None
    return {target: list(lines) for target, lines in found.items()}


def unsupported_message(graph: Graph, size: int) -> str:
    """What to tell the user about them; empty if there are none."""
    found = unsupported_operators(graph, size)
    if not found:
        return ""
    lines = [f"  {target}: {_listed(sources)}" for target, sources in found.items()]
    return "\n".join(
        [
            "no rule says how to split these operators, so every rank does all of them:",
            *lines,
            "Describe them with nnx_nnscaler.register_op if they cost much.",
        ]
    )


def _matters(op: Op, graph: Graph) -> bool:
    """Whether an operator computes with tensors that have elements to split."""
    name = op.target.rpartition(".")[0]
    # In place, or made anew with the shape of an operand.
    if op.target in ("getitem", "module") or name.endswith(("_", "_like")) or name.startswith("aten.new_"):
        return False
    return any(extent > 1 for name in op.operands() for extent in _hints(graph, name))


def _hints(graph: Graph, name: str) -> tuple[int, ...]:
    try:
        return graph.meta(name).hints
    except KeyError:  # several results
        return ()


def _listed(sources: list[str]) -> str:
    more = len(sources) - _MOST_LINES
    return "; ".join(sources[:_MOST_LINES]) + (f"; and {more} more" if more > 0 else "")

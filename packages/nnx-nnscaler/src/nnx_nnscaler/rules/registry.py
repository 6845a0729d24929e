"""Find the rule of an operator and all of its strategies, for the planner."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from nnx_nnscaler.ir.graph import Argument, Graph, Op, Ref, TensorMeta
from nnx_nnscaler.ir.placement import P, Placement, Strategy
from nnx_nnscaler.rules import arithmetic, layers, shapes
from nnx_nnscaler.rules.probe import discover
from nnx_nnscaler.rules.rule import (
    Rule,
    Writer,
    grouped_cuts,
    input_values,
    is_floating,
    output_values,
    outputs_of,
    replicate,
    spread_groups,
)

Discovery = Callable[[Op, Graph, int], list[Strategy]]
"""A function that finds strategies of an operator without a rule, by which it runs on local tensors."""


class _Plain(Rule):
    """The fallback for an operator without a rule."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        return [strategy for find in _DISCOVERIES for strategy in find(op, graph, size)]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        return writer.call(op)


_BUILT_IN: dict[str, Rule] = {**layers.RULES, **arithmetic.RULES, **shapes.RULES}
"""The rules of ``"aten.linear"`` (all overloads) or of ``"aten.max.other"`` (this one only)."""
_REGISTERED: dict[str, Rule] = {}
_DISCOVERIES: list[Discovery] = [discover]
_PLAIN = _Plain()


def register_rule(target: str, rule: Rule) -> None:
    """Register a rule for an operator, in place of the built-in one.

    Args:
        target: The operator: ``"aten.linear.default"``, or ``"aten.linear"`` for all its overloads.
        rule: The rule.
    """
    _REGISTERED[target] = rule


def register_discovery(discover: Discovery) -> None:
    """Register a further source of strategies for operators without a rule."""
    _DISCOVERIES.append(discover)


def has_rule(op: Op) -> bool:
    """Return True if an operator has a built-in or registered rule."""
    return rule_for(op) is not _PLAIN


def rule_for(op: Op) -> Rule:
    """Return the rule of an operator; without one, a rule that replicates it or asks the discoveries."""
    packet = op.target.rpartition(".")[0]
    for rules in (_REGISTERED, _BUILT_IN):
        for target in (op.target, packet):
            if target in rules:
                return rules[target]
    return _PLAIN


def strategies_of(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Return every way to run an operator on the ranks of a unit, replication first, in a fixed order.

    All strategies fit the traced sizes, and no two have the same placements. A value that is used twice has
    one placement.
    """
    spread_groups(graph, size, lambda other: _known(other, graph, size))
    return [replicate(op), *_known(op, graph, size)]


def _known(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Return the strategies except replication, found once for operators that only differ in names."""
    known: dict[Hashable, list[Strategy]] = graph.derived.setdefault(("strategies", size), {})
    key = _likeness(op, graph, size)
    if key not in known:
        known[key] = _usable(op, graph, size)
    return known[key]


def _likeness(op: Op, graph: Graph, size: int) -> Hashable:
    """Return the key that strategies depend on: everything but names."""
    names = list(dict.fromkeys(op.operands()))
    cuts = tuple(grouped_cuts(graph, size, value) for value in (*input_values(op), *output_values(op)))
    metas = () if op.target == "getitem" else tuple(graph.meta(name) for name in names)
    return (
        op.target,
        _without_names(op.args, names),
        _without_names(op.kwargs, names),
        op.output,
        metas,
        cuts,
    )


def _without_names(argument: Argument, names: list[str]) -> Hashable:
    if isinstance(argument, Ref):
        return (Ref, names.index(argument.name))
    if isinstance(argument, (list, tuple)):
        return tuple(_without_names(item, names) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _without_names(item, names)) for name, item in argument.items())
    return (type(argument), argument if isinstance(argument, Hashable) else repr(argument))


def _usable(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Return the usable strategies of the rule."""
    if op.target == "module" or is_in_place(op):
        return []
    plain = replicate(op)
    known = {(plain.inputs, plain.outputs)}
    found = []
    for strategy in rule_for(op).strategies(op, graph, size):
        placements = (strategy.inputs, strategy.outputs)
        if placements not in known and _fits(strategy, op, graph, size):
            known.add(placements)
            found.append(strategy)
    return found


def is_in_place(op: Op) -> bool:
    """Return True if an operator changes its operand, as ``add_`` does and ``__and__`` does not."""
    name = op.target.split(".")[1] if "." in op.target else ""
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def _fits(strategy: Strategy, op: Op, graph: Graph, size: int) -> bool:
    metas = _metas(op, graph)
    wanted: dict[str, Placement] = {}
    for name, placement in zip(op.operands(), strategy.inputs, strict=True):
        if wanted.setdefault(name, placement) != placement:
            return False
    return all(
        placement.fits(meta.hints, size) and (placement != P or is_floating(meta))
        for meta, placement in zip(metas, (*strategy.inputs, *strategy.outputs), strict=True)
    )


def _metas(op: Op, graph: Graph) -> list[TensorMeta]:
    """Return the metas of operands and results; a getitem's operand has the meta of its result."""
    outputs = outputs_of(op)
    if op.target == "getitem":
        return [outputs[0], outputs[0]]
    return [*(graph.meta(name) for name in op.operands()), *outputs]


# Operators without strategies, for a message that is logged once.


_MOST_LINES = 3


def unsupported_operators(graph: Graph, size: int) -> dict[str, list[str]]:
    """Return the operators without a rule and without discovered strategies, which every rank replicates.

    Args:
        graph: A traced forward.
        size: The number of ranks of the unit.

    Returns:
        The source lines that call each operator, by its name, in order of first use.
    """
    found: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        if _matters(op, graph) and not has_rule(op) and len(strategies_of(op, graph, size)) == 1:
            found.setdefault(op.target, {})[op.source or f"in {op.module or 'forward'}"] = None
    return {target: list(lines) for target, lines in found.items()}


def unsupported_message(graph: Graph, size: int) -> str:
    """Return the log message about these operators; empty if there are none."""
    found = unsupported_operators(graph, size)
    if not found:
        return ""
    lines = [f"  {target}: {_listed(sources)}" for target, sources in found.items()]
    return "\n".join(
        [
            "these operators have no splitting rule and run replicated on every rank:",
            *lines,
            "Annotate the expensive ones with nnx_nnscaler.register_op.",
        ]
    )


def _matters(op: Op, graph: Graph) -> bool:
    """Return True if an operator computes with tensors that have elements to split."""
    name = op.target.rpartition(".")[0]
    # An operand changed in place, or a new tensor of an operand's shape.
    if op.target in ("getitem", "module") or name.endswith(("_", "_like")) or name.startswith("aten.new_"):
        return False
    return any(extent > 1 for name in op.operands() for extent in _hints(graph, name))


def _hints(graph: Graph, name: str) -> tuple[int, ...]:
    try:
        return graph.meta(name).hints
    except KeyError:  # the operator has several results
        return ()


def _listed(sources: list[str]) -> str:
    more = len(sources) - _MOST_LINES
    return "; ".join(sources[:_MOST_LINES]) + (f"; and {more} more" if more > 0 else "")

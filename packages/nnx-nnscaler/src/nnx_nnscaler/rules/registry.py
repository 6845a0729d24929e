"""Which rule an operator has, and all the strategies that follow: what the planner asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from nnx_nnscaler.ir import Argument, Graph, Op, Ref, TensorMeta
from nnx_nnscaler.placement import P, Placement
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.groups import grouped_cuts, input_values, output_values, spread_groups
from nnx_nnscaler.rules.labels import is_floating
from nnx_nnscaler.rules.probe import discover
from nnx_nnscaler.rules.rule import Rule, Writer, outputs_of, replicate
from nnx_nnscaler.rules.table import TABLE

__all__ = ["Discovery", "has_rule", "register_discovery", "register_rule", "rule_for", "strategies_of"]

Discovery = Callable[[Op, Graph, int], list[Strategy]]
"""Finds strategies of an operator without a rule, in which the operator itself is right on local tensors."""


class _Plain(Rule):
    """What is left for an operator without a rule."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        return [strategy for find in _DISCOVERIES for strategy in find(op, graph, size)]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        return writer.call(op)


_REGISTERED: dict[str, Rule] = {}
_DISCOVERIES: list[Discovery] = [discover]
_PLAIN = _Plain()


def register_rule(target: str, rule: Rule) -> None:
    """Give an operator a rule, which is preferred to the built-in one.

    Args:
        target: ``"aten.linear.default"``, or ``"aten.linear"`` for all its overloads.
        rule: The rule.
    """
    _REGISTERED[target] = rule


def register_discovery(discover: Discovery) -> None:
    """Ask this, too, for strategies of operators that have no rule."""
    _DISCOVERIES.append(discover)


def has_rule(op: Op) -> bool:
    """Whether an operator is in the table or was registered."""
    return rule_for(op) is not _PLAIN


def rule_for(op: Op) -> Rule:
    """The rule of an operator; one that has none gets a rule that replicates it or asks the discoveries."""
    packet = op.target.rpartition(".")[0]
    for rules in (_REGISTERED, TABLE):
        for target in (op.target, packet):
            if target in rules:
                return rules[target]
    return _PLAIN


def strategies_of(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Every way to run an operator on the ranks of a unit, replication first, in a fixed order.

    All fit the traced sizes, none repeats another's placements, and a value that is used twice is wanted in
    one placement.
    """
    spread_groups(graph, size, lambda other: _known(other, graph, size))
    return [replicate(op), *_known(op, graph, size)]


def _known(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Strategies apart from replication, found once for operators that only differ in names, as layers do."""
    known: dict[Hashable, list[Strategy]] = graph.derived.setdefault(("strategies", size), {})
    key = _likeness(op, graph, size)
    if key not in known:
        known[key] = _usable(op, graph, size)
    return known[key]


def _likeness(op: Op, graph: Graph, size: int) -> Hashable:
    """What strategies depend on: everything but names."""
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
    """What the rule proposes and can be used."""
    if op.target == "module" or _is_in_place(op):
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


def _is_in_place(op: Op) -> bool:
    """Whether an operator changes its operand, as ``add_`` does and ``__and__`` does not."""
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
    """Metas of operands and results; a getitem's operand is one of several results and looks like its own."""
    outputs = outputs_of(op)
    if op.target == "getitem":
        return [outputs[0], outputs[0]]
    return [*(graph.meta(name) for name in op.operands()), *outputs]

"""Why a plan is what it is: what every operator costs as it was split, and what the alternatives would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nnx_nnscaler.cost.model import CostModel, Price, Prices
from nnx_nnscaler.cost.operators import ALIASES, base_name
from nnx_nnscaler.ir import Graph, Op
from nnx_nnscaler.plan.context import PolicyContext, StrategiesOf
from nnx_nnscaler.plan.evaluation import Assignment, Evaluation, evaluate, price_of_value
from nnx_nnscaler.plan.planning import assignment_of, rules_for
from nnx_nnscaler.plan.program_plan import ProgramPlan

__all__ = ["Row", "explain", "table"]

_ALTERNATIVES = 3
"""How many are named."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator of a plan.

    Attributes:
        name: Its name in the graph.
        module: The submodule that calls it.
        operator: ``"linear"``.
        source: Where the user's code calls it.
        strategy: How it was split: ``"column"``.
        placements: Placements of operands and results: ``"R S(0) -> S(2)"``.
        collectives: Those that bring its operands into place, there and back:
            ``"all_gather__reduce_scatter"``.
        moved: Bytes that they work on, there and back.
        seconds: What it takes, collectives included.
        instead: Names of alternatives, with the seconds that each would add, everything else as it is.
    """

    name: str
    module: str
    operator: str
    source: str
    strategy: str
    placements: str
    collectives: tuple[str, ...]
    moved: float
    seconds: float
    instead: tuple[tuple[str, float], ...]


def explain(
    graph: Graph,
    plan: ProgramPlan,
    *,
    costs: CostModel | None = None,
    units: int = 1,
    zero: bool = False,
    strategies_of: StrategiesOf | None = None,
) -> list[Row]:
    """What each operator that computes something costs, and why it was not split otherwise.

    Args:
        graph: What was planned.
        plan: The plan.
        costs: The cost model that it was made with.
        units: How many units share the work.
        zero: Whether they keep parameters in parts.
        strategies_of: Where alternatives come from; the registry of rules by default.
    """
    context = PolicyContext(graph, plan.size, rules_for(plan.size, strategies_of))
    assignment = assignment_of(graph, plan)
    prices = (costs or CostModel()).prices(graph, size=plan.size, units=units, zero=zero)
    evaluation = evaluate(context.flow, assignment, prices)
    return [
        _row(context, assignment, prices, evaluation, op)
        for op in context.flow.ops.values()
        if base_name(op) not in ALIASES
    ]


def _row(
    context: PolicyContext, assignment: Assignment, prices: Prices, evaluation: Evaluation, op: Op
) -> Row:
    strategy = assignment.choices[op.name]
    own, methods = evaluation.operators[op.name], []
    for changed in evaluation.conversions:
        if changed.consumers[0] == op.name:  # a conversion that is shared counts for the first
            own = own.plus(changed.price)
            methods += [changed.change.method] if changed.change else []
    inputs, outputs = (" ".join(map(str, placed)) for placed in (strategy.inputs, strategy.outputs))
    alternatives = sorted(_alternatives(context, assignment, prices, op), key=lambda found: found[1])
    return Row(
        op.name, op.module, base_name(op), op.source, strategy.name, f"{inputs} -> {outputs}",
        tuple(methods), own.moved, own.seconds, tuple(alternatives[:_ALTERNATIVES]),
    )  # fmt: skip


def _alternatives(
    context: PolicyContext, assignment: Assignment, prices: Prices, op: Op
) -> Iterator[tuple[str, float]]:
    """Every other strategy, with what it would add."""
    chosen = assignment.choices[op.name]
    now = _around(context, assignment, prices, op)
    for strategy in context.strategies[op.name]:
        if strategy != chosen:
            other = replace(assignment, choices={**assignment.choices, op.name: strategy})
            try:
                yield strategy.name, _around(context, other, prices, op).seconds - now.seconds
            except ValueError:  # a neighbour needs it as it is
                continue


def _around(context: PolicyContext, assignment: Assignment, prices: Prices, op: Op) -> Price:
    """An operator, and the conversions of all values that it uses or makes."""
    flow = context.flow
    results = [pick for pick, source in flow.picks.items() if source.name == op.name]
    total = prices.operator(op, assignment.choices[op.name])
    for name in dict.fromkeys([*op.operands(), op.name, *results]):
        total = total.plus(price_of_value(flow, assignment, prices, name))
    return total


def table(rows: list[Row]) -> str:
    """Rows as text, one line for each operator, grouped by module."""
    lines, module = [], None
    for row in rows:
        if row.module != module:
            module = row.module
            lines.append(f"{module or '(root)'}    {row.source}".rstrip())
        moved = f"{row.moved / 1e6:.2f} MB by {' '.join(row.collectives)}" if row.moved else "nothing moved"
        instead = ", ".join(f"{name} {seconds * 1e3:+.3f} ms" for name, seconds in row.instead)
        split = f"{row.operator:<20} {row.strategy:<12} {row.placements:<24}"
        why = f"  instead: {instead}" if instead else ""
        lines.append(f"    {split} {row.seconds * 1e3:9.3f} ms  {moved}{why}")
    return "\n".join(lines)

"""Save plans as documents, load, check, compare and explain them.

A document is versioned JSON. It is self-contained: it holds all facts about operators that it explains
(source lines, costs, alternatives).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nnx_core.errors import PlanError
from nnx_core.json_files import PlanFormat, save_plan
from nnx_nnscaler.ir.graph import Code, Graph, Make, Op, Ref, Size, TensorMeta, text_of
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.pipeline.outline import prepare
from nnx_nnscaler.pipeline.stages import make_stages
from nnx_nnscaler.plan.cost import CostModel, Price, Prices
from nnx_nnscaler.plan.evaluation import Evaluation, evaluate, price_of_value
from nnx_nnscaler.plan.flow import Assignment
from nnx_nnscaler.plan.pipeline_plan import AnyPlan, PipelinePlan, any_plan_from_text, any_plan_to_text
from nnx_nnscaler.plan.planning import assignment_of, rules_for
from nnx_nnscaler.plan.policies import PolicyContext, StrategiesOf
from nnx_nnscaler.plan.work import ALIASES, base_name

_FORMAT = PlanFormat("nnx-nnscaler", 1, "`Plan.save`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan, its target, and its reasons.

    Attributes:
        program: The plan inside a unit.
        units: The number of units that share the work.
        zero: True if the units shard parameters, gradients and optimizer state.
        graph: The fingerprint of its graph.
        hardware: The name of the figures behind the predictions.
        rows: The rows with the cost of each operator.
    """

    program: AnyPlan
    units: int = 1
    zero: bool = False
    graph: str = ""
    hardware: str = ""
    rows: tuple[Row, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.program.size * self.units

    @classmethod
    def of(
        cls,
        graph: Graph,
        program: AnyPlan,
        *,
        costs: CostModel | None = None,
        units: int = 1,
        zero: bool = False,
        strategies_of: StrategiesOf | None = None,
    ) -> Plan:
        """Return the document of a plan.

        Args:
            graph: The planned graph.
            program: The plan.
            costs: The cost model of the plan.
            units: The number of units that share the work.
            zero: True if the units shard parameters.
            strategies_of: The source of the alternatives in explanations.
        """
        costs = costs or CostModel()
        parts: Iterable[tuple[Graph, ProgramPlan]] = (
            [(graph, program)] if isinstance(program, ProgramPlan) else []
        )
        if isinstance(program, PipelinePlan):
            stages = make_stages(prepare(graph).outline, program.cuts)
            parts = zip((stage.graph for stage in stages), program.stages, strict=True)
        explained = partial(explain, costs=costs, units=units, zero=zero, strategies_of=strategies_of)
        rows = [row for part in parts for row in explained(*part)]
        hardware = f"{costs.hardware.name} ({costs.hardware.origin})"
        return cls(
            program=program,
            units=units,
            zero=zero,
            graph=fingerprint(graph),
            hardware=hardware,
            rows=tuple(rows),
        )

    def save(self, path: str | Path) -> None:
        """Write the document.

        Raises:
            PlanError: The file cannot be written.
        """
        body = {
            **_FORMAT.head,
            "units": self.units,
            "zero": self.zero,
            "graph": self.graph,
            "hardware": self.hardware,
            "program": json.loads(any_plan_to_text(self.program)),
            "rows": [asdict(row) for row in self.rows],
        }
        save_plan(path, json.dumps(body, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a document by `save`.

        Raises:
            PlanError: The file is missing or damaged.
        """
        body = _FORMAT.load(path)
        try:
            return cls(
                program=any_plan_from_text(json.dumps(body["program"])),
                units=int(body["units"]),
                zero=bool(body["zero"]),
                graph=str(body["graph"]),
                hardware=str(body["hardware"]),
                rows=tuple(_row(row) for row in body["rows"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"the plan {str(path)!r} is damaged: {type(error).__name__}: {error}.",
                remedy="Plan again, and save the plan again.",
            ) from error

    def check(self, graph: Graph, *, world_size: int, size: int | None = None, path: str = "") -> None:
        """Refuse to run another model or another world.

        Args:
            graph: The graph to run.
            world_size: The number of running ranks.
            size: The number of ranks of a unit, if known.
            path: The path of the document, for the message.

        Raises:
            PlanError: The plan was made for another graph or world.
        """
        named = f"the plan {path!r}" if path else "this plan"
        if world_size != self.world_size or size not in (None, self.program.size):
            running = f"{world_size} are running{'' if size is None else f' in units of {size}'}"
            raise PlanError(
                f"{named} is for {self.world_size} ranks ({self.units} units of {self.program.size}), and "
                f"{running}.",
                remedy=f"Start {self.world_size} ranks with plan_ngpus={self.program.size}, or plan again.",
            )
        if fingerprint(graph) != self.graph:
            raise PlanError(
                f"{named} was made for another graph{_difference(graph, self.program)}.",
                remedy="Plan again: the model, its shapes or the code of its forward have changed.",
            )

    def explain(self) -> str:
        """Describe the splits of each layer, their traffic and time, and the cost of alternatives."""
        prediction = self.program.prediction
        zero = " with ZeRO" if self.zero else ""
        head = (
            f"policy {self.program.policy}: {self.units} unit{'s' * (self.units > 1)} of "
            f"{self.program.size} ranks{zero}, predicted by {self.hardware}: "
            f"{prediction.compute * 1e3:.3f} ms of computation and "
            f"{prediction.communication * 1e3:.3f} ms of communication in a step, "
            f"{prediction.memory / 2**20:.1f} MiB on each rank"
        )
        parts = sum(placement.is_shard for placement in self.program.stored.values())
        stored = (
            f"{parts} of {len(self.program.stored)} parameters sharded, gradients of "
            f"{len(self.program.synchronized)} summed over the unit"
        )
        stages = f"{self.program.reason}\n" if isinstance(self.program, PipelinePlan) else ""
        return f"{head}\n{stages}{stored}\n{table(list(self.rows))}"


def _row(row: dict[str, Any]) -> Row:
    collectives = tuple(map(str, row["collectives"]))
    instead = tuple((str(name), float(seconds)) for name, seconds in row["instead"])
    return Row(**{**row, "collectives": collectives, "instead": instead})


def _difference(graph: Graph, program: AnyPlan) -> str:
    """Return the obvious differences of a graph and a plan."""
    names = {op.name for op in graph.ops}
    if isinstance(program, PipelinePlan):
        return ""  # the plan has the operators of a microbatch
    new, gone = len(names - set(program.choices)), len(set(program.choices) - names)
    return f": {new} operators are new and {gone} are gone" if new or gone else ""


def fingerprint(graph: Graph) -> str:
    """Hash the facts that a plan depends on: operators, arguments, shapes, parameters.

    The traced batch does not count if the graph knows it as a symbol. Source lines do not count.
    """
    text = [
        repr([(leaf.name, _plain(leaf.meta), leaf.constant) for leaf in graph.inputs]),
        repr([(name, fqn, _plain(graph.metas[name])) for name, fqn in graph.parameters.items()]),
        repr([(name, fqn, _plain(graph.metas[name])) for name, fqn in graph.buffers.items()]),
        *(
            repr((op.name, op.target, _plain(op.args), _plain(op.kwargs), _plain(op.output)))
            for op in graph.ops
        ),
        repr((_plain(graph.outputs), graph.training)),
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32]


def _plain(argument: object) -> object:
    """Return an argument with symbolic sizes as their expressions."""
    if isinstance(argument, Size):
        return argument.expr
    if isinstance(argument, TensorMeta):
        return ([text_of(dim) for dim in argument.shape], argument.dtype, argument.differentiable)
    if isinstance(argument, (list, tuple)):
        return [_plain(item) for item in argument]
    if isinstance(argument, dict):
        return [(key, _plain(item)) for key, item in argument.items()]
    if isinstance(argument, Make):
        return (argument.type, _plain(argument.fields))
    return repr(argument) if isinstance(argument, (Ref, Code)) else argument


def diff(before: Plan, after: Plan) -> list[str]:
    """Return the differences of two plans, a line each; none for equal plans."""
    return [
        *_changed_heads(before, after),
        *_changed_parameters(before, after),
        *_changed_choices(before, after),
    ]


def _changed_heads(before: Plan, after: Plan) -> Iterator[str]:
    for name, old, new in (
        ("policy", before.program.policy, after.program.policy),
        ("ranks of a unit", before.program.size, after.program.size),
        ("units", before.units, after.units),
        ("ZeRO", before.zero, after.zero),
        ("graph", before.graph, after.graph),
        ("stages", _stages_of(before.program), _stages_of(after.program)),
    ):
        if old != new:
            yield f"{name}: {old} -> {new}"
    old_time, new_time = before.program.prediction.time * 1e3, after.program.prediction.time * 1e3
    if old_time != new_time:
        yield f"predicted step: {old_time:.3f} ms -> {new_time:.3f} ms"


def _stages_of(program: AnyPlan) -> str:
    """Return the number of stages and their order."""
    if isinstance(program, ProgramPlan):
        return "none"
    stages, ranks = program.arrangement.stages, program.arrangement.ranks
    order = f"{program.schedule}, {program.microbatches} microbatches"
    return f"{stages} on {ranks} ranks, cut at {list(program.cuts)}, {order}"


def _changed_parameters(before: Plan, after: Plan) -> Iterator[str]:
    old, new = before.program, after.program
    for name in dict.fromkeys([*old.stored, *new.stored]):
        ways = [
            f"{plan.stored[name]}{' synchronized' * (name in plan.synchronized)}"
            if name in plan.stored
            else "absent"
            for plan in (old, new)
        ]
        if ways[0] != ways[1]:
            yield f"parameter {name}: {ways[0]} -> {ways[1]}"


def _changed_choices(before: Plan, after: Plan) -> Iterator[str]:
    modules = {row.name: row.module for plan in (before, after) for row in plan.rows}
    old, new = before.program.choices, after.program.choices
    for name in dict.fromkeys([*old, *new]):
        ways = [choices[name].name if name in choices else "absent" for choices in (old, new)]
        if old.get(name) != new.get(name) and "getitem" not in ways:
            where = f"{modules[name]}: " if modules.get(name) else ""
            yield f"{where}{name}: {ways[0]} -> {ways[1]}"


# Rows explain a plan: the cost of every operator under its strategy, and of its alternatives.


_ALTERNATIVES = 3
"""The number of alternatives to name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator of a plan.

    Attributes:
        name: The name in the graph.
        module: The submodule that calls it.
        operator: The kind, such as ``"linear"``.
        source: The place where the user's code calls it.
        strategy: The name of its strategy, such as ``"column"``.
        placements: The placements of operands and results: ``"R S(0) -> S(2)"``.
        collectives: The collectives that convert its operands, forward and backward:
            ``"all_gather__reduce_scatter"``.
        moved: The bytes of these collectives.
        seconds: The time of the operator, collectives included.
        instead: The names of alternatives, with the seconds that each adds if all else is equal.
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
    """Return the cost of each computing operator, and the reason for its split.

    Args:
        graph: The planned graph.
        plan: The plan.
        costs: The cost model of the plan.
        units: The number of units that share the work.
        zero: True if the units shard parameters.
        strategies_of: The source of alternatives; the registry of rules by default.
    """
    context = PolicyContext(graph, plan.size, rules_for(plan.size, strategies_of))
    assignment = assignment_of(graph, plan)
    prices = (costs or CostModel()).prices(graph, size=plan.size, units=units, zero=zero)
    evaluation = evaluate(context.flow, assignment, prices)
    return [
        _table_row(context, assignment, prices, evaluation, op)
        for op in context.flow.ops.values()
        if base_name(op) not in ALIASES
    ]


def _table_row(
    context: PolicyContext, assignment: Assignment, prices: Prices, evaluation: Evaluation, op: Op
) -> Row:
    strategy = assignment.choices[op.name]
    own, methods = evaluation.operators[op.name], []
    for changed in evaluation.conversions:
        if changed.consumers[0] == op.name:  # the first consumer pays for a shared conversion
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
    """Return every other strategy, with its additional cost."""
    chosen = assignment.choices[op.name]
    now = _around(context, assignment, prices, op)
    for strategy in context.strategies[op.name]:
        if strategy != chosen:
            other = replace(assignment, choices={**assignment.choices, op.name: strategy})
            try:
                yield strategy.name, _around(context, other, prices, op).seconds - now.seconds
            except ValueError:  # a neighbor needs the present placement
                continue


def _around(context: PolicyContext, assignment: Assignment, prices: Prices, op: Op) -> Price:
    """Return the price of an operator, and of the conversions of all values that it uses or makes."""
    flow = context.flow
    results = [pick for pick, source in flow.picks.items() if source.name == op.name]
    total = prices.operator(op, assignment.choices[op.name])
    for name in dict.fromkeys([*op.operands(), op.name, *results]):
        total = total.plus(price_of_value(flow, assignment, prices, name))
    return total


def table(rows: list[Row]) -> str:
    """Return rows as text, one line for each operator, grouped by module."""
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

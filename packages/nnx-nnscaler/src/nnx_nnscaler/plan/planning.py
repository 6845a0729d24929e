"""Plan one program: a policy narrows the options, and the solver chooses within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from nnx_core.errors import PlanError
from nnx_nnscaler.ir.graph import Graph, Op, Size, TensorMeta
from nnx_nnscaler.ir.placement import Placement, R, Strategy
from nnx_nnscaler.ir.program_plan import Prediction, ProgramPlan
from nnx_nnscaler.plan.cost import CostModel, Prices, Stored
from nnx_nnscaler.plan.evaluation import evaluate
from nnx_nnscaler.plan.flow import Assignment, Flow, synchronize_what_passes_on
from nnx_nnscaler.plan.peak_memory import peak_memory
from nnx_nnscaler.plan.policies import Policy, PolicyContext, StrategiesOf, policy_of
from nnx_nnscaler.plan.solver import Problem, Program, fold
from nnx_nnscaler.rules.rule import outputs_of, replicate

_SURE = 1.04
"""The factor by which a plan must be faster than one that splits only the batch.

Splitting only the batch communicates least often, and the cost of communication within a step is the least
certain prediction.
"""
_ROUNDS = 6
"""The number of times that `_within` tightens the solver's limit."""


def plan_program(
    graph: Graph,
    *,
    size: int,
    policy: str | Policy = "autodist",
    costs: CostModel | None = None,
    stored: Mapping[str, Placement] | None = None,
    synchronized: Collection[str] | None = None,
    constraints: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    units: int = 1,
    zero: bool = False,
    strategies_of: StrategiesOf | None = None,
) -> ProgramPlan:
    """Plan the run of a graph on the ranks of a unit.

    Args:
        graph: The traced forward.
        size: The number of ranks of the unit.
        policy: The name of a policy, or a function that takes a `PolicyContext`.
        costs: The figures of the prediction; by default the published figures of a plain CPU.
        stored: The present placements of parameters by fully qualified name, to plan a further program of a
            model that is laid out; unnamed parameters are replicated.
        synchronized: The parameters whose gradients the reducer sums over the unit; used with `stored`.
        constraints: The strategy name by module or parameter pattern, in addition to the policy.
        memory_limit: The bytes that each rank may use.
        units: The number of units, each with a batch of its own.
        zero: True if the units shard parameters, gradients and optimizer state.
        strategies_of: The source of strategies; by default the registry of rules.

    Raises:
        OptionError: There is no such policy.
        PlanError: The policy or a constraint is impossible, or no plan fits the memory.
        UnsupportedError: The policy plans pipelines.
    """
    name, narrow = policy_of(policy)
    costs = costs or CostModel()
    context = PolicyContext(graph, size, rules_for(size, strategies_of))
    # The layout is fixed before the policy, which sees it, and again after it, as it may have changed it.
    if stored is not None:
        _keep_layout(context, stored, synchronized or ())
        kept = dict(context.stored)
    context.choose(narrow(context) or {})
    for pattern, strategy in (constraints or {}).items():
        context.pin(pattern, strategy)
    if stored is not None:
        context.stored = kept
    prices = costs.prices(graph, size=size, units=units, zero=zero)
    assignment = _solve(context, prices, memory_limit, limits=_Limits(name, units=units, zero=zero))
    if stored is None and graph.training:
        assignment = synchronize_what_passes_on(graph, assignment)
    found = _plan(graph, assignment, prices, context.flow, policy=name)
    # The plan of 'data' has a layout of its own, which a model that is laid out cannot take.
    if policy != "autodist" or stored is not None or size == 1:
        return found
    again = partial(plan_program, graph, size=size, costs=costs, constraints=constraints, units=units)
    same = partial(again, memory_limit=memory_limit, zero=zero, strategies_of=strategies_of)
    return _unless_data_does(found, same)


def replicated_plan(graph: Graph, size: int) -> ProgramPlan:
    """Return the plan by which every rank computes the complete graph."""
    choices = {op.name: replicate(op) for op in graph.ops}
    stored = dict.fromkeys(graph.parameters.values(), R)
    return ProgramPlan(size=size, policy="replicate", choices=choices, stored=stored)


def _unless_data_does(found: ProgramPlan, plan: Callable[..., ProgramPlan]) -> ProgramPlan:
    """Return the plan that was found, or the plan of policy 'data' if it is about as fast."""
    with suppress(PlanError):
        by_batch = plan(policy="data")
        ours, other = by_batch.prediction.time * 1e3, found.prediction.time * 1e3
        times = f"predicted: {ours:.3g} ms a step if only the batch is split, {other:.3g} ms by the best plan"
        if ours <= _SURE * other:
            reason = f"{times}, which has to gain {_SURE - 1:.0%}"
            return replace(by_batch, policy=found.policy, reason=reason)
        return replace(found, reason=times)
    return replace(found, reason="splitting the batch alone is not possible")


def rules_for(size: int, strategies_of: StrategiesOf | None = None) -> StrategiesOf:
    """Return the source of strategies."""
    # One rank has nothing to split, so it needs no rules.
    if size == 1:
        return _only_replicate
    if strategies_of is not None:
        return strategies_of
    from nnx_nnscaler.rules.registry import strategies_of as registered

    return registered


def _only_replicate(op: Op, graph: Graph, size: int) -> list[Strategy]:
    return [replicate(op)]


def _keep_layout(
    context: PolicyContext, stored: Mapping[str, Placement], synchronized: Collection[str]
) -> None:
    """Keep only the present layout of the parameters."""
    for name, fqn in context.graph.parameters.items():
        context.stored[name] = (Stored(stored.get(fqn, R), fqn in synchronized),)


class _Limits:
    """The facts of an error about memory."""

    def __init__(self, policy: str, *, units: int, zero: bool) -> None:
        self.policy = policy
        self.units = units
        self.zero = zero

    def error(self, limit: int, least: int, size: int) -> PlanError:
        """Return the error that no plan fits, with the remedies that apply."""
        knobs = [f"more ranks for each unit (plan_ngpus, now {size})"]
        if self.units > 1 and not self.zero:
            knobs.append("use_zero=True")
        if self.policy != "autodist":
            knobs.append("policy 'autodist'")
        knobs += ["activation checkpointing (recompute)", "a smaller batch"]
        return PlanError(
            f"no plan of policy {self.policy!r} fits into {bytes_text(limit)} on each of {size} ranks: "
            f"{least - limit} bytes ({bytes_text(least - limit)}) are missing, the smallest plan found "
            f"takes {bytes_text(least)}.",
            remedy=f"What helps: {', '.join(knobs[:-1])} or {knobs[-1]}.",
        )


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes as readable text."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _solve(context: PolicyContext, prices: Prices, limit: int | None, *, limits: _Limits) -> Assignment:
    problem = fold(context.flow, context.choices())
    program = Program(problem, prices, memory=limit is not None)
    solution = program.solve()
    if solution is None:
        raise PlanError(
            f"policy {limits.policy!r} and its constraints contradict each other: no choice is left for "
            "which every operator gets its operands as it needs them.",
            remedy="Leave out a constraint, or pin fewer operators.",
        )
    best = problem.assignment(solution.chosen)
    if limit is None:
        return best
    peak = peak_memory(context.flow, best, prices)
    if peak <= limit:
        return best
    return _within(context.flow, problem, program, prices, limit, limits, uncounted=peak - solution.memory)


def _within(
    flow: Flow,
    problem: Problem,
    program: Program,
    prices: Prices,
    limit: int,
    limits: _Limits,
    *,
    uncounted: float,
) -> Assignment:
    """Return the fastest plan whose predicted peak keeps the limit."""
    # The solver counts parameters' gradients from the start, no gradients of activations, and nothing
    # short-lived. So its limit is shifted by the difference, and falls while the predicted peak is too high.
    solution = program.solve(least_memory=True)
    least = problem.assignment(solution.chosen) if solution else None
    if solution is None or least is None:
        raise limits.error(limit, limit + 1, prices.size)
    smallest, allowed = peak_memory(flow, least, prices), limit - uncounted
    fitting = least if smallest <= limit else None
    for _ in range(_ROUNDS):
        # Below the smallest memory that the solver knows there would be no solution.
        found = _assignment(problem, program, limit=max(allowed, solution.objective * (1 + 1e-9)))
        if found is None:
            break
        peak = peak_memory(flow, found, prices)
        smallest = min(smallest, peak)
        if peak <= limit:
            return found
        # The solver was already at the smallest plan that it knows.
        if allowed < solution.objective:
            break
        allowed -= peak - limit
    if fitting is None:
        raise limits.error(limit, smallest, prices.size)
    return fitting


def _assignment(problem: Problem, program: Program, limit: float) -> Assignment | None:
    solution = program.solve(limit=limit)
    return None if solution is None else problem.assignment(solution.chosen)


def _plan(graph: Graph, assignment: Assignment, prices: Prices, flow: Flow, *, policy: str) -> ProgramPlan:
    total = evaluate(flow, assignment, prices).total
    names = graph.parameters
    return ProgramPlan(
        size=prices.size,
        policy=policy,
        choices=_all_choices(graph, assignment, flow),
        stored={names[name]: stored.placement for name, stored in assignment.stored.items()},
        synchronized=frozenset(
            names[name] for name, stored in assignment.stored.items() if stored.synchronized
        ),
        divisible=tuple(sorted(_divisible(graph, assignment, flow, prices.size))),
        prediction=Prediction(
            compute=total.compute,
            communication=total.communication,
            memory=peak_memory(flow, assignment, prices),
        ),
    )


def _all_choices(graph: Graph, assignment: Assignment, flow: Flow) -> dict[str, Strategy]:
    """Return the strategies in the order of the graph; a getitem has the placement of its result."""
    choices = {}
    for op in graph.ops:
        strategy = assignment.choices.get(op.name)
        if strategy is None:
            placement = assignment.placement(flow, op.name)
            strategy = Strategy("getitem", (placement,), (placement,))
        choices[op.name] = strategy
    return choices


def _divisible(graph: Graph, assignment: Assignment, flow: Flow, size: int) -> set[tuple[str, int]]:
    """Return the sizes that must be divisible in every batch that runs this plan."""
    found = set()
    for name, op in flow.ops.items():
        strategy = assignment.choices[name]
        metas = [graph.meta(operand) for operand in op.operands()]
        placed = zip((*metas, *outputs_of(op)), (*strategy.inputs, *strategy.outputs), strict=True)
        for meta, placement in placed:
            found |= set(_symbolic(meta, placement, size))
    return found


def _symbolic(meta: TensorMeta, placement: Placement, size: int) -> Iterator[tuple[str, int]]:
    if placement.is_shard and isinstance(dim := meta.shape[placement.dim], Size):
        yield dim.expr, size * placement.groups


def assignment_of(graph: Graph, plan: ProgramPlan) -> Assignment:
    """Return the choices of a plan, to evaluate it again.

    Args:
        graph: The graph that it was made for.
        plan: The plan.
    """
    flow = Flow(graph)
    stored = {
        name: Stored(plan.stored.get(fqn, R), fqn in plan.synchronized)
        for name, fqn in graph.parameters.items()
    }
    return Assignment({name: plan.choices[name] for name in flow.ops}, stored)

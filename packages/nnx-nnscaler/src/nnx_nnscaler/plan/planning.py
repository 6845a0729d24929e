"""Planning one program: choices are narrowed by a policy, priced, and solved within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_nnscaler.ir.graph import Graph, Op, Size, TensorMeta
from nnx_nnscaler.ir.placement import P, Placement, R, S, Strategy
from nnx_nnscaler.ir.program_plan import Prediction, ProgramPlan
from nnx_nnscaler.options import PIPELINES
from nnx_nnscaler.plan.cost import CostModel, Prices, Stored
from nnx_nnscaler.plan.evaluation import Assignment, Flow, evaluate, peak_memory, synchronize_what_passes_on
from nnx_nnscaler.plan.solver import Choices, Problem, Program, fold
from nnx_nnscaler.rules.rule import outputs_of, replicate

# --- what a policy works on -------------------------------------------------------------------------
# Every operator's ways of being split, which a policy narrows down in place (`pin`, `only`, `store`); it may
# also return the strategy of some operators itself, by name. What it leaves open is solved.

StrategiesOf = Callable[[Op, Graph, int], Iterable[Strategy]]


class PolicyContext:
    """A graph and what may still be chosen for it.

    Attributes:
        graph: The graph that is planned.
        size: Ranks of the unit.
        strategies: The strategies that every operator may choose from, by name; never empty.
        stored: The ways in which every parameter may be stored, by value name; never empty.
    """

    def __init__(self, graph: Graph, size: int, strategies_of: StrategiesOf) -> None:
        self.graph = graph
        self.size = size
        self.flow = Flow(graph)
        self.strategies: dict[str, tuple[Strategy, ...]] = {
            name: tuple(dict.fromkeys(strategies_of(op, graph, size))) for name, op in self.flow.ops.items()
        }
        self.stored: dict[str, tuple[Stored, ...]] = self._all_stored()

    def _all_stored(self) -> dict[str, tuple[Stored, ...]]:
        """Whole, whole with gradients that are summed later, or in one of the parts that someone uses."""
        wanted: dict[str, dict[Placement, None]] = {name: {} for name in self.graph.parameters}
        for name, op in self.flow.ops.items():
            for position, operand in enumerate(op.operands()):
                if operand in wanted:
                    used = [strategy.inputs[position] for strategy in self.strategies[name]]
                    wanted[operand].update(
                        dict.fromkeys(placement for placement in used if placement.is_shard)
                    )
        return {name: self._stored(self.graph.metas[name], parts) for name, parts in wanted.items()}

    def _stored(self, meta: TensorMeta, parts: Iterable[Placement]) -> tuple[Stored, ...]:
        whole = (Stored(R), Stored(R, synchronized=True)) if meta.differentiable else (Stored(R),)
        even = largest_part(meta, self.size)
        placements = dict.fromkeys([*parts, *([even] if even else [])])
        return (*whole, *map(Stored, placements)) if self.size > 1 else (Stored(R),)

    # --- looking --------------------------------------------------------------------------------

    def op(self, name: str) -> Op:
        """An operator by name."""
        return self.flow.ops[name]

    def matching(self, pattern: str) -> list[Op]:
        """Operators that belong to a module whose name matches, or that use a parameter whose name does."""
        parameters = self.graph.parameters
        return [
            op
            for op in self.flow.ops.values()
            if fnmatchcase(op.module, pattern)
            or any(fnmatchcase(parameters[name], pattern) for name in op.operands() if name in parameters)
        ]

    def splits_batch(self, op: Op, strategy: Strategy) -> bool:
        """Whether some tensor of an operator is split along the batch."""
        return any(self._along_batch(meta, placement) for meta, placement in self._placed(op, strategy))

    def splits_other(self, op: Op, strategy: Strategy) -> bool:
        """Whether some tensor of an operator is split along a dim that is not the batch."""
        return any(
            placement.is_shard and not self._along_batch(meta, placement)
            for meta, placement in self._placed(op, strategy)
        )

    def splits_parameter(self, op: Op, strategy: Strategy) -> bool:
        """Whether a parameter is used in parts."""
        operands = zip(op.operands(), strategy.inputs, strict=True)
        return any(placement.is_shard for name, placement in operands if name in self.graph.parameters)

    def _placed(self, op: Op, strategy: Strategy) -> Iterable[tuple[TensorMeta, Placement]]:
        metas = [self.graph.meta(name) for name in op.operands()]
        return zip((*metas, *outputs_of(op)), (*strategy.inputs, *strategy.outputs), strict=True)

    def _along_batch(self, meta: TensorMeta, placement: Placement) -> bool:
        """The batch is what has a symbol for its size; in a graph without symbols, the first dim."""
        if not placement.is_shard:
            return False
        if self.graph.symbols:
            return isinstance(meta.shape[placement.dim], Size)
        return placement.dim == 0 and not any(
            meta is self.graph.metas[name] for name in self.graph.parameters
        )

    # --- narrowing down -------------------------------------------------------------------------

    def only(self, op: Op, wanted: Callable[[Op, Strategy], bool]) -> bool:
        """Keep the strategies that are wanted, if there are any; whether there were."""
        kept = tuple(strategy for strategy in self.strategies[op.name] if wanted(op, strategy))
        if kept:
            self.strategies[op.name] = kept
        return bool(kept)

    def pin(self, pattern: str, strategy: str) -> int:
        """Let the operators of matching modules (or parameters) take the strategy of that name.

        Args:
            pattern: Such as ``"blocks.*.fc"``; `fnmatch` rules.
            strategy: Such as ``"column"``. Operators of these modules that know no such strategy stay free.

        Returns:
            How many operators were pinned.

        Raises:
            PlanError: Nothing matches, or nothing that matches knows the strategy.
        """
        ops = self.matching(pattern)
        pinned = sum(self.only(op, lambda _, one: one.name == strategy) for op in ops)
        if pinned:
            return pinned
        if not ops:
            modules = sorted({op.module for op in self.flow.ops.values() if op.module})
            raise PlanError(
                f"no operator belongs to {pattern!r}.",
                remedy=f"Use a pattern of module or parameter names, such as {', '.join(modules[:3])}.",
            )
        known = dict.fromkeys(one.name for op in ops for one in self.strategies[op.name])
        raise PlanError(
            f"no operator of {pattern!r} can be split as {strategy!r} over {self.size} ranks.",
            remedy=f"Use one of: {', '.join(known)}.",
        )

    def store(self, pattern: str, placement: Placement) -> int:
        """Let matching parameters be stored in a placement.

        Returns:
            How many parameters that concerns.

        Raises:
            PlanError: No parameter matches, or one cannot be stored so.
        """
        names = [name for name, fqn in self.graph.parameters.items() if fnmatchcase(fqn, pattern)]
        if not names:
            some = ", ".join(list(self.graph.parameters.values())[:3])
            raise PlanError(
                f"no parameter is called {pattern!r}.", remedy=f"Use a pattern of names such as {some}."
            )
        for name in names:
            self._store(name, placement)
        return len(names)

    def _store(self, name: str, placement: Placement) -> None:
        shape = self.graph.metas[name].hints
        if placement.kind == "P" or not placement.fits(shape, self.size):
            raise PlanError(
                f"parameter {self.graph.parameters[name]!r} of shape {list(shape)} cannot be stored "
                f"{placement} over {self.size} ranks.",
                remedy="Choose R, or a dim that is a multiple of the ranks.",
            )
        known = tuple(stored for stored in self.stored[name] if stored.placement == placement)
        self.stored[name] = known or (Stored(placement),)

    def choose(self, chosen: Mapping[str, Any]) -> None:
        """Take strategies by operator name, as a callable policy may return them.

        Raises:
            PlanError: There is no such operator, or it cannot be split so.
        """
        for name, strategy in chosen.items():
            if name not in self.strategies:
                raise PlanError(
                    f"the policy chooses for {name!r}, which is no operator of the graph.",
                    remedy="Use the names of `context.graph.ops`; a getitem has no choice.",
                )
            known = [one for one in self.strategies[name] if strategy in (one, one.name)]
            if not known:
                raise PlanError(
                    f"the policy chooses {strategy!r} for {name!r}, which cannot be split so.",
                    remedy=f"Use one of: {', '.join(one.name for one in self.strategies[name])}.",
                )
            self.strategies[name] = tuple(known)

    def choices(self) -> Choices:
        """What is left to choose."""
        return Choices(self.strategies, self.stored)


Policy = Callable[[PolicyContext], "Mapping[str, Any] | None"]
"""Narrows a `PolicyContext`, and may return strategies (or their names) of operators, by operator name."""


def largest_part(meta: TensorMeta, size: int) -> Placement | None:
    """The first dim that can be cut evenly: how a parameter is stored in parts that nobody uses as such."""
    return next((S(dim) for dim in range(len(meta.shape)) if S(dim).fits(meta.hints, size)), None)


# --- policies -------------------------------------------------------------------------------------
# The built-in policies, each a function that narrows what may be chosen.
#
# Pipeline policies are not here: `pipeline` cuts a graph into stages, which each get a plan from here.


def dp(context: PolicyContext) -> None:
    """Nothing is split: units of one rank, replicated.

    Raises:
        PlanError: The unit has more ranks.
    """
    if context.size > 1:
        raise PlanError(
            f"policy 'dp' splits nothing, but a unit has {context.size} ranks, which would all do the same.",
            remedy="Leave plan_ngpus at 1, or choose policy 'data', 'tp' or 'autodist'.",
        )


def data(context: PolicyContext) -> None:
    """The batch of a unit is split over its ranks wherever an operator can; parameters stay whole."""
    for op in context.flow.ops.values():
        context.only(
            op, lambda op, one: not context.splits_other(op, one) and not _drops_batch(context, op, one)
        )
    for name, options in context.stored.items():
        whole = tuple(stored for stored in options if not stored.placement.is_shard)
        context.stored[name] = tuple(stored for stored in whole if stored.synchronized) or whole


def zero(context: PolicyContext) -> None:
    """As `data`, with every parameter stored in parts that are gathered for use, where its shape allows."""
    data(context)
    for name in context.stored:
        part = largest_part(context.graph.metas[name], context.size)
        if part is not None and context.size > 1:
            context.stored[name] = (Stored(part),)


def tp(context: PolicyContext) -> None:
    """The batch is never split; every weight that can be used in parts is, and is stored so."""
    for op in context.flow.ops.values():
        context.only(op, lambda op, one: not context.splits_batch(op, one))
        weights = [name for name in op.operands() if _is_weight(context, name)]
        if weights:
            context.only(op, context.splits_parameter)
    for name, options in context.stored.items():
        used = _uses_in_parts(context, name)
        parts = tuple(stored for stored in options if stored.placement in used)
        whole = tuple(stored for stored in options if not stored.placement.is_shard)
        context.stored[name] = (parts if _is_weight(context, name) else (*whole, *parts)) or whole


def autodist(context: PolicyContext) -> None:
    """Everything is left to the solver, which prefers `data` where the difference is less than it knows."""


def _drops_batch(context: PolicyContext, op: Op, strategy: Strategy) -> bool:
    """Whether an operator could split the batch, does not, and is not about partial sums either."""
    if context.splits_batch(op, strategy) or P in strategy.inputs:
        return False
    return any(
        context.splits_batch(op, one) and not context.splits_other(op, one)
        for one in context.strategies[op.name]
    )


def _is_weight(context: PolicyContext, name: str) -> bool:
    return name in context.graph.parameters and len(context.graph.metas[name].shape) > 1


def _uses_in_parts(context: PolicyContext, name: str) -> set[object]:
    return {
        strategy.inputs[position]
        for op in context.flow.ops.values()
        for position, operand in enumerate(op.operands())
        if operand == name
        for strategy in context.strategies[op.name]
        if strategy.inputs[position].is_shard
    }


POLICIES: dict[str, Policy] = {"dp": dp, "data": data, "zero": zero, "tp": tp, "autodist": autodist}
"""The built-in policies of one program by name; users pass a function for one of their own."""


def policy_of(policy: str | Policy) -> tuple[str, Policy]:
    """A policy and its name.

    Raises:
        OptionError: There is none of that name.
        UnsupportedError: It plans pipelines.
    """
    if callable(policy):
        return getattr(policy, "__name__", type(policy).__name__), policy
    if policy in PIPELINES:
        raise UnsupportedError(
            f"policy {policy!r} plans a pipeline, which is not one program.",
            remedy=f"Use one of {', '.join(POLICIES)}.",
        )
    if policy not in POLICIES:
        raise OptionError(f"there is no policy {policy!r}.", remedy=f"Use one of {', '.join(POLICIES)}.")
    return policy, POLICIES[policy]


# --- planning -------------------------------------------------------------------------------------
# Planning one program: choices are narrowed by a policy, priced, and solved within a memory limit.


_SURE = 1.04
"""A plan that splits only the batch is taken unless another is predicted to be faster by more than this.

It communicates least often, and what communication costs in the middle of a step is predicted worst.
"""
_ROUNDS = 6
"""How often the solver's limit is tightened until the walk through the step confirms it."""


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
    """Plan how the ranks of a unit run a graph.

    Args:
        graph: The traced forward.
        size: Ranks of the unit.
        policy: A policy's name, or a function that takes a `PolicyContext`.
        costs: The figures that time and memory are predicted with; published ones of a plain CPU by default.
        stored: Says how parameters are stored already, by fully qualified name, when a further program is
            planned for a model that was laid out; a parameter that is not named is whole.
        synchronized: With `stored`, the parameters whose gradients the reducer sums over the unit.
        constraints: Module or parameter pattern to strategy name, on top of the policy.
        memory_limit: Bytes that each rank may use.
        units: The number of units that share the work, each with a batch of its own.
        zero: True if the units keep parameters, gradients and optimizer state in parts.
        strategies_of: The source of strategies; the registry of rules by default.

    Raises:
        OptionError: There is no such policy.
        PlanError: The policy or a constraint asks for what is not possible, or no plan fits into the memory.
        UnsupportedError: The policy plans pipelines.
    """
    name, narrow = policy_of(policy)
    costs = costs or CostModel()
    context = PolicyContext(graph, size, rules_for(size, strategies_of))
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
    if policy != "autodist" or stored is not None or size == 1:
        return found
    again = partial(plan_program, graph, size=size, costs=costs, constraints=constraints, units=units)
    same = partial(again, memory_limit=memory_limit, zero=zero, strategies_of=strategies_of)
    return _unless_data_does(found, same)


def replicated_plan(graph: Graph, size: int) -> ProgramPlan:
    """The plan by which every rank does everything."""
    choices = {op.name: replicate(op) for op in graph.ops}
    stored = dict.fromkeys(graph.parameters.values(), R)
    return ProgramPlan(size=size, policy="replicate", choices=choices, stored=stored)


def _unless_data_does(found: ProgramPlan, plan: Callable[..., ProgramPlan]) -> ProgramPlan:
    """The plan that was found, or one that splits only the batch if it is as fast for all that is known."""
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
    """Where the strategies of operators come from; one rank has nothing to split."""
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
    """Leave only the layout that the parameters have."""
    for name, fqn in context.graph.parameters.items():
        context.stored[name] = (Stored(stored.get(fqn, R), fqn in synchronized),)


# --- solving ----------------------------------------------------------------------------------------


class _Limits:
    """What a message about memory needs to know."""

    def __init__(self, policy: str, *, units: int, zero: bool) -> None:
        self.policy = policy
        self.units = units
        self.zero = zero

    def error(self, limit: int, least: int, size: int) -> PlanError:
        """That no plan fits, and what helps."""
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
    """A number of bytes, as one reads it."""
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
    """The fastest plan whose walk through a step stays within the limit.

    The program counts otherwise than the walk (gradients of parameters from the start, none of activations,
    nothing short-lived), so its own limit is moved by what they differ, and lowered while the walk exceeds
    it.
    """
    solution = program.solve(least_memory=True)
    least = problem.assignment(solution.chosen) if solution else None
    if solution is None or least is None:
        raise limits.error(limit, limit + 1, prices.size)
    smallest, allowed = peak_memory(flow, least, prices), limit - uncounted
    fitting = least if smallest <= limit else None
    for _ in range(_ROUNDS):
        found = _assignment(problem, program, limit=max(allowed, solution.objective * (1 + 1e-9)))
        if found is None:
            break
        peak = peak_memory(flow, found, prices)
        smallest = min(smallest, peak)
        if peak <= limit:
            return found
        if allowed < solution.objective:
            break
        allowed -= peak - limit
    if fitting is None:
        raise limits.error(limit, smallest, prices.size)
    return fitting


def _assignment(problem: Problem, program: Program, limit: float) -> Assignment | None:
    solution = program.solve(limit=limit)
    return None if solution is None else problem.assignment(solution.chosen)


# --- the result -------------------------------------------------------------------------------------


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
    """The strategies in the order of the graph; a getitem's says in which placement its result comes."""
    choices = {}
    for op in graph.ops:
        strategy = assignment.choices.get(op.name)
        if strategy is None:
            placement = assignment.placement(flow, op.name)
            strategy = Strategy("getitem", (placement,), (placement,))
        choices[op.name] = strategy
    return choices


def _divisible(graph: Graph, assignment: Assignment, flow: Flow, size: int) -> set[tuple[str, int]]:
    """Sizes that were even for the traced batch and have to be for any other that runs this plan."""
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
    """What a plan chose, for evaluating it again.

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


# --- two axes at once -----------------------------------------------------------------------------
# Planning two axes at once: how many ranks make a unit, and whether units store parameters in parts.
#
# Every unit works on a batch of its own, so what is compared is the time for one batch of all units
# together.


_LARGEST_UNIT = 128


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A plan for all ranks.

    Attributes:
        units: Number of units.
        zero: True if they store parameters, gradients and optimizer state in parts.
        program: The plan inside a unit.
    """

    units: int
    zero: bool
    program: ProgramPlan

    @property
    def seconds_per_batch(self) -> float:
        """Predicted time, divided by the batches that are worked on in it."""
        return self.program.prediction.time / self.units


@dataclass(frozen=True, slots=True)
class MeshSearch:
    """What was found.

    Attributes:
        best: The plan with the least time for one batch.
        tried: Every plan that fits, in order of the search.
        refused: Why other shapes of the mesh were left out, by ``(ranks of a unit, zero)``.
    """

    best: MeshPlan
    tried: Sequence[MeshPlan]
    refused: Mapping[tuple[int, bool], str]


def plan_mesh(
    graph: Graph,
    *,
    world_size: int,
    policy: str | Policy = "autodist",
    costs: CostModel | None = None,
    sizes: Iterable[int] | None = None,
    zero: Iterable[bool] = (False, True),
    constraints: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    strategies_of: StrategiesOf | None = None,
) -> MeshSearch:
    """Choose the shape of the mesh by planning for each. No process of it has to exist.

    Args:
        graph: The forward for the batch of one unit.
        world_size: All ranks.
        policy: The same as for `plan_program`.
        costs: The same as for `plan_program`; the profile should have figures for links across nodes.
        sizes: Ranks of a unit that are tried; by default the powers of two up to 128 that divide the world.
        zero: True to try ZeRO off, on, or both.
        constraints: The same as for `plan_program`.
        memory_limit: Bytes of each rank; by default what the hardware's profile says, if it does.
        strategies_of: The same as for `plan_program`.

    Raises:
        PlanError: A size does not divide the world, or no plan fits into the memory.
    """
    costs = costs or CostModel()
    limit = memory_limit or costs.hardware.memory or None
    tried: list[MeshPlan] = []
    refused: dict[tuple[int, bool], str] = {}
    for size in _sizes(world_size, policy, sizes):
        for parts in zero:
            units = world_size // size
            if parts and units == 1:
                continue
            try:
                program = plan_program(
                    graph, size=size, policy=policy, costs=costs, constraints=constraints,
                    memory_limit=limit, units=units, zero=parts, strategies_of=strategies_of,
                )  # fmt: skip
            except PlanError as error:
                refused[size, parts] = str(error)
                continue
            tried.append(MeshPlan(units, parts, program))
    if not tried:
        raise PlanError(
            f"no shape of a mesh of {world_size} ranks has a plan: "
            + " ".join(dict.fromkeys(refused.values())),
            remedy="Use more ranks, activation checkpointing (recompute) or a smaller batch.",
        )
    return MeshSearch(min(tried, key=lambda plan: plan.seconds_per_batch), tuple(tried), refused)


def _sizes(world_size: int, policy: str | Policy, sizes: Iterable[int] | None) -> list[int]:
    if sizes is None:
        if policy == "dp":
            return [1]
        powers = [2**power for power in range(_LARGEST_UNIT.bit_length())]
        return [size for size in powers if world_size % size == 0]
    sizes = list(sizes)
    for size in sizes:
        if size < 1 or world_size % size:
            raise PlanError(
                f"units of {size} ranks do not divide a world of {world_size}.",
                remedy="Choose divisors of the world size.",
            )
    return sizes

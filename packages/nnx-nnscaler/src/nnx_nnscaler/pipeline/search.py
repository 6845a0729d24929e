"""Search for a pipeline: cut the graph, plan each stage, and compare with a plan without stages.

`plan_pipeline` plans the requested pipeline. `with_stages` decides for policy ``autodist`` if a unit runs one
program on all of its ranks or a pipeline. It chooses stages if nothing else fits into the memory, or if they
are predicted to be clearly faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_nnscaler.compile.compiler import FixedLayout
from nnx_nnscaler.ir.graph import Graph, Make, Ref
from nnx_nnscaler.ir.placement import P
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.pipeline.cuts import choose_cuts, foreign_bytes
from nnx_nnscaler.pipeline.memory import Mesh, rooms, too_large, usage_of
from nnx_nnscaler.pipeline.microbatches import Microbatches, output_refs, possible_counts
from nnx_nnscaler.pipeline.outline import Outline, Prepared, prepare, traced_sizes
from nnx_nnscaler.pipeline.stages import Stage, homes_of, make_stages
from nnx_nnscaler.plan.cost import CostModel, Stored
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan, predicted
from nnx_nnscaler.plan.planning import bytes_text, plan_program
from nnx_nnscaler.plan.policies import Policy, PolicyContext, policy_of
from nnx_nnscaler.plan.schedules import (
    Arrangement,
    actions,
    waiting_share,
)

PER_RANK = 4
"""The default number of microbatches for each rank along the pipe."""
_ROUNDS = 4
"""The maximum number of times that the search tightens its limits to make a plan fit into the memory."""


class PipelineOptions(NamedTuple):
    """The request for a pipeline.

    Attributes:
        arrangement: The stages of each rank along the pipe.
        microbatches: The number of microbatches of a batch; None to choose it.
        cuts: The names of the submodules that the second and later stages begin with; empty to choose them.
        policy: The policy by which the ranks of a stage share its operators.
        inner: The number of ranks of a stage.
        schedule: The order in which ranks work.
    """

    arrangement: Arrangement
    microbatches: int | None = None
    cuts: tuple[str, ...] = ()
    policy: str | Policy = "autodist"
    inner: int = 1
    schedule: str = "gpipe"


def plan_pipeline(
    graph: Graph,
    options: PipelineOptions,
    *,
    costs: CostModel,
    layout: FixedLayout | None = None,
    constraints: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    units: int = 1,
    zero: bool = False,
) -> PipelinePlan:
    """Plan how the ranks of a unit run a graph as stages.

    Args:
        graph: The traced forward.
        options: The requested arrangement, schedule, microbatches and cuts.
        costs: The cost model.
        layout: The placement of parameters that an earlier program has decided.
        constraints: The strategies by which ranks split operators within stages, by names of modules.
        memory_limit: The bytes that each rank may use.
        units: The number of units that share the work.
        zero: True if units shard model states.

    Raises:
        PlanError: The model cannot be cut so, the memory is too small, or the batch cannot become this number
            of microbatches.
        UnsupportedError: The forward does something that stages cannot do.
    """
    if layout is not None and layout.homes is None:
        raise UnsupportedError(
            "the first call could not be cut into stages, so every rank stores the complete model.",
            remedy="Change the code that the log named then, or use strategy 'nnscaler_zero'.",
        )
    prepared = prepare(graph)
    mesh = Mesh(costs, units, zero, options.schedule, 1)
    search = _Search(prepared, options, mesh, layout, constraints, memory_limit)
    for wished in _wished_microbatches(prepared, options, layout, memory_limit):
        found = search.best(wished)
        if search.fits(found):
            return replace(found, reason=_explained(found, prepared.outline))
    assert memory_limit is not None
    knobs = (
        [f"more microbatches (pipeline_nmicros, now {options.microbatches})"] if options.microbatches else []
    )
    knobs += (
        ["another cut (without stage_cuts)"]
        if options.cuts
        else ["more ranks along the pipe (plan_ngpus, pp_size)"]
    )
    if units > 1 and not zero:
        knobs.append("use_zero=True")
    raise too_large(found, memory_limit, knobs)


class _Search:
    """The search for the plan of one graph; its arguments are those of `plan_pipeline`."""

    def __init__(
        self,
        prepared: Prepared,
        options: PipelineOptions,
        mesh: Mesh,
        layout: FixedLayout | None,
        constraints: Mapping[str, str] | None,
        limit: int | None,
    ) -> None:
        self._prepared = prepared
        self._options = options
        self._mesh = mesh
        self._layout = layout
        self._constraints = constraints
        self._limit = limit
        graph, outline = prepared.graph, prepared.outline
        self._prices = outline.costs(mesh.costs, units=mesh.units, zero=mesh.zero)
        self._loss = loss_of(graph, prepared.cut)
        in_turns = self._loss and not prepared.cut.hindrance and graph.training
        self._schedule = options.schedule if in_turns else "gpipe"
        self._symbols = traced_sizes(graph)

    def fits(self, plan: PipelinePlan) -> bool:
        """Return True if each rank stays within its memory."""
        return self._limit is None or max(used.peak for used in plan.usage) <= self._limit

    def best(self, wished: int) -> PipelinePlan:
        """Return the best plan for a number of microbatches; if none fits, the closest one.

        The first try is the fastest plan. Only a plan shows the exact memory of its stages, so each try
        tightens the search's limits by the excess of the one before.

        Args:
            wished: The requested number of microbatches of a batch.
        """
        options, limit = self._options, self._limit
        most = [inf if limit is None else float(limit)] * options.arrangement.ranks
        found: list[PipelinePlan] = []
        limits: list[float] = []
        if self._cuts(wished, most) is None:
            return self._planned(self._even_cuts(wished), wished)
        for _ in range(_ROUNDS):
            cuts = self._cuts(wished, limits)
            if cuts is None:
                break
            found += self._tried(cuts, wished)
            if self.fits(found[-1]) or options.cuts or self._layout is not None:
                return found[-1]
            over = [max(0, used.peak - int(most[0])) if limits else 0 for used in found[-1].usage]
            limits = [mine - more for mine, more in zip(limits or most, over, strict=True)]
        found += self._tried(self._even_cuts(wished), wished)
        return min(found, key=lambda plan: max(used.peak for used in plan.usage))

    def _tried(self, cuts: Sequence[int], wished: int) -> list[PipelinePlan]:
        """Return the plan of a cut; if it is too large and ranks can split operators, also a smaller one."""
        plan = self._planned(cuts, wished)
        if self.fits(plan) or self._options.inner == 1:
            return [plan]
        return [plan, self._planned(cuts, wished, before=plan)]

    def _cuts(self, wished: int, limits: Sequence[float]) -> list[int] | None:
        """Return the cuts: the named ones, those near the parameters' homes, or the fastest ones."""
        options, outline = self._options, self._prepared.outline
        if options.cuts:
            return _named_cuts(outline, options.cuts)
        stages = options.arrangement.stages
        schedule, count = self._order(wished)
        prices = self._prices.of_microbatches(count)
        if self._layout is not None:
            foreign = foreign_bytes(outline, self._layout.homes or {}, options.arrangement)
            return choose_cuts(prices, stages, foreign=foreign)
        if not limits:
            return choose_cuts(prices, stages)
        each = prices._replace(lasting=prices.lasting / options.inner, kept=prices.kept / options.inner)
        return choose_cuts(each, stages, rooms=rooms(options.arrangement, schedule, count, limits))

    def _even_cuts(self, wished: int) -> list[int]:
        """Return cuts that make stages about equal in bytes instead of time."""
        arrangement, prices = self._options.arrangement, self._prices
        share = max(
            max(room.shares.values())
            for room in rooms(arrangement, *self._order(wished), [inf] * arrangement.ranks)
        )
        even = prices._replace(seconds=prices.lasting + share * prices.kept)
        return choose_cuts(even, arrangement.stages) or []

    def _order(self, wished: int, divisible: Sequence[tuple[str, int]] = ()) -> tuple[str, int]:
        """Return the schedule of the traced batch, and its number of microbatches."""
        counts = list(possible_counts(self._prepared.cut, self._symbols, wished, divisible))
        ranks, stages, _ = self._options.arrangement
        for count in counts:
            if actions(self._schedule, ranks, stages, count) is not None:
                return self._schedule, count
        return "gpipe", counts[0]

    def _planned(self, cuts: Sequence[int], wished: int, before: PipelinePlan | None = None) -> PipelinePlan:
        """Return the plan of a cut; after a plan of it that is too large, one with less memory."""
        options, prepared, arrangement = self._options, self._prepared, self._options.arrangement
        stages = make_stages(prepared.outline, cuts)
        homes = homes_of(stages, arrangement) if self._layout is None else self._layout.homes or {}
        plans, known = self._plan_stages(stages, self._limits(before))
        divisible = tuple(sorted({item for plan in plans for item in plan.divisible}))
        schedule, count = self._order(wished, divisible)
        mesh = self._mesh._replace(schedule=schedule, microbatches=count)
        bounds = [0, *cuts, len(prepared.outline.ops)]
        seconds = self._prices.of_microbatches(count).seconds
        return PipelinePlan(
            size=arrangement.ranks * options.inner,
            policy="pp" if options.inner == 1 else "hybrid",
            arrangement=arrangement,
            cuts=tuple(cuts),
            stages=tuple(plans),
            seconds=tuple(float(seconds[stop] - seconds[start]) for start, stop in pairwise(bounds)),
            usage=usage_of(stages, plans, homes, arrangement, mesh),
            homes=homes,
            stored={name: stored.placement for name, stored in known.items()},
            synchronized=frozenset(name for name, stored in known.items() if stored.synchronized),
            divisible=divisible,
            schedule=options.schedule,
            loss=self._loss or "",
            microbatches=wished,
            notes=_notes(prepared, options.schedule, self._loss),
        )

    def _limits(self, before: PipelinePlan | None) -> list[int | None]:
        """Return the limits of stages as programs of their own, if they took too much before."""
        arrangement = self._options.arrangement
        limits: list[int | None] = [None] * arrangement.stages
        if before is not None and self._limit is not None:
            for rank, used in enumerate(before.usage):
                own = arrangement.stages_of(rank)
                for stage in own if used.peak > self._limit else ():
                    memory = before.stages[stage].prediction.memory
                    limits[stage] = max(1, memory - (used.peak - self._limit) // len(own))
        return limits

    def _plan_stages(
        self, stages: Sequence[Stage], limits: Sequence[int | None]
    ) -> tuple[list[ProgramPlan], dict[str, Stored]]:
        """Plan every stage; a parameter of several stages gets the placement of the first of them."""
        options, layout, mesh = self._options, self._layout, self._mesh
        known: dict[str, Stored] = {}
        if layout is not None:
            known = {
                name: Stored(placement, name in layout.synchronized)
                for name, placement in layout.stored.items()
            }
        plans: list[ProgramPlan] = []
        for stage, limit in zip(stages, limits, strict=True):
            shared = {fqn: known[fqn] for fqn in stage.graph.parameters.values() if fqn in known}
            plan = partial(
                plan_program,
                stage.graph,
                size=options.inner,
                policy=options.policy if not shared else _with_known(options.policy, shared),
                costs=mesh.costs,
                constraints=self._constraints,
                units=mesh.units,
                zero=mesh.zero,
            )
            plans.append(plan() if limit is None else _smaller(plan, limit))
            for name, placement in plans[-1].stored.items():
                known.setdefault(name, Stored(placement, name in plans[-1].synchronized))
        return plans, known


def loss_of(graph: Graph, cut: Microbatches) -> str | None:
    """Return the loss among a forward's results; None if there is none.

    It is the only number that sums over all samples, or the one that is returned as ``loss``.
    """
    numbers = [
        name
        for name in output_refs(graph)
        if cut.placements.get(name) == P and not graph.meta(name).shape and graph.meta(name).differentiable
    ]
    fields = graph.outputs.fields if isinstance(graph.outputs, Make) else graph.outputs
    named = fields.get("loss") if isinstance(fields, dict) else None
    chosen = {named.name} if isinstance(named, Ref) and named.name in numbers else set(numbers)
    return chosen.pop() if len(chosen) == 1 else None


def _notes(prepared: Prepared, schedule: str, loss: str | None) -> tuple[str, ...]:
    """Return the facts about microbatches and schedule that the user should know."""
    hindrance = prepared.cut.hindrance
    where = "" if prepared.graph.training else " of evaluation"
    notes = [f"cannot cut the batch{where} into microbatches ({hindrance})"] if hindrance else []
    if schedule != "gpipe" and prepared.graph.training and (hindrance or loss is None):
        reason = "no microbatches" if hindrance else "the forward returns no single loss of all samples"
        notes.append(f"schedule 'gpipe' instead of {schedule!r}: {reason}")
    return tuple(notes)


def _named_cuts(outline: Outline, names: Sequence[str]) -> list[int]:
    places = [outline.place_of_module(name) for name in names]
    if places != sorted(set(places)) or 0 in places:
        order = sorted(names, key=outline.place_of_module)
        raise PlanError(
            f"stage_cuts={list(names)} are not in the order in which the forward reaches them, or the first "
            "one begins with the forward itself.",
            remedy=f"Name the first submodule of each stage except the first stage, such as {order}.",
        )
    may = outline.may_begin()
    for name, place in zip(names, places, strict=True):
        if not may[place]:
            raise PlanError(
                f"a stage cannot begin with {name!r}: a buffer that is written before it is used after it.",
                remedy="Name a submodule before or after.",
            )
    return places


def _smaller(plan: Callable[..., ProgramPlan], limit: int) -> ProgramPlan:
    """Return a plan within a limit, or the one closest to it."""
    whole = plan()
    for share in (1.0, 0.5):
        with suppress(PlanError):
            memory = whole.prediction.memory
            return plan(memory_limit=int(memory - share * (memory - limit)))
    return whole


def _with_known(policy: str | Policy, known: Mapping[str, Stored]) -> Policy:
    """Return a policy under which some parameters keep their present placement."""
    name, narrow = policy_of(policy)

    def narrowed(context: PolicyContext) -> Any:
        chosen = narrow(context)
        for value, fqn in context.graph.parameters.items():
            if fqn in known:
                context.stored[value] = (known[fqn],)
        return chosen

    narrowed.__name__ = name
    return narrowed


def _wished_microbatches(
    prepared: Prepared, options: PipelineOptions, layout: FixedLayout | None, limit: int | None
) -> list[int]:
    """Return the numbers of microbatches to try; larger ones only help to fit into the memory."""
    if prepared.cut.hindrance:
        return [1]
    (batch,) = traced_sizes(prepared.graph).values()
    if options.microbatches is None:
        number = PER_RANK * options.arrangement.ranks
        more = [number << power for power in range(1, 32) if number << power <= batch and limit is not None]
        return [number, *(more if options.inner == 1 else more[-1:])]  # planning is slow then
    if layout is None and batch % options.microbatches:
        raise PlanError(
            f"pipeline_nmicros={options.microbatches} does not divide a batch of {batch} samples.",
            remedy="Choose a divisor of the batch size, or leave it out.",
        )
    return [options.microbatches]


def _explained(plan: PipelinePlan, outline: Outline) -> str:
    """Return the cut, the bubble and the memory as one clause."""
    first = [outline.ops[place].module or "the forward itself" for place in plan.cuts]
    times = ", ".join(f"{seconds * 1e3:.3g}" for seconds in plan.seconds)
    waits = plan.bubble
    if plan.schedule != "gpipe":
        with suppress(OptionError):  # another schedule runs instead of one that refuses the number
            waits = waiting_share(predicted(plan, plan.schedule))
    states, peaks = (", ".join(map(bytes_text, one)) for one in zip(*plan.usage, strict=True))
    return (
        f"{plan.arrangement.stages} stages, which begin with {', '.join(first) or 'the forward'} and are "
        f"predicted to take {times} ms a batch; with {plan.microbatches} microbatches a rank waits "
        f"{waits:.0%} of the time; parameters, gradients and optimizer state take {states} on the ranks "
        f"along the pipe, and all together up to {peaks}"
    )

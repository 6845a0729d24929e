"""How a graph becomes stages: the cut, the plan of each stage, and where parameters are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_nnscaler.compiler import FixedLayout
from nnx_nnscaler.cost.model import CostModel, Stored
from nnx_nnscaler.ir import Graph, hint_of
from nnx_nnscaler.pipeline.microbatches import Draw, Microbatches, cut_batch, draw_masks_first
from nnx_nnscaler.pipeline.picture import predicted, waiting_share
from nnx_nnscaler.pipeline.plan import PipelinePlan
from nnx_nnscaler.pipeline.schedules import loss_of
from nnx_nnscaler.pipeline.stages import (
    Arrangement,
    Outline,
    Stage,
    StageCosts,
    choose_cuts,
    foreign_bytes,
    homes_of,
    make_stages,
)
from nnx_nnscaler.plan.context import Policy, PolicyContext
from nnx_nnscaler.plan.planning import plan_program, policy_of
from nnx_nnscaler.plan.program_plan import ProgramPlan
from nnx_nnscaler.rules.rule import argument_of

_PER_RANK = 4
"""Microbatches for each rank along the pipe, where nobody says how many."""


class PipelineOptions(NamedTuple):
    """What the user asks of a pipeline.

    Attributes:
        arrangement: Which rank along the pipe has which stage.
        microbatches: Into how many a batch is cut; None to have it chosen.
        cuts: Names of the submodules that the second and later stages begin with; empty to have them chosen.
        policy: How the ranks of a stage share its operators.
        inner: Ranks of a stage.
        schedule: The order in which ranks work.
    """

    arrangement: Arrangement
    microbatches: int | None = None
    cuts: tuple[str, ...] = ()
    policy: str | Policy = "autodist"
    inner: int = 1
    schedule: str = "gpipe"


# --- planning -------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A graph on its way to stages.

    Attributes:
        graph: The graph of the whole batch, with inputs for masks.
        draws: What is drawn for these.
        cut: The graph of a microbatch.
        outline: Its operators in order.
    """

    graph: Graph
    draws: tuple[Draw, ...]
    cut: Microbatches
    outline: Outline


def prepare(graph: Graph) -> Prepared:
    """A graph on its way to stages, which follows from it alone.

    Raises:
        UnsupportedError: The forward does what stages cannot do.
    """
    if graph.kept:
        name, reason = next(iter(graph.kept.items()))
        raise UnsupportedError(
            f"{name} has to run whole, and a stage has only its own parameters: {reason}",
            remedy="Remove the hook, or use strategy 'nnscaler_zero'.",
        )
    sparse = next(
        (op for op in graph.ops if op.target == "aten.embedding.default" and argument_of(op, "sparse")), None
    )
    if sparse is not None:
        raise UnsupportedError(
            f"{sparse.module} has sparse gradients, which stages do not exchange.",
            remedy="Leave `sparse=True` out, or use strategy 'nnscaler_zero'.",
        )
    if any(leaf.meta is not None and leaf.meta.differentiable for leaf in graph.inputs):
        raise UnsupportedError(
            "an input of the forward requires a gradient, which only the first stage would have.",
            remedy="Detach it, or use strategy 'nnscaler_zero'.",
        )
    whole, draws = draw_masks_first(graph)
    cut = cut_batch(whole)
    return Prepared(whole, draws, cut, Outline(cut.graph))


def plan_pipeline(
    graph: Graph,
    options: PipelineOptions,
    *,
    costs: CostModel,
    layout: FixedLayout | None = None,
    constraints: Mapping[str, str] | None = None,
    units: int = 1,
    zero: bool = False,
) -> PipelinePlan:
    """Plan how the ranks of a unit run a graph as stages.

    Args:
        graph: The traced forward.
        options: What is asked for.
        costs: The figures that time is predicted with.
        layout: How parameters lie already, for a further program.
        constraints: As for `plan_program`, within stages.
        units: The number of units that share the work.
        zero: True if units keep states in parts.

    Raises:
        PlanError: The model cannot be cut so, or the batch not into so many microbatches.
        UnsupportedError: The forward does what stages cannot do.
    """
    if layout is not None and layout.homes is None:
        raise UnsupportedError(
            "the first call could not be cut into stages, so every rank stores the whole model.",
            remedy="Change what was in the way then, or use strategy 'nnscaler_zero'.",
        )
    prepared = prepare(graph)
    outline, arrangement = prepared.outline, options.arrangement
    prices = outline.costs(costs)
    cuts = _cuts(outline, prices, options, layout)
    stages = make_stages(outline, cuts)
    homes = homes_of(stages, arrangement) if layout is None else layout.homes or {}
    plans, known = _plan_stages(
        stages, options, layout=layout, costs=costs, constraints=constraints, units=units, zero=zero
    )
    loss = loss_of(graph, prepared.cut)
    notes = _notes(prepared, options.schedule, loss)
    bounds = [0, *cuts, len(outline.ops)]
    seconds = [float(prices.seconds[stop] - prices.seconds[start]) for start, stop in pairwise(bounds)]
    found = PipelinePlan(
        size=arrangement.ranks * options.inner,
        policy="pp" if options.inner == 1 else "hybrid",
        arrangement=arrangement,
        cuts=tuple(cuts),
        stages=tuple(plans),
        seconds=tuple(seconds),
        homes=homes,
        stored={name: stored.placement for name, stored in known.items()},
        synchronized=frozenset(name for name, stored in known.items() if stored.synchronized),
        divisible=tuple(sorted({item for plan in plans for item in plan.divisible})),
        schedule=options.schedule,
        loss=loss or "",
        microbatches=_wished_microbatches(prepared, options, layout),
        notes=notes,
    )
    return replace(found, reason=_explained(found, outline))


def _notes(prepared: Prepared, schedule: str, loss: str | None) -> tuple[str, ...]:
    """What the user should hear of how a batch goes through the stages."""
    hindrance = prepared.cut.hindrance
    notes = [f"the batch goes through the stages whole: {hindrance}"] if hindrance else []
    if schedule != "gpipe" and prepared.graph.training and (hindrance or loss is None):
        reason = (
            "the batch is not cut" if hindrance else "the forward does not return one loss of all samples"
        )
        notes.append(f"all goes forward before it goes back, instead of {schedule!r}: {reason}")
    return tuple(notes)


def _cuts(
    outline: Outline, prices: StageCosts, options: PipelineOptions, layout: FixedLayout | None
) -> list[int]:
    """Where stages begin: as named, or near the parameters that lie already, or as is fastest."""
    if options.cuts:
        return _named_cuts(outline, options.cuts)
    stages = options.arrangement.stages
    if layout is None:
        return choose_cuts(prices, stages)
    return choose_cuts(
        prices, stages, foreign=foreign_bytes(outline, layout.homes or {}, options.arrangement)
    )


def _named_cuts(outline: Outline, names: Sequence[str]) -> list[int]:
    places = [outline.place_of_module(name) for name in names]
    if places != sorted(set(places)) or 0 in places:
        order = sorted(names, key=outline.place_of_module)
        raise PlanError(
            f"stage_cuts={list(names)} are not in the order in which the forward comes to them, or the first "
            "one begins with the forward itself.",
            remedy=f"Name each stage's first submodule but the first stage's, such as {order}.",
        )
    may = outline.may_begin()
    for name, place in zip(names, places, strict=True):
        if not may[place]:
            raise PlanError(
                f"a stage cannot begin with {name!r}: a buffer that is written before is used behind it.",
                remedy="Name a submodule before or after.",
            )
    return places


def _plan_stages(
    stages: Sequence[Stage],
    options: PipelineOptions,
    *,
    layout: FixedLayout | None,
    **given: Any,
) -> tuple[list[ProgramPlan], dict[str, Stored]]:
    """The plan of every stage; parameters that several use lie as the first of them wants."""
    known: dict[str, Stored] = {}
    if layout is not None:
        known = {
            name: Stored(placement, name in layout.synchronized) for name, placement in layout.stored.items()
        }
    plans = []
    for stage in stages:
        shared = {fqn: known[fqn] for fqn in stage.graph.parameters.values() if fqn in known}
        policy = options.policy if not shared else _with_known(options.policy, shared)
        plan = plan_program(stage.graph, size=options.inner, policy=policy, **given)
        plans.append(plan)
        for name, placement in plan.stored.items():
            known.setdefault(name, Stored(placement, name in plan.synchronized))
    return plans, known


def _with_known(policy: str | Policy, known: Mapping[str, Stored]) -> Policy:
    """A policy under which some parameters lie as they do already."""
    name, narrow = policy_of(policy)

    def narrowed(context: PolicyContext) -> Any:
        chosen = narrow(context)
        for value, fqn in context.graph.parameters.items():
            if fqn in known:
                context.stored[value] = (known[fqn],)
        return chosen

    narrowed.__name__ = name
    return narrowed


def _wished_microbatches(prepared: Prepared, options: PipelineOptions, layout: FixedLayout | None) -> int:
    """How many microbatches a batch should become."""
    if prepared.cut.hindrance:
        return 1
    if options.microbatches is None:
        return _PER_RANK * options.arrangement.ranks
    if layout is not None:
        return options.microbatches
    ((name, dim),) = prepared.graph.symbols.values()
    batch = hint_of(prepared.graph.metas[name].shape[dim])
    if batch % options.microbatches:
        raise PlanError(
            f"pipeline_nmicros={options.microbatches} does not divide a batch of {batch} samples.",
            remedy="Choose a divisor of the batch size, or leave it out.",
        )
    return options.microbatches


def _explained(plan: PipelinePlan, outline: Outline) -> str:
    """The cut and the bubble as one clause."""
    first = [outline.ops[place].module or "the forward itself" for place in plan.cuts]
    times = ", ".join(f"{seconds * 1e3:.3g}" for seconds in plan.seconds)
    waits = plan.bubble
    if plan.schedule != "gpipe":
        with suppress(OptionError):  # a schedule that does not take so many is not run
            waits = waiting_share(predicted(plan, plan.schedule))
    return (
        f"{plan.arrangement.stages} stages, which begin with {', '.join(first) or 'the forward'} and are "
        f"predicted to take {times} ms a batch; with {plan.microbatches} microbatches a rank waits "
        f"{waits:.0%} of the time"
    )

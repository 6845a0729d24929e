"""Choose between a plan with stages and one without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

from nnx_core.errors import PlanError, UnsupportedError
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.pipeline.cuts import choose_cuts
from nnx_nnscaler.pipeline.microbatches import output_refs, possible_counts
from nnx_nnscaler.pipeline.outline import Prepared, StageCosts, bytes_in, prepare, traced_sizes, without_calls
from nnx_nnscaler.pipeline.search import PER_RANK, PipelineOptions, plan_pipeline
from nnx_nnscaler.pipeline.stages import make_stages
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan
from nnx_nnscaler.plan.schedules import (
    FORWARD_SHARE,
    Arrangement,
    order,
    simulate,
)
from nnx_nnscaler.rules.rule import replicate

_SURE = 1.1
"""The minimum predicted speedup of stages. Their waiting is the least certain prediction."""


def with_stages(
    graph: Graph,
    plan: Callable[[], ProgramPlan],
    *,
    size: int,
    costs: CostModel,
    constraints: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
    units: int = 1,
    zero: bool = False,
) -> ProgramPlan | PipelinePlan:
    """Return the plan of one program, or a pipeline in its place.

    Args:
        graph: The traced forward.
        plan: The function that plans one program.
        size: The number of ranks of the unit.
        costs: The cost model.
        constraints: The strategies by which ranks split operators within stages, by names of modules.
        memory_limit: The bytes that each rank may use.
        units: The number of units that share the work.
        zero: True if units shard model states.

    Raises:
        PlanError: Neither fits into the memory.
    """
    given = {"constraints": constraints, "memory_limit": memory_limit, "units": units, "zero": zero}
    try:
        whole = plan()
    except PlanError:
        found = None if memory_limit is None else _best(graph, size, costs, inf, **given)
        if found is None:
            raise
        why = "without stages no plan fits into the memory"
        return replace(found[1], policy="autodist", reason=f"{why}; {found[1].reason}")
    bound = whole.prediction.time / _SURE
    if not graph.training or _work(graph, costs) / size >= bound:
        return whole
    found = _best(graph, size, costs, bound, **given)
    if found is None:
        return whole
    ours, other = found[0] * 1e3, whole.prediction.time * 1e3
    why = f"predicted: {ours:.3g} ms a step with stages, {other:.3g} ms by the best plan without"
    return replace(found[1], policy="autodist", reason=f"{why}; {found[1].reason}")


def _work(graph: Graph, costs: CostModel) -> float:
    """Return the seconds of computation that no plan saves, on one rank."""
    prices = without_calls(costs).prices(graph, size=1)
    return sum(prices.operator(op, replicate(op)).seconds for op in graph.ops if op.target != "getitem")


def _best(
    graph: Graph, size: int, costs: CostModel, bound: float, **given: Any
) -> tuple[float, PipelinePlan] | None:
    """Return the fastest pipeline, with its seconds; None if none fits within this time.

    With equal ranks along the pipe, it takes GPipe's order if that fits into the memory, because it accepts
    any forward. 1F1B keeps fewer activations.
    """
    try:
        prepared = prepare(graph)
    except UnsupportedError:
        return None
    prices = prepared.outline.costs(costs)
    best = None
    for ranks in (number for number in range(2, size + 1) if size % number == 0):
        for schedule in ("gpipe", "1f1b"):
            options = PipelineOptions(Arrangement(ranks, ranks), inner=size // ranks, schedule=schedule)
            try:
                if _least_seconds(prepared, prices, options) >= bound:
                    break
                plan = plan_pipeline(graph, options, costs=costs, **given)
            except PlanError:
                continue
            seconds = seconds_of(plan, prepared, prices, costs)
            if seconds < bound:
                bound, best = seconds, (seconds, plan)
            break
    return best


def _least_seconds(prepared: Prepared, prices: StageCosts, options: PipelineOptions) -> float:
    """Return the time of a pipeline without communication."""
    ranks = options.arrangement.ranks
    count = next(possible_counts(prepared.cut, traced_sizes(prepared.graph), PER_RANK * ranks))
    seconds = (prices.seconds - prices.calls) / options.inner + count * prices.calls
    cuts = choose_cuts(prices._replace(seconds=seconds), ranks) or []
    longest = max(seconds[stop] - seconds[start] for start, stop in pairwise([0, *cuts, len(seconds) - 1]))
    return float(longest) * (count + ranks - 1) / count


def seconds_of(plan: PipelinePlan, prepared: Prepared, prices: StageCosts, costs: CostModel) -> float:
    """Return the predicted time of one step: computation, waiting, and messages between stages.

    Args:
        plan: The plan.
        prepared: The graph of the plan.
        prices: The costs of its cuts.
        costs: The cost model of the plan.
    """
    graph, outline = prepared.cut.graph, prepared.outline
    count = next(possible_counts(prepared.cut, traced_sizes(graph), plan.microbatches, plan.divisible))
    link = costs.hardware.link(plan.arrangement.ranks, stride=plan.stages[0].size)
    bounds = [0, *plan.cuts, len(outline.ops)]
    forward, backward = [], []
    for stage, own in zip(make_stages(outline, plan.cuts), plan.stages, strict=True):
        start, stop = bounds[stage.number : stage.number + 2]
        again = (count - 1) * float(prices.calls[stop] - prices.calls[start])
        came = sum(bytes_in(graph, name) for name in stage.arguments if name not in graph.metas) / count
        message = link.seconds("all_gather", 2 * came, 2) if came else 0.0  # of two ranks, each sends half
        each = (own.prediction.time + again) / count
        forward.append(each * FORWARD_SHARE + message)
        backward.append(each * (1 - FORWARD_SHARE) + message)
    steps = simulate(order("gpipe", plan.arrangement, count), forward, backward)
    results = sum(bytes_in(graph, name) for name in output_refs(graph) if name in outline.place)
    return max(step.stop for step in steps) + link.seconds("all_gather", results, plan.arrangement.ranks)

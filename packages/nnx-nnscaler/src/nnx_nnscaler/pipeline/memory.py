"""Predict the memory of a pipeline's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nnx_core.errors import PlanError
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.pipeline.outline import Room, bytes_in
from nnx_nnscaler.pipeline.stages import Stage
from nnx_nnscaler.plan.cost import CostModel, Prices, Stored
from nnx_nnscaler.plan.flow import Flow
from nnx_nnscaler.plan.peak_memory import activations
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan, Usage
from nnx_nnscaler.plan.planning import assignment_of, bytes_text
from nnx_nnscaler.plan.schedules import (
    Arrangement,
    held,
)


class Mesh(NamedTuple):
    """The facts besides the stages that bytes depend on.

    Attributes:
        costs: The cost model that predicts bytes.
        units: The number of units that share the work.
        zero: True if they shard model states.
        schedule: The order in which ranks work.
        microbatches: The number of microbatches of the traced batch.
    """

    costs: CostModel
    units: int
    zero: bool
    schedule: str
    microbatches: int

    def prices(self, graph: Graph, size: int) -> Prices:
        """Return prices for a graph on the ranks of a stage."""
        return self.costs.prices(graph, size=size, units=self.units, zero=self.zero)


def rooms(arrangement: Arrangement, schedule: str, microbatches: int, limits: Sequence[float]) -> list[Room]:
    """Return the memory limits of the search for cuts.

    Args:
        arrangement: The stages of each rank along the pipe.
        schedule: The order in which ranks work.
        microbatches: The number of microbatches of the batch.
        limits: The bytes that each rank may use.
    """
    found = []
    for rank, several in enumerate(held(schedule, arrangement, microbatches)):
        own = arrangement.stages_of(rank)
        for numbers in several:
            shares = {stage: number / microbatches for stage, number in zip(own, numbers, strict=True)}
            found.append(Room(shares, limits[rank]))
    return found


class _Used(NamedTuple):
    """Bytes of one stage: those of `Usage`, and activations for the complete batch."""

    states: int
    lasting: int
    kept: int
    passing: int


def usage_of(
    stages: Sequence[Stage],
    plans: Sequence[ProgramPlan],
    homes: Mapping[str, int],
    arrangement: Arrangement,
    mesh: Mesh,
) -> tuple[Usage, ...]:
    """Return the bytes of each rank along the pipe.

    Args:
        stages: The stages.
        plans: The plans of the stages.
        homes: The rank that stores each parameter.
        arrangement: The stages of each rank along the pipe.
        mesh: The facts besides the stages.
    """
    counted: set[tuple[str, int]] = set()
    used = [
        _used(stage, plan, homes, arrangement.rank_of(stage.number), counted, mesh)
        for stage, plan in zip(stages, plans, strict=True)
    ]
    found = []
    for rank, several in enumerate(held(mesh.schedule, arrangement, mesh.microbatches)):
        own = [used[number] for number in arrangement.stages_of(rank)]
        kept = max(sum(n * one.kept for n, one in zip(numbers, own, strict=True)) for numbers in several)
        active = (kept + max(one.passing for one in own)) / mesh.microbatches
        found.append(Usage(sum(one.states for one in own), sum(one.lasting for one in own) + round(active)))
    return tuple(found)


def _used(
    stage: Stage,
    plan: ProgramPlan,
    homes: Mapping[str, int],
    rank: int,
    counted: set[tuple[str, int]],
    mesh: Mesh,
) -> _Used:
    graph, prices = stage.graph, mesh.prices(stage.graph, plan.size)
    states = lasting = 0
    for name, fqn in graph.parameters.items():
        stored = Stored(plan.stored.get(fqn, R), fqn in plan.synchronized)
        if (fqn, rank) in counted:
            continue
        counted.add((fqn, rank))
        if homes.get(fqn, 0) == rank:
            states += prices.states(graph.metas[name], stored)
            lasting += prices.kept(graph.metas[name], stored)
        else:  # another rank sends it and receives its gradient
            lasting += 2 * prices.local(graph.metas[name], stored.placement).nbytes
    lasting += sum(bytes_in(graph, name) for name in (*graph.buffers, *graph.constants))
    kept, passing = activations(Flow(graph), assignment_of(graph, plan), prices)
    return _Used(
        states, lasting, kept + sum(bytes_in(graph, n) for n in (*stage.arguments, *stage.gives)), passing
    )


def too_large(plan: PipelinePlan, limit: int, knobs: Sequence[str]) -> PlanError:
    """Return the error that no cut fits, with the options that reduce memory.

    Args:
        plan: The found plan with the smallest peak.
        limit: The bytes that each rank may use.
        knobs: Further options that reduce memory.
    """
    worst = max(range(len(plan.usage)), key=lambda rank: plan.usage[rank].peak)
    states, peak = plan.usage[worst]
    more = (
        ["pipeline_scheduler='1f1b' with a forward that returns its loss"] if plan.schedule == "gpipe" else []
    )
    helps = [*knobs, *more, "activation checkpointing (recompute)"]
    return PlanError(
        f"no plan of policy {plan.policy!r} fits into {bytes_text(limit)} on each of {plan.size} ranks: with "
        f"the smallest cut found into {plan.arrangement.stages} stages, rank {worst} along the pipe takes "
        f"{peak} bytes ({bytes_text(peak)}), of which {bytes_text(states)} are parameters, gradients and "
        "optimizer state.",
        remedy=f"What helps: {', '.join(helps)} or a smaller batch.",
    )

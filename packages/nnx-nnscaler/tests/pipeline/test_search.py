"""The search for a pipeline: its decision for or against one, and stages within memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.nnscaler_codegen_models import GPT
from jobs.nnscaler_pipeline_jobs import Deep, logged, planned_losses_with, rows
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import PlanError
from nnx_core.machine.hardware import Link, profile
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.pipeline.program import in_a_row, source_of
from nnx_nnscaler.pipeline.search import PipelineOptions, plan_pipeline
from nnx_nnscaler.pipeline.with_stages import with_stages
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.schedules import Arrangement, held
from nnx_nnscaler.plan_file import Plan, diff
from nnx_nnscaler.self_check import self_check
from nnx_nnscaler.trace import trace_forward

CPU = profile("cpu")
SLOW = CostModel(hardware=replace(CPU, inside=Link(1e-4, 5e7), across=Link(1e-4, 5e7)))


class Wide(nn.Module):
    """Large weights and small activations."""

    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        if hooked:
            self.layers[3].register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def graph_of(model: nn.Module) -> Graph:
    return trace_forward(model, (torch.randn(1024, 512),), {})


def chosen(graph: Graph, costs: CostModel, limit: int | None = None) -> ProgramPlan | PipelinePlan:
    plan = partial(plan_program, graph, size=4, costs=costs, memory_limit=limit)
    return with_stages(graph, plan, size=4, costs=costs, memory_limit=limit)


def test_stages_are_chosen_where_links_are_slow_and_nowhere_else() -> None:
    graph = graph_of(Wide())
    assert chosen(graph, CostModel()) == plan_program(graph, size=4, costs=CostModel())
    plan = chosen(graph, SLOW)
    assert isinstance(plan, PipelinePlan)
    assert plan.policy == "autodist"
    assert "ms a step with stages" in plan.reason
    hooked = graph_of(Wide(hooked=True))  # cannot be cut
    assert chosen(hooked, SLOW) == plan_program(hooked, size=4, costs=SLOW)


@pytest.mark.full
def test_stages_are_chosen_where_nothing_else_fits_into_the_memory() -> None:
    graph = trace_forward(Deep(), (rows(256),), {})
    options = PipelineOptions(Arrangement(4, 4), schedule="1f1b")
    least = max(used.peak for used in plan_pipeline(graph, options, costs=CostModel()).usage)
    with pytest.raises(PlanError, match="no plan of policy 'autodist' fits"):
        plan_program(graph, size=4, memory_limit=least)
    plan = chosen(graph, CostModel(), limit=least)
    assert isinstance(plan, PipelinePlan)
    assert (plan.schedule, max(used.peak for used in plan.usage) <= least) == ("1f1b", True)
    assert plan.reason.startswith("without stages no plan fits into the memory; 4 stages")
    with pytest.raises(PlanError, match="no plan of policy 'autodist' fits"):
        chosen(graph, CostModel(), limit=1000)


def test_autodist_trains_in_stages_and_a_saved_plan_does_the_same(pool: WorkerPool, tmp_path: Path) -> None:
    graph = trace_forward(Deep(), (rows(256),), {})
    options = PipelineOptions(Arrangement(2, 2), schedule="1f1b")
    limit = max(used.peak for used in plan_pipeline(graph, options, costs=CostModel()).usage)
    path, run = str(tmp_path / "plan.json"), partial(pool.run, world_size=2)
    expected = run(planned_losses_with, str(tmp_path / "a"), "nnscaler_dp", {"plan_ngpus": 1})[0][0]
    asked, summaries = {"memory_limit": limit, "save_plan": path}, []
    for losses, summary, error in run(planned_losses_with, str(tmp_path / "b"), "nnscaler_deduped", asked):
        assert losses == pytest.approx(expected, abs=1e-5), error
        summaries.append(summary)
    assert summaries[0].startswith("policy 'autodist': without stages no plan fits into the memory; 2 stages")
    saved = Plan.load(path)
    assert isinstance(saved.program, PipelinePlan)
    assert saved.program.reason in saved.explain()
    asked = {"load_plan": path, "save_plan": str(tmp_path / "again.json"), "verify": True}
    for losses, _, error in run(planned_losses_with, str(tmp_path / "b"), "nnscaler_pp", asked):
        assert losses == pytest.approx(expected, abs=1e-5), error
    assert diff(saved, Plan.load(tmp_path / "again.json")) == []
    asked = {"load_plan": path}
    for _, _, error in run(planned_losses_with, str(tmp_path / "b"), "nnscaler_pp", asked, 16):
        assert "was made for another graph" in error


@pytest.mark.full
def test_a_loaded_plan_says_the_schedule_of_steps_too(pool: WorkerPool, tmp_path: Path) -> None:
    path, folder = str(tmp_path / "plan.json"), str(tmp_path / "code")
    saving = {"pipeline_scheduler": "1f1b", "pipeline_nmicros": 4, "save_plan": path}
    saved = pool.run(logged, saving, folder, world_size=2)
    assert saved[0][1], "it did not work in turns"
    assert pool.run(logged, {"load_plan": path}, folder, world_size=2) == saved


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("make", [Deep, lambda: GPT(dropout=0.1)])
def test_stages_are_compared_with_the_module(make: Callable[[], nn.Module], inner: int) -> None:
    torch.manual_seed(0)
    model = make().train()
    args = (torch.randint(16, (8, 6)),) if isinstance(model, GPT) else (rows(16),)
    graph = trace_forward(model, args, {})
    plan = plan_pipeline(graph, PipelineOptions(Arrangement(2, 4), 4, inner=inner), costs=CostModel())
    source = source_of(graph, plan)
    row, program = in_a_row(graph, plan, source)
    self_check(model, graph, row, (args, {}), program)
    if isinstance(model, Deep):
        _, program = in_a_row(graph, plan, source.replace("torch.tanh(", "torch.relu(", 1))
        with pytest.raises(PlanError, match="does not match the eager forward"):
            self_check(model, graph, row, (args, {}), program)


# --- pipelines stay within the memory that ranks have, or say what is missing ---------------------


class LargeFirst(nn.Module):
    """A table that takes much memory and no time, in front of equal layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32)
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(16)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.table(x)).square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace_forward(LargeFirst(), (torch.randint(2000, (64, 8)),), {})


def planned(graph: Graph, arrangement: Arrangement, limit: int | None = None, **more: object) -> PipelinePlan:
    options = PipelineOptions(arrangement, **more)  # type: ignore[arg-type]
    return plan_pipeline(graph, options, costs=CostModel(), memory_limit=limit)


def peak(plan: PipelinePlan) -> int:
    return max(used.peak for used in plan.usage)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("schedule", "arrangement"),
    [("1f1b", Arrangement(2, 2)), ("gpipe", Arrangement(4, 4)), ("interleaved", Arrangement(2, 4))],
)
def test_a_limit_moves_the_cut_and_costs_time(graph: Graph, schedule: str, arrangement: Arrangement) -> None:
    free = planned(graph, arrangement, schedule=schedule)
    assert free.usage[0].peak == peak(free), "the table makes the first rank the largest"
    limit = int(0.97 * peak(free))
    limited = planned(graph, arrangement, limit, schedule=schedule)
    assert peak(limited) <= limit
    assert limited.cuts[0] < free.cuts[0]
    assert max(limited.seconds) > max(free.seconds)
    assert planned(graph, arrangement, peak(free), schedule=schedule) == free


def test_a_limit_that_nothing_else_keeps_makes_more_microbatches(graph: Graph) -> None:
    cut: Any = {"schedule": "1f1b", "cuts": ("layers.8",)}
    free = planned(graph, Arrangement(2, 2), **cut)
    more = planned(graph, Arrangement(2, 2), microbatches=64, **cut)
    limited = planned(graph, Arrangement(2, 2), peak(more), **cut)
    assert (free.microbatches, limited.microbatches) == (8, 64)
    assert peak(limited) == peak(more) < peak(free)


@pytest.mark.full
def test_stages_of_several_ranks_are_split_until_they_fit(graph: Graph) -> None:
    free = planned(graph, Arrangement(2, 2), inner=2)
    limit = int(0.7 * peak(free))
    limited = planned(graph, Arrangement(2, 2), limit, inner=2)
    assert peak(limited) <= limit
    assert any(placement.is_shard for placement in limited.stored.values())


@pytest.mark.parametrize("cuts", [(), ("layers.8",)])
def test_what_fits_nowhere_is_refused_with_bytes_and_remedies(graph: Graph, cuts: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        planned(graph, Arrangement(2, 2), 100_000, cuts=cuts)
    assert "'pp' fits into 97.7 KiB on each of 2 ranks" in str(caught.value)
    assert "rank 0 along the pipe takes" in str(caught.value)
    assert "gradients and optimizer state" in str(caught.value)
    assert ("without stage_cuts" in str(caught.value)) == bool(cuts)
    assert "pipeline_scheduler='1f1b'" in str(caught.value)


def test_microbatches_that_are_held_are_those_that_gradients_are_still_awaited_for() -> None:
    assert held("1f1b", Arrangement(4, 4), 16) == (((4,),), ((3,),), ((2,),), ((1,),))
    assert held("gpipe", Arrangement(2, 4), 8) == (((8, 8),), ((8, 8),))
    for schedule in ("interleaved", "zbv", "dualpipev"):
        arrangement = Arrangement(2, 4, v_shaped=schedule != "interleaved")
        few, many = (held(schedule, arrangement, number) for number in (8, 16))
        assert few == many, "they do not grow with the number of microbatches"


def test_stages_of_a_plan_lie_one_after_the_other(graph: Graph) -> None:
    plan = planned(graph, Arrangement(4, 4))
    assert all(start < stop for start, stop in pairwise(plan.cuts))
    assert sum(used.states for used in plan.usage) == 16 * sum(p.numel() for p in LargeFirst().parameters())

"""Pipelines stay within the memory that ranks have, or say what is missing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnx_core.errors import PlanError
from nnx_nnscaler.cost import CostModel
from nnx_nnscaler.ir import Graph
from nnx_nnscaler.pipeline.plan import PipelinePlan
from nnx_nnscaler.pipeline.schedules import Arrangement, held
from nnx_nnscaler.pipeline.search import PipelineOptions, plan_pipeline
from nnx_nnscaler.trace import trace_forward


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

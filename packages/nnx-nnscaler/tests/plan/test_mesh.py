"""Two axes: how large units are, and whether they keep parameters in parts."""

from __future__ import annotations

import time

import pytest

from jobs.nnscaler_plan_graphs import mlp, stack, strategies_of
from nnx_core.errors import PlanError
from nnx_core.hardware import profile
from nnx_nnscaler.cost import CostModel
from nnx_nnscaler.plan.planning import plan_mesh

H100 = CostModel(hardware=profile("h100-nvlink"))


def test_a_mesh_of_a_thousand_devices_is_planned_without_them() -> None:
    start = time.process_time()
    search = plan_mesh(stack(8, batch=128), world_size=1024, costs=H100, strategies_of=strategies_of)
    assert time.process_time() - start < 30
    assert {plan.program.size for plan in search.tried} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {plan.zero for plan in search.tried} == {True, False}
    assert search.best.seconds_per_batch == min(plan.seconds_per_batch for plan in search.tried)
    assert not search.refused


def test_plenty_of_memory_and_a_large_batch_want_small_units() -> None:
    search = plan_mesh(mlp(8192, 64, 256), world_size=16, costs=H100, strategies_of=strategies_of)
    assert search.best.program.size == 1


def test_little_memory_wants_zero_or_larger_units_and_says_what_was_refused() -> None:
    graph = mlp(8, 512, 2048)
    free = plan_mesh(graph, world_size=8, costs=H100, strategies_of=strategies_of)
    alone = next(plan for plan in free.tried if plan.program.size == 1 and not plan.zero)
    limit = alone.program.prediction.memory // 2
    search = plan_mesh(graph, world_size=8, costs=H100, memory_limit=limit, strategies_of=strategies_of)
    assert search.best.zero or search.best.program.size > 1
    assert search.best.program.prediction.memory <= limit
    assert "are missing" in search.refused[1, False]


def test_dp_tries_units_of_one_rank_only() -> None:
    search = plan_mesh(mlp(), world_size=4, policy="dp", costs=H100, strategies_of=strategies_of)
    assert [(plan.program.size, plan.units, plan.zero) for plan in search.tried] == [
        (1, 4, False),
        (1, 4, True),
    ]


def test_no_shape_that_fits_is_an_error_with_the_least_that_is_missing() -> None:
    with pytest.raises(
        PlanError, match=r"no shape of a mesh of 4 ranks has a plan: no plan of policy 'autodist'"
    ):
        plan_mesh(mlp(), world_size=4, costs=H100, memory_limit=10, strategies_of=strategies_of)


def test_units_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(PlanError, match="units of 3 ranks do not divide a world of 8"):
        plan_mesh(mlp(), world_size=8, sizes=[3], costs=H100, strategies_of=strategies_of)

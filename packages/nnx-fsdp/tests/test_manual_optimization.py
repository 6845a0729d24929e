"""Manual optimization under FSDP2 gives the numbers of one process, for any order of calls in a step."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.manual_jobs import Adversaries, Interleaved, LookingAgain, PenaltyBefore, ZeroedByStep, train
from nnx_conformance.checks.user_patterns.gradients import PipelineSplitBackward
from nnx_conformance.comparing import expect_same_run
from nnx_conformance.pool import JobError, WorkerPool
from nnx_fsdp.options import MixedPrecision

OPTIONS: dict[str, dict[str, Any]] = {
    "only a root": {},
    "blocks": {"min_num_params": 100},
    "blocks kept": {"min_num_params": 100, "reshard_after_forward": False},
    "root resharded": {"reshard_after_forward": True},
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("model", [Adversaries, LookingAgain, PenaltyBefore, ZeroedByStep])
def test_a_step_may_call_parts_and_forwards_as_it_likes(
    pool: WorkerPool, options: dict[str, Any], model: Any
) -> None:
    alone = pool.run(train, "auto", {}, model, world_size=1)[0]
    ranks = pool.run(train, "fsdp_auto", options, model, world_size=2)
    expect_same_run(ranks, alone, tolerance=1e-5)
    assert [outcome.notes["hooks"] for outcome in ranks] == [0, 0]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_pipeline_that_splits_the_backward_is_refused_before_a_gradient_is_lost(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    with pytest.raises(JobError, match=r"computes the gradient of '.*' apart from those of inputs") as caught:
        pool.run(train, "fsdp_auto", options, PipelineSplitBackward, world_size=2)
    assert "Use Schedule1F1B or ScheduleInterleaved1F1B" in str(caught.value)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_pipeline_that_does_not_has_the_numbers_of_one_process(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    alone = pool.run(train, "auto", {}, Interleaved, world_size=1)[0]
    expect_same_run(pool.run(train, "fsdp_auto", options, Interleaved, world_size=2), alone, tolerance=1e-5)


@pytest.mark.full
def test_inputs_of_a_part_are_cast_as_the_mixed_precision_policy_says(pool: WorkerPool) -> None:
    options = {"mixed_precision": MixedPrecision(param_dtype="bfloat16")}
    alone = pool.run(train, "auto", {}, Adversaries, world_size=1)[0]
    for outcome in pool.run(train, "fsdp_auto", options, Adversaries, world_size=2):
        assert outcome.losses == pytest.approx(alone.losses, rel=0.02)
        assert outcome.losses != alone.losses

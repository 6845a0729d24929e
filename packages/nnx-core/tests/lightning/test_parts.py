"""Single modules of nnx_core on several ranks: gradients, shards, buffers, optimizers, joint errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs.unit_jobs import (
    OPTIMIZERS,
    SHAPES,
    arrive,
    broadcast_view_buffers,
    clip,
    describe_shards,
    fail_together,
    partial_gradient,
    save_and_resume,
    synchronize_views,
    train_buffers,
    try_what_rank_0_cannot_describe,
    unscale,
)
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import (
    Gradient,
    clip_gradients_by_norm,
    clip_gradients_by_value,
    refuse_complex_clamp,
)
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.training import Run

INF = float("inf")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
def test_clipping_mixed_layouts_in_double_precision_equals_torch_on_complete_tensors(
    pool: WorkerPool, world_size: int, norm_type: float
) -> None:
    reports = pool.run(clip, torch.float64, norm_type, 0.7, world_size=world_size, init="gloo")
    for report in reports:
        assert report["norm"] == pytest.approx(report["expected"], rel=1e-13)
        assert report["error"] < 1e-12
        assert report["dtype"] == "torch.float64"
    assert reports[0]["expected"] > 0.7
    if world_size == 4:
        assert reports[3]["empty"] >= 1  # three rows on four ranks


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_clipping_counts_the_magnitude_of_complex_gradients_as_torch_does(
    pool: WorkerPool, norm_type: float
) -> None:
    for report in pool.run(clip, torch.complex128, norm_type, 0.7, world_size=2, init="gloo"):
        assert report["norm"] == pytest.approx(report["expected"], rel=1e-13)
        assert report["error"] < 1e-12


def test_what_torch_cannot_clip_is_refused_with_a_way_out() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.cfloat))
    with pytest.raises(UnsupportedError, match="gradient_clip_algorithm='norm'"):
        refuse_complex_clamp(torch.optim.SGD([weight], lr=0.1))
    sparse = Gradient(torch.eye(3).to_sparse(), 1)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        clip_gradients_by_norm([sparse], max_norm=1.0, device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="sparse=False"):
        clip_gradients_by_value([sparse], 1.0)


def test_clipping_leaves_small_gradients_alone_and_works_in_low_precision(pool: WorkerPool) -> None:
    for report in pool.run(clip, torch.float64, 2.0, 1e6, world_size=2, init="gloo"):
        assert report["error"] == 0.0
    for report in pool.run(clip, torch.bfloat16, 2.0, 0.7, world_size=4, init="gloo"):
        assert report["dtype"] == "torch.float32"
        assert report["norm"] == pytest.approx(report["expected"], rel=2e-2)
        assert report["error"] < 2e-2


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("where", [-1, 0, 2])
def test_unscaling_finds_an_overflow_of_any_rank(pool: WorkerPool, where: int) -> None:
    for report in pool.run(unscale, where, world_size=3, init="gloo"):
        assert report["found"] == (0.0 if where == -1 else 1.0)
        assert report["unscaled"] == 0.0


def test_shards_describe_every_layout_and_alias_the_tensors(pool: WorkerPool) -> None:
    reports = pool.run(describe_shards, world_size=4, init="gloo")
    for report in reports:
        assert all(entry["holds"] and entry["aliases"] for entry in report.values())
        for name in ("plain", "whole", "scalar"):
            shape = SHAPES[name]
            assert report[name]["boxes"] == [((0,) * len(shape), shape)]
    assert [report["rows"]["boxes"] for report in reports] == [
        [((0, 0), (1, 4))],
        [((1, 0), (1, 4))],
        [((2, 0), (1, 4))],
        [],
    ]
    assert [report["columns"]["bytes"] for report in reports] == [16, 16, 16, 8]
    assert [report["hybrid"]["boxes"] for report in reports] == [
        [((0, 0), (3, 3))],
        [((3, 0), (2, 3))],
        [((0, 0), (3, 3))],
        [((3, 0), (2, 3))],
    ]


def test_an_error_on_some_ranks_becomes_one_error_on_all_and_the_group_goes_on(pool: WorkerPool) -> None:
    for rank, (outcome, total) in enumerate(pool.run(fail_together, {1: "value"}, world_size=3, init="gloo")):
        assert outcome == "NnxError: testing failed on rank 1: ValueError: bad value", rank
        assert total == "3"
    outcomes = [r[0] for r in pool.run(fail_together, {0: "value", 2: "nnx"}, world_size=3, init="gloo")]
    assert outcomes[1] == "NnxError: testing failed on rank 0 (and 1 other ranks): ValueError: bad value"
    assert outcomes[2] == "CheckpointError: torn. Repair it."
    outcomes = [r[0] for r in pool.run(fail_together, {2: "nnx"}, world_size=3, init="gloo")]
    assert outcomes[:2] == ["CheckpointError: testing failed on rank 2: torn. Repair it."] * 2
    assert pool.run(fail_together, {}, world_size=2, init="gloo") == [["nothing", "2"]] * 2
    assert pool.run(fail_together, {0: "nnx"}, world_size=1, init="gloo")[0][0].startswith(
        "CheckpointError: "
    )


@pytest.mark.full
def test_ranks_notice_in_time_that_one_does_not_arrive(pool: WorkerPool) -> None:
    for rank, report in enumerate(pool.run(arrive, world_size=3, init="gloo")):
        assert report["all"] and report["again"]
        if rank == 1:
            assert report["without the others"] is False
            assert report["took"] < 10  # of 20 seconds: the others left word that they had gone
        else:
            assert report["without rank 1"] is False
            assert 0.9 < report["took"] < 10


def test_buffers_that_are_views_are_synchronized_without_touching_what_lies_between(pool: WorkerPool) -> None:
    for rank, report in enumerate(pool.run(synchronize_views, world_size=2, init="gloo")):
        assert report["buffers"] == {
            "column": [0.0] * 4,
            "spread": [0.0] * 1500,
            "transposed": [0.0, 3.0, 1.0, 4.0, 2.0, 5.0],
            "scalar": [0.0],
        }
        assert report["around"] == [[rank, 0.0, rank]] * 4
        assert report["addresses"]


def test_a_partial_gradient_is_refused(pool: WorkerPool) -> None:
    for error in pool.run(partial_gradient, world_size=2, init="gloo"):
        assert error.startswith("a gradient of shape (4,) is still partial over DeviceMesh(")
        assert error.endswith("Reduce gradients before they are clipped, unscaled or stepped with.")


def test_view_buffers_of_a_model_start_from_rank_0s_values(pool: WorkerPool) -> None:
    for values, neighbour in pool.run(broadcast_view_buffers, world_size=2, init="gloo"):
        assert values == [0.0] * 500
        assert neighbour


def test_buffers_of_every_dtype_reach_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "buffers.ckpt")
    run = Run(options=OPTIONS, model="buffers", steps=2, save=path)
    outcomes = pool.run(train_buffers, run, world_size=2)
    for outcome in outcomes:
        weights = outcome.weights
        assert torch.equal(weights["rotary"], torch.full((2, 2), complex(0, 1)))
        assert weights["flags"].tolist() == [True, False]
        assert not weights["transposed"].any() and not weights["narrow"].any()
    resumed = Run(options=OPTIONS, model="buffers", steps=4, resume=path)
    again = pool.run(train_buffers, resumed, world_size=2)
    assert {outcome.digest for outcome in again} == {again[0].digest}


@pytest.mark.full
def test_the_state_of_every_optimizer_of_torch_resumes_exactly(pool: WorkerPool, tmp_path: Path) -> None:
    kinds = list(OPTIMIZERS)
    for results in pool.run(save_and_resume, kinds, str(tmp_path), 2, world_size=2):
        for kind in kinds:
            saved, resumed = results[kind]
            assert (resumed.weights, resumed.optimizer) == (saved.weights, saved.optimizer), kind
            assert resumed.losses == saved.losses[2:], kind


def test_an_optimizer_that_rank_0_cannot_try_is_refused_on_every_rank(pool: WorkerPool) -> None:
    for message in pool.run(try_what_rank_0_cannot_describe, world_size=2, init="gloo"):
        assert "probing SGD failed on rank 0: it lies nowhere. Put it somewhere." in message

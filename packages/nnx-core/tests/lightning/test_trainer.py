"""The guarantees of the Trainer adapter, on real processes, against one plain process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.trainer_edge_jobs import (
    explode,
    fail_and_go_on,
    fail_on_one_rank,
    fit_early_optimizer,
    synchronized_batch_norm,
)
from nnx_conformance.pool import JobError, WorkerPool
from nnx_test_helpers.lightning_jobs import (
    OPTIONS,
    SAMPLES,
    call_collectives,
    evaluate_noisily,
    every_order,
    log_and_gather,
    save_when_fit_is_over,
)
from nnx_test_helpers.training import Run, train


def _alone(run: Run) -> Run:
    return replace(run, strategy="auto", options={}, devices=1)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [2, 3])
def test_a_module_goes_through_fit_and_evaluation_in_any_order_as_in_one_process(
    pool: WorkerPool, devices: int
) -> None:
    run = Run(options=OPTIONS, devices=devices, steps=3, validate_every=3, clip=0.5)
    expected = pool.run(every_order, _alone(run), world_size=1)[0]
    reports = pool.run(every_order, run, world_size=devices)
    for report in reports:
        for key in ("test 0", "validate 1", "test 2", "losses", "same trainer"):
            assert report[key] == pytest.approx(expected[key], abs=1e-5), key
        for key in ("predict 0", "predict 1"):
            assert report[key] == pytest.approx(expected[key], rel=1e-5), key
        assert all(report["left"].values()), report["left"]
    assert len(expected["same trainer"]) == 8
    assert len({report["digest"] for report in reports}) == 1


@pytest.mark.full
def test_a_checkpoint_saved_after_fit_has_ended_resumes_like_any_other(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "after.ckpt")
    run = Run(options=OPTIONS, steps=3, groups=2)
    whole = pool.run(train, replace(run, steps=6), world_size=2)[0].losses
    saved = pool.run(save_when_fit_is_over, run, path, world_size=2)[0]
    assert saved == whole[:3]
    for devices in (1, 3):
        resumed = replace(run, steps=6, resume=path, devices=devices)
        for outcome in pool.run(train, resumed, world_size=devices):
            assert outcome.losses == pytest.approx(whole[3:], abs=1e-5)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [2, 3])
def test_evaluation_uses_the_eval_branch_every_sample_once_and_rank_0s_buffers(
    pool: WorkerPool, tmp_path: Path, devices: int
) -> None:
    path = str(tmp_path / "weights.pt")
    reports = pool.run(evaluate_noisily, devices, path, world_size=devices)
    expected = pool.run(evaluate_noisily, 1, path, world_size=1)[0]
    for report in reports:
        assert report["error"] == pytest.approx(expected["error"], rel=1e-5)
        assert report["again"] == pytest.approx(expected["error"], rel=1e-5)
        assert report["samples"] == SAMPLES
        assert report["predicted"] == pytest.approx(expected["predicted"], rel=1e-5)
        assert report["flags"]["train"] == (True, True, True)
        assert {report["flags"][step] for step in ("validate", "test", "predict")} == {(False, False, False)}
        assert report["buffers"]["test"] == reports[0]["buffers"]["test"]
    # Rank 0 saw every `devices`-th sample and added nothing else; the others added their rank.
    assert reports[0]["buffers"]["test"]["seen"] == [math.ceil(SAMPLES / devices)]
    assert reports[0]["buffers"]["train"]["seen"] != reports[1]["buffers"]["train"]["seen"]
    assert len({report["digest"] for report in reports}) == 1


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [2, 3])
def test_logged_values_are_reduced_over_all_ranks_and_the_sampler_is_injected(
    pool: WorkerPool, devices: int
) -> None:
    reports = pool.run(log_and_gather, devices, world_size=devices)
    batches = 6 // devices
    values = [10 * rank + index for rank in range(devices) for index in range(batches)]
    for rank, report in enumerate(reports):
        metrics = report["metrics"]
        assert metrics["mean"] == pytest.approx(sum(values) / len(values))
        assert metrics["sum"] == sum(values)
        assert metrics["max"] == max(values)
        assert metrics["min"] == 0
        assert metrics["alone"] == 10 * rank + batches - 1
        assert report["sampler"] == ("DistributedSampler", devices, rank, True)
        whole, gradient = report["gathered"]["sync_grads"]
        assert whole == [[1.0 + r] * 2 for r in range(devices)]
        assert gradient == [sum(1.0 + r for r in range(devices))] * 2
        assert report["gathered"]["tree"]["a"].tolist() == list(range(devices))
        assert report["gathered"]["tree"]["b"].tolist() == [3.0] * devices
    assert sorted(index for report in reports for index in report["indices"]) == list(range(12))


@pytest.mark.full
def test_collectives_give_every_rank_the_result_and_honour_groups_and_integers(pool: WorkerPool) -> None:
    for rank, results in enumerate(pool.run(call_collectives, world_size=3)):
        assert results["mean"] == results["AVG"] == [2.0, 10.0]
        assert results["sum"] == results["SUM"] == [6.0, 30.0]
        assert (results["max"], results["min"], results["int sum"]) == (2, 0, 6)
        assert results["int mean"] == pytest.approx(1.0)
        assert results["not a tensor"] == f"rank {rank}"
        assert results["broadcast"] == {"from": 0}
        assert results["broadcast 1"] == {"from": 1}
        assert results["gather"] == [[0.0], [1.0], [2.0]]
        assert (results["all"], results["any"]) == (False, True)
        assert results["untouched"] == [1.0 + rank, 10.0]
        assert results.get("pair", 1.5) == 1.5


def test_synchronized_batch_norm_is_put_in_for_training_and_taken_out_again(pool: WorkerPool) -> None:
    for report in pool.run(synchronized_batch_norm, 2, world_size=2):
        assert "SyncBatchNorm" in report["inside"]
        assert "on GPU" in report["error"]  # torch's own limit: it got as far as training
        assert report["after fit"] == report["after test"]
        assert report["after fit"][3] == "BatchNorm1d"
        assert report["tested"] == pytest.approx(report["expected"])


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"groups": 2}, {"scheduler": True}], ids=str)
def test_an_optimizer_built_before_sharding_trains_the_sharded_parameters(
    pool: WorkerPool, settings: dict[str, Any]
) -> None:
    run = Run(options=OPTIONS, steps=3, validate_every=3, **settings)
    expected = pool.run(fit_early_optimizer, _alone(run), world_size=1)[0]
    for report in pool.run(fit_early_optimizer, run, world_size=2):
        assert report["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert report["holds the module's parameters"]
        assert report["state"] == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.full  # the check `error_on_one_rank` tries it
def test_an_error_on_one_rank_is_seen_and_neither_hangs_nor_kills_the_process(pool: WorkerPool) -> None:
    run = Run(options=OPTIONS, steps=3)
    with pytest.raises(JobError) as failure:
        pool.run(fail_on_one_rank, run, 1, world_size=2, timeout=60)
    failures, output = failure.value.failures, failure.value.output
    assert failures[1] == "the process died with exit code 3"
    assert "ValueError: bad sample on rank 1" in output[1]
    assert "the ranks did not fail together" in output[1]
    # Of its own accord: it neither hung nor crashed.
    assert "Connection" in failures[0] or "rank 1 ended with ValueError: bad sample" in failures[0]


def test_an_error_on_all_ranks_leaves_a_plain_module_that_can_be_trained_again(pool: WorkerPool) -> None:
    run = Run(options=OPTIONS, steps=3)
    expected = pool.run(train, _alone(replace(run, steps=1)), world_size=1)[0]
    for report in pool.run(fail_and_go_on, run, world_size=2):
        assert report["error"] == "bad sample"
        assert report["plain"]
        assert report["losses"][0] == pytest.approx(expected.losses[0], abs=1e-6)
        assert len(report["losses"]) == 4


def test_clipping_gradients_that_are_not_finite_can_be_an_error_on_every_rank(pool: WorkerPool) -> None:
    run = Run(options=OPTIONS, steps=1)
    for message in pool.run(explode, run, world_size=2):
        assert message.startswith("The total norm of order 2.0 of the gradients is")
        assert "error_if_nonfinite=False" in message

"""The backend contract supports engines that are unlike FSDP, and their checkpoints resume elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nnx
from jobs import engines
from jobs.contract_jobs import (
    calls_of_own_backward,
    of_its_own_batch,
    reduced_over_shares,
    sampled,
    save_afterwards,
    scaled_under_fabric,
    train_with_engines,
)
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.training import Run

ENGINES = ["column_parallel", "flat_masters"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping by norm": {"clip": 0.05},
    "accumulation and groups": {"accumulate": 2, "steps": 5, "groups": 2},
    "a scheduler": {"scheduler": True, "clip": 0.01, "clip_algorithm": "value"},
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_an_engine_trains_like_one_process(pool: WorkerPool, engine: str, case: str) -> None:
    run = Run(strategy=engine, **CASES[case])
    alone = replace(run, strategy="auto", devices=1)
    expected = pool.run(train_with_engines, alone, world_size=1)[0]
    for outcome in pool.run(train_with_engines, run, world_size=2):
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("source", [*ENGINES, "fsdp_auto"])
def test_checkpoints_travel_between_engines(pool: WorkerPool, tmp_path: Path, source: str) -> None:
    path, step, steps = tmp_path / "last.ckpt", 3, 5
    first = Run(strategy=source, steps=steps, groups=2, save=str(path), save_at=step)
    saved = pool.run(train_with_engines, first, world_size=2)[0]
    for target, devices in (("column_parallel", 2), ("flat_masters", 3), ("fsdp_auto", 3), ("ddp", 1)):
        run = replace(first, strategy=target, devices=devices, save=None, resume=str(path))
        for outcome in pool.run(train_with_engines, run, world_size=devices):
            assert outcome.losses == pytest.approx(saved.losses[step:], abs=1e-5), target


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_saved_after_the_run_is_resumed_like_what_is_saved_within(
    pool: WorkerPool, tmp_path: Path, engine: str
) -> None:
    path, steps = str(tmp_path / "last.ckpt"), 5
    run = Run(strategy=engine, steps=steps)
    whole = pool.run(train_with_engines, run, world_size=2)[0]
    pool.run(save_afterwards, replace(run, steps=3), path, world_size=2)
    for outcome in pool.run(train_with_engines, replace(run, resume=path), world_size=2):
        assert outcome.losses == pytest.approx(whole.losses[3:], abs=1e-5)


def test_ranks_that_compute_one_batch_together_and_have_different_ones_are_told(pool: WorkerPool) -> None:
    for message in pool.run(of_its_own_batch, Run(strategy="column_parallel", steps=2), world_size=2):
        assert message.startswith("rank 1 has another batch than rank 0 in training_step")
        assert "data. If the script generates its data, call seed_everything(0) before" in message
        assert "trainer.distributed_sampler_kwargs" in message


def test_an_engine_with_a_backward_of_its_own_honours_that_of_the_module_and_fabrics_loss_scale(
    pool: WorkerPool,
) -> None:
    assert pool.run(calls_of_own_backward, Run(strategy="flat_masters", steps=2), world_size=2) == [2, 2]
    for scaled, plain in pool.run(scaled_under_fabric, world_size=2):
        assert scaled == pytest.approx(plain, rel=0.05)


def test_a_tracing_engine_is_given_the_first_batch_and_gives_whole_parameters_back(pool: WorkerPool) -> None:
    run = Run(strategy="column_parallel", steps=2)
    for shapes, whole in pool.run(sampled, run, world_size=2):
        assert shapes == [(12, 6)]
        assert whole


def test_a_sum_counts_each_share_of_the_data_once_however_many_ranks_read_it(pool: WorkerPool) -> None:
    for results in pool.run(reduced_over_shares, world_size=2):
        assert results == {
            "a sum": 3.0,
            "a sum by its operation": 3,
            "a product": 3.0,
            "a mean": 0.5,
            "a group's sum": 6.0,
            "all": True,
            "all but one": False,
            "any": True,
            "gathered": [[3.0]],
            "compared": (2, True),
            "of the data": (1, 0),
            "logged sum": 3.0,
            "logged mean": 0.5,
        }


def test_the_share_of_the_data_is_refused_before_the_groups_exist_that_decide_it() -> None:
    engines.register()
    strategy = nnx.strategy("column_parallel")
    with pytest.raises(nnx.UnsupportedError, match=r"share of the data .* is not known before its groups"):
        strategy.distributed_sampler_kwargs  # noqa: B018

"""The pitfalls of distributed loops show without a hang, and the solution with Lite is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import lite_pitfall_jobs as jobs
from jobs.lite_jobs import Regressor, plain
from nnx_conformance.pool import WorkerPool
from nnx_lite import LightningLite
from nnx_test_helpers.training import digest_of

STRATEGIES = ["ddp", "fsdp_auto"]


@pytest.fixture(scope="module", autouse=True)
def _ready(pool: WorkerPool) -> None:
    assert pool.run(jobs.ready, world_size=2) == [True, True]


def run(pool: WorkerPool, lite: type[LightningLite], strategy: str, *arguments: Any) -> list[Any]:
    return pool.run(jobs.run, lite.__name__, strategy, *arguments, world_size=2, timeout=60)


@pytest.mark.full  # it waits for the timeout
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_collective_that_one_rank_does_not_enter_is_an_error_after_the_timeout(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    arguments = ("Diverging", strategy, str(tmp_path))
    alone, other = pool.run(jobs.run_patiently, *arguments, world_size=2, timeout=60)
    assert "RuntimeError" in alone and "Timed out" in alone and "5000ms" in alone
    assert other == "did other things"


def test_to_stop_early_is_decided_together(pool: WorkerPool) -> None:
    decisions = run(pool, jobs.EarlyStopping, "ddp")
    assert {d["by its own loss"] for d in decisions} == {True, False}
    assert [d["by the mean"] for d in decisions] == [True, True]
    assert decisions[0]["as rank 0 says"] == decisions[1]["as rank 0 says"] == decisions[0]["by its own loss"]


def test_ranks_get_equally_many_batches_of_data_that_does_not_divide(pool: WorkerPool) -> None:
    lengths = run(pool, jobs.UnevenData, "ddp")
    assert [each["by hand"] for each in lengths] == [4, 3]
    assert [each["by Lite"] for each in lengths] == [4, 4]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_is_that_of_all_ranks_once_it_is_reduced(pool: WorkerPool, strategy: str) -> None:
    expected = plain(1)[0]
    seen = run(pool, jobs.Reduction, strategy)
    for each in seen:
        assert each["own"] != pytest.approx(expected, rel=1e-3)
        assert each["gathered"] == pytest.approx(expected, rel=1e-6)
        assert each["reduced"] == pytest.approx(expected, rel=1e-6)
        assert each["mean of means"] == 0.5
        assert each["sum over count"] == pytest.approx(4 / 6)
    assert seen[0]["own"] != seen[1]["own"]


def test_ranks_stay_equal_only_if_the_model_was_set_up(pool: WorkerPool) -> None:
    assert len(set(run(pool, jobs.Gradients, "ddp", True))) == 1
    assert len(set(run(pool, jobs.Gradients, "ddp", False))) == 2


def test_a_forgotten_backward_is_an_error_where_the_strategy_needs_it(pool: WorkerPool) -> None:
    for error in run(pool, jobs.PlainBackward, "fsdp_auto"):
        assert "RuntimeError" in error and "fabric.backward(loss)" in error


def test_what_rank_0_does_is_done_once_and_awaited_by_a_barrier(pool: WorkerPool, tmp_path: Path) -> None:
    found = run(pool, jobs.Download, "ddp", str(tmp_path))
    assert [each["hasty.txt"] for each in found] == [True, False]
    assert [each["patient.txt"] for each in found] == [True, True]
    assert [output.count("printed once") for output in pool.output] == [1, 0]


def test_a_large_model_is_made_without_memory_and_each_rank_holds_its_part(pool: WorkerPool) -> None:
    seen = run(pool, jobs.Large, "fsdp_auto")
    for each in seen:
        assert each["empty"] and each["finite"]
        assert each["held"] < 0.6 * each["whole"]
    assert sum(each["held"] for each in seen) == seen[0]["whole"]
    assert run(pool, jobs.Whole, "ddp") == [seen[0]["whole"]] * 2


def test_a_sharded_model_is_saved_by_all_ranks_and_loads_whole_on_one_process(
    pool: WorkerPool, tmp_path: Path
) -> None:
    seen = pool.run(jobs.run_patiently, "Saving", "fsdp_auto", str(tmp_path), world_size=2, timeout=60)
    module = Regressor(seed=99)
    lite = LightningLite()
    content = lite.load(tmp_path / "all.ckpt")
    model = lite.setup(module)
    model.load_state_dict(content["model"])
    assert content["step"] == 1
    assert {digest_of(module.state_dict())} == {each["digest"] for each in seen}
    assert [each["torch.save"] for each in seen] == [30, 30] and module.embed.weight.numel() == 60
    assert [each["plain"] for each in seen] == [[1.0, 1.0], [1.0, 1.0]]
    assert "Timed out" in seen[0]["rank 0"]
    assert not (tmp_path / "rank0.ckpt" / "manifest.json").exists()

"""A run that is interrupted anywhere and resumed equals an uninterrupted run, on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nnx
import nnx_checkpoint as storage
from jobs.exact_resume_data import Case
from jobs.exact_resume_jobs import (
    Report,
    error_of,
    evaluate,
    fit_twice_with_one_loader,
    interrupted,
    run,
)
from nnx_conformance.pool import WorkerPool

ALONE = Case(strategy="auto")
PAIR = Case(devices=2, batch=2)
DDP = replace(PAIR, strategy="ddp")
STEPS: dict[str, Any] = {"epochs": None, "steps": 22}


def assert_continued(whole: Report, resumed: Report) -> None:
    """Check that the resumed run saw, computed and validated the same as the other after its checkpoint."""
    after = whole.saved_after
    assert 0 <= after < len(whole.batches)
    assert resumed.batches == whole.batches[after:]
    assert resumed.where == whole.where[after:]
    assert resumed.losses == whole.losses[after:]
    assert resumed.validations == whole.validations - whole.validations_when_saved
    assert resumed.digest == whole.digest
    assert resumed.said == []


def path_in(folder: Path) -> str:
    return str(folder / "half.ckpt")


PLACES = {
    "inside an epoch": {},
    "inside an epoch, counting steps": STEPS,
    "at the start": {"save_at": ("on_train_start", 1)},
    "at the start of an epoch": {"save_at": ("on_train_epoch_start", 2)},
    "at the start of an epoch, counting steps": {"save_at": ("on_train_epoch_start", 2), **STEPS},
    "at the end of an epoch": {"save_at": ("on_train_epoch_end", 2)},
    "at the end of an epoch, counting steps": {"save_at": ("on_train_epoch_end", 2), **STEPS},
    "after the last batch": {"save_at": ("on_train_batch_end", 16)},
    "after the last batch, counting steps": {"save_at": ("on_train_batch_end", 16), **STEPS},
    "before a validation inside an epoch": {"validate": 3},
    "after a validation inside an epoch": {"validate": 3, "save_at": ("on_validation_end", 4)},
    "before a validation at the end": {"validate": 1.0, "save_at": ("on_train_batch_end", 16)},
    "after a validation at the end": {"validate": 1.0, "save_at": ("on_validation_end", 2)},
    "after a validation, counting steps": {"validate": 1.0, "save_at": ("on_validation_end", 2), **STEPS},
    "after an epoch with validation": {"validate": 1.0, "save_at": ("on_train_epoch_end", 2)},
    "while accumulating": {"accumulate": 2, "save_at": ("on_train_batch_end", 12)},
}


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_shuffling_run_resumes_exactly_wherever_it_was_interrupted(
    pool: WorkerPool, tmp_path: Path, place: dict[str, Any]
) -> None:
    case = replace(ALONE, path=path_in(tmp_path), **place)
    (reports,) = pool.run(interrupted, case, world_size=1)
    assert_continued(*reports)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "loader",
    [
        *("ordered", "drop_last", "generator", "replacement", "batch_sampler", "unbatched", "stateful"),
        *("two", "max_size", "max_size_cycle"),
    ],
)
def test_every_kind_of_loader_resumes_exactly(pool: WorkerPool, tmp_path: Path, loader: str) -> None:
    (reports,) = pool.run(interrupted, replace(ALONE, path=path_in(tmp_path), loader=loader), world_size=1)
    assert_continued(*reports)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("loader", ["shuffled", "persistent", "generator", "replacement"])
def test_loaders_with_workers_resume_exactly(pool: WorkerPool, tmp_path: Path, loader: str) -> None:
    case = replace(ALONE, path=path_in(tmp_path), loader=loader, workers=2)
    (reports,) = pool.run(interrupted, case, world_size=1)
    assert_continued(*reports)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("loader", "workers"), [("generator", 0), ("two", 0), ("shuffled", 2), ("persistent", 2)]
)
def test_loaders_resume_exactly_at_the_end_of_an_epoch(
    pool: WorkerPool, tmp_path: Path, loader: str, workers: int
) -> None:
    at = ("on_train_epoch_end", 1)
    case = replace(ALONE, path=path_in(tmp_path), loader=loader, workers=workers, save_at=at)
    (reports,) = pool.run(interrupted, case, world_size=1)
    assert_continued(*reports)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    "case",
    [
        PAIR,
        DDP,
        replace(PAIR, workers=2),
        replace(PAIR, own_sampler=True),
        replace(DDP, own_sampler=True, save_at=("on_train_epoch_end", 1)),
        replace(PAIR, validate=2, save_at=("on_train_batch_end", 8)),
        replace(PAIR, accumulate=2, save_at=("on_train_epoch_end", 1)),
        replace(PAIR, loader="stateful", save_at=("on_train_batch_end", 8)),
        replace(PAIR, plain=True),
        replace(PAIR, options={"async_save": True}),
    ],
    ids=[
        *("ours", "ddp", "workers", "no sampler", "ddp, no sampler"),
        *("validation", "accumulation", "stateful", "plain file", "async"),
    ],
)
def test_two_ranks_resume_exactly_each_with_its_own_random_state(
    pool: WorkerPool, tmp_path: Path, case: Case
) -> None:
    if case.save_at == ("on_train_batch_end", 11):
        case = replace(case, save_at=("on_train_batch_end", 9))
    reports = pool.run(interrupted, replace(case, path=path_in(tmp_path)), world_size=2)
    for report in reports:
        assert_continued(*report)
    assert reports[0][1].losses != reports[1][1].losses


@pytest.mark.full
def test_a_checkpoint_saved_after_a_run_that_ended_inside_an_epoch_resumes_there(
    pool: WorkerPool, tmp_path: Path
) -> None:
    case = replace(PAIR, epochs=None, steps=14)
    whole = pool.run(run, case, world_size=2)
    path = path_in(tmp_path)
    pool.run(run, replace(case, steps=9, path=path, save_at=("afterwards", 1)), world_size=2)
    for one, resumed in zip(
        whole, pool.run(run, replace(case, resume=path, seed=99), world_size=2), strict=True
    ):
        one.saved_after = 9
        assert_continued(one, resumed)


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp_auto"), ("fsdp_auto", "ddp")])
def test_random_state_and_position_travel_between_lightnings_strategies_and_ours(
    pool: WorkerPool, tmp_path: Path, first: str, second: str
) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, strategy=first, save_at=("on_train_batch_end", 9))
    whole = pool.run(run, replace(case, path=path), world_size=2)
    resumed = pool.run(run, replace(case, strategy=second, resume=path, seed=99), world_size=2)
    for one, other in zip(whole, resumed, strict=True):
        assert other.batches == one.batches[9:]
        assert other.losses == pytest.approx(one.losses[9:], abs=1e-5)


def test_no_sample_is_loaded_only_to_be_dropped(pool: WorkerPool, tmp_path: Path) -> None:
    whole, resumed = pool.run(interrupted, replace(ALONE, path=path_in(tmp_path)), world_size=1)[0]
    assert (whole.loaded, resumed.loaded) == (72, 72 - 33)


# --- what cannot be continued ---------------------------------------------------------------------------


def test_data_without_indices_starts_over_with_one_warning(pool: WorkerPool, tmp_path: Path) -> None:
    case = replace(ALONE, path=path_in(tmp_path), loader="stream", samples=12)
    whole, resumed = pool.run(interrupted, replace(case, save_at=("on_train_batch_end", 6)), world_size=1)[0]
    assert whole.batches[5] == [3, 4, 5] and resumed.batches[0] == [0, 1, 2]
    ours = [said for said in resumed.said if said.startswith("Resuming: ")]
    assert ours == [
        "Resuming: the training data of DataLoader starts over, because it has neither indices to skip nor "
        "`state_dict` and `load_state_dict`."
    ]


def test_restart_leaves_the_loaders_alone(pool: WorkerPool, tmp_path: Path) -> None:
    case = replace(ALONE, path=path_in(tmp_path), loader="ordered", options={"resume_data": "restart"})
    resumed = pool.run(interrupted, case, world_size=1)[0][1]
    assert resumed.where[0] == (1, 3) and resumed.batches[0] == [0, 1, 2]


def test_another_order_of_the_data_is_pointed_out(pool: WorkerPool, tmp_path: Path) -> None:
    path = path_in(tmp_path)
    pool.run(run, replace(ALONE, path=path), world_size=1)
    (resumed,) = pool.run(run, replace(ALONE, resume=path, loader="ordered"), world_size=1)
    assert "was made by RandomSampler and now is by SequentialSampler" in str(resumed.said)


def test_another_number_of_loaders_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    path = path_in(tmp_path)
    pool.run(run, replace(ALONE, path=path), world_size=1)
    (error,) = pool.run(error_of, replace(ALONE, resume=path, loader="two"), world_size=1)
    assert "this run has 2 training loaders and the checkpoint has 1" in error
    assert "resume_data='restart'" in error


# --- what must stay untouched ---------------------------------------------------------------------------


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["fsdp_auto", "auto"])
def test_evaluation_leaves_random_numbers_alone(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    case = replace(ALONE, strategy=strategy, path=path_in(tmp_path))
    pool.run(run, case, world_size=1)
    assert pool.run(evaluate, case, world_size=1) == [True]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["fsdp_auto", "auto"])
def test_the_users_loader_and_strategy_are_as_before_when_the_fit_is_over(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    case = replace(ALONE, strategy=strategy, loader="ordered", path=path_in(tmp_path))
    pool.run(run, case, world_size=1)
    (report,) = pool.run(fit_twice_with_one_loader, case, world_size=1)
    assert report == {
        "same": [True, True],
        "batches": [13, 24],
        "predicted": 24,
        "left on the strategy": [],
    }


@pytest.mark.full
def test_a_weights_only_checkpoint_holds_no_random_state(pool: WorkerPool, tmp_path: Path) -> None:
    path = path_in(tmp_path)
    pool.run(run, replace(PAIR, path=path, epochs=1, save_at=("weights", 1)), world_size=2)
    stored = storage.open_checkpoint(path)
    assert stored.rank_objects(0) is None and "nnx_ranks" not in stored.objects["trainer"]


def test_an_unknown_way_to_resume_data_is_refused() -> None:
    with pytest.raises(
        nnx.OptionError, match=r"resume_data='again' is not allowed. Use one of 'skip', 'restart'\."
    ):
        nnx.CheckpointIO(resume_data="again")  # type: ignore[arg-type]

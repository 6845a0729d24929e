"""A run that is interrupted anywhere and resumed goes on as if nothing had happened, on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx.checkpoint as storage
from jobs.exact_resume_jobs import (
    Case,
    Report,
    error_of,
    evaluate,
    fabric_draws,
    fit_twice_with_one_loader,
    interrupted,
    run,
)
from nnx.testing.pool import WorkerPool

ALONE = Case(strategy="auto")
PAIR = Case(devices=2, batch=2)
DDP = replace(PAIR, strategy="ddp")
STEPS: dict[str, Any] = {"epochs": None, "steps": 22}


def assert_continued(whole: Report, resumed: Report) -> None:
    """The resumed run saw, computed and validated what the whole one did after its checkpoint."""
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


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_shuffling_run_resumes_exactly_wherever_it_was_interrupted(
    pool: WorkerPool, tmp_path: Path, place: dict[str, Any]
) -> None:
    case = replace(ALONE, path=path_in(tmp_path), **place)
    (reports,) = pool.run(interrupted, case, world_size=1)
    assert_continued(*reports)


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


@pytest.mark.parametrize("loader", ["shuffled", "persistent", "generator", "replacement"])
def test_loaders_with_workers_resume_exactly(pool: WorkerPool, tmp_path: Path, loader: str) -> None:
    case = replace(ALONE, path=path_in(tmp_path), loader=loader, workers=2)
    (reports,) = pool.run(interrupted, case, world_size=1)
    assert_continued(*reports)


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


# --- other world sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "batches", "index", "steps"),
    [(2, 1, 9, 6, -1), (2, 1, 9, 6, 100), (2, 3, 9, 2, -1), (1, 2, 15, 1, -1), (1, 3, 15, 1, 100)],
)
def test_another_world_size_sees_the_rest_of_the_epoch_and_nothing_twice(
    pool: WorkerPool, tmp_path: Path, before: int, after: int, batches: int, index: int, steps: int
) -> None:
    """24 samples in batches of two; `index` is that of the first batch, as Lightning counts it now."""
    path = path_in(tmp_path)
    case = replace(PAIR, devices=before, epochs=3, steps=steps, save_at=("on_train_batch_end", batches))
    whole = pool.run(run, replace(case, path=path), world_size=before)
    resumed = pool.run(run, replace(case, devices=after, resume=path, seed=99), world_size=after)
    seen = _samples(whole, 1, batches)
    rest = _samples(resumed, 1)
    assert sorted(seen + rest) == list(range(24))
    assert sorted(rest) == sorted(_samples(whole, 1, since=batches))
    assert sorted(_samples(resumed, 2)) == list(range(24))
    assert resumed[0].where[0] == (1, index)
    per_epoch = 24 // after // 2
    assert [where for where in resumed[0].where if where[0] == 2] == [(2, i) for i in range(per_epoch)]
    (said,) = resumed[0].said
    assert f"holds the random state of {before} ranks, and this run has {after}" in said


def _samples(reports: list[Report], epoch: int, until: int | None = None, since: int = 0) -> list[int]:
    return [
        number
        for report in reports
        for (at, _), batch in list(zip(report.where, report.batches, strict=True))[since:until]
        if at == epoch
        for number in batch
    ]


def test_samples_that_ranks_cannot_share_equally_are_seen_again_with_a_warning(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, devices=1, batch=1, epochs=1, save_at=("on_train_batch_end", 7))
    whole = pool.run(run, replace(case, path=path), world_size=1)
    resumed = pool.run(run, replace(case, devices=2, resume=path), world_size=2)
    rest = _samples(resumed, 0)
    assert len(rest) == 18 and set(rest) | set(_samples(whole, 0, 7)) == set(range(24))
    assert any(
        "7 samples of this epoch were seen, which is no multiple of 2 ranks: 1 of them will be seen again"
        in s
        for s in resumed[0].said
    )


def test_ranks_that_stay_keep_their_random_state_and_new_ones_are_seeded(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, save_at=("on_train_epoch_end", 1), epochs=2, own_sampler=True, loader="ordered")
    whole = pool.run(run, replace(case, path=path), world_size=2)
    alone = pool.run(run, replace(case, devices=1, resume=path, seed=99), world_size=1)[0]
    assert alone.losses[0] == whole[0].losses[12]
    three = [
        pool.run(run, replace(case, devices=3, resume=path, seed=seed), world_size=3) for seed in (98, 99)
    ]
    assert [r.losses for r in three[0]] == [r.losses for r in three[1]]
    assert three[0][0].losses[0] == whole[0].losses[12] and three[0][1].losses[0] == whole[1].losses[12]
    assert len({report.losses[0] for report in three[0]}) == 3
    assert "rank 2" not in str(three[0][0].said) and "ranks 2 to 2 get new seeds" in str(three[0][0].said)
    assert "those of ranks 1 to 1 are dropped" in str(alone.said)


@pytest.mark.parametrize("strategy", ["fsdp_auto", "ddp"])
def test_strict_rng_refuses_another_world_size_and_a_checkpoint_without_random_state(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    path, options = path_in(tmp_path), {"strict_rng": True}
    case = replace(PAIR, strategy=strategy, epochs=1, path=path, save_at=("on_train_batch_end", 3))
    pool.run(run, case, world_size=2)
    wider = replace(case, devices=3, resume=path, path="", options=options)
    for error in pool.run(error_of, wider, world_size=3, timeout=60):
        assert error.startswith("CheckpointError: the checkpoint holds the random state of 2 ranks, and this")
        assert "Resume with 2 processes" in error


def test_a_checkpoint_without_random_state_is_refused_on_request_and_skips_by_batches_otherwise(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    case = replace(ALONE, epochs=1, loader="ordered", save_at=("on_train_batch_end", 3))
    pool.run(run, replace(case, path=path), world_size=1)
    content = storage.open_checkpoint(path).objects["trainer"]
    assert [tree["rank"] for tree in content["nnx_ranks"]] == [0]
    plain = str(tmp_path / "plain.ckpt")
    pool.run(_without_random_state, path, plain, world_size=1)
    resumed = pool.run(run, replace(case, resume=plain), world_size=1)[0]
    assert resumed.where[0] == (0, 3) and resumed.batches[0] == [9, 10, 11]
    strict = replace(case, resume=plain, options={"strict_rng": True})
    (error,) = pool.run(error_of, strict, world_size=1)
    assert error.startswith("CheckpointError: the checkpoint holds no random state")


def _without_random_state(path: str, plain: str) -> None:
    import nnx

    content = nnx.CheckpointIO().load_checkpoint(path)
    del content["nnx_ranks"]
    torch.save(content, plain)


# --- what cannot be continued ---------------------------------------------------------------------------


def test_data_without_indices_starts_over_with_one_warning(pool: WorkerPool, tmp_path: Path) -> None:
    case = replace(ALONE, path=path_in(tmp_path), loader="stream", samples=12)
    whole, resumed = pool.run(interrupted, replace(case, save_at=("on_train_batch_end", 6)), world_size=1)[0]
    assert whole.batches[5] == [3, 4, 5] and resumed.batches[0] == [0, 1, 2]
    ours = [said for said in resumed.said if said.startswith("Resuming: ")]
    assert ours == [
        "Resuming: the training data of DataLoader starts over, as it has neither indices to pass over nor "
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


@pytest.mark.parametrize("loader", ["stateful", "equal states"])
def test_loaders_with_a_state_at_another_world_size(pool: WorkerPool, tmp_path: Path, loader: str) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, loader=loader, path=path, save_at=("on_train_batch_end", 8))
    pool.run(run, case, world_size=2)
    said = str(pool.run(run, replace(case, devices=1, resume=path, path=""), world_size=1)[0].said)
    if loader == "stateful":
        assert "the training loaders start over, as each of 2 ranks had a state of its own" in said
    else:
        assert "the same on all 2 ranks, are restored on 1 ranks" in said


# --- what must stay untouched ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp_auto", "auto"])
def test_evaluation_leaves_random_numbers_alone(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    case = replace(ALONE, strategy=strategy, path=path_in(tmp_path))
    pool.run(run, case, world_size=1)
    assert pool.run(evaluate, case, world_size=1) == [True]


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


def test_a_weights_only_checkpoint_holds_no_random_state(pool: WorkerPool, tmp_path: Path) -> None:
    path = path_in(tmp_path)
    pool.run(run, replace(PAIR, path=path, epochs=1, save_at=("weights", 1)), world_size=2)
    stored = storage.open_checkpoint(path)
    assert stored.rank_objects(0) is None and "nnx_ranks" not in stored.objects["trainer"]


# --- Fabric ---------------------------------------------------------------------------------------------


def test_fabric_restores_every_ranks_random_state_where_it_is_asked_to(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    saved = pool.run(fabric_draws, path, 2, True, world_size=2)
    assert saved[0] != saved[1]
    loaded = pool.run(fabric_draws, path, 2, False, world_size=2)
    assert loaded == [(saved[0], True, []), (saved[1], True, [])]
    three = pool.run(fabric_draws, path, 3, False, world_size=3)
    assert [each[0] for each in three[:2]] == saved and three[2][0] not in saved
    assert "ranks 2 to 2 get new seeds" in str(three[0][2])
    for error in pool.run(fabric_draws, path, 1, False, "fsdp_auto", True, world_size=1):
        assert error.startswith("CheckpointError: the checkpoint holds the random state of 2 ranks")


def test_under_fabrics_own_ddp_rank_0_gets_its_random_state_and_the_others_new_ones(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    saved = pool.run(fabric_draws, path, 2, True, "ddp", world_size=2)
    first, second = pool.run(fabric_draws, path, 2, False, "ddp", world_size=2)
    assert first[0] == saved[0] and second[0] not in saved

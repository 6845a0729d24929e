"""``async_save=True`` with Trainer and Fabric: exact snapshots, errors at one step, no lost save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nnx_checkpoint as storage
from jobs.async_training_jobs import (
    ASYNC,
    fabric,
    fail,
    interrupt,
    keep_best_in_background,
    keep_one,
    save_after,
    save_late,
    save_late_beside_ddp,
    verified,
)
from jobs.lightning_checkpoint_jobs import keep_best
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import OptionError
from nnx_core.options import CommonOptions
from nnx_test_helpers.training import Run, train

RUN = Run(options=ASYNC, steps=6, groups=2)
DDP = replace(RUN, strategy="ddp", options={})
ALONE = replace(RUN, strategy="auto", options={}, devices=1)
HALF = 3


@pytest.fixture(scope="module")
def whole(pool: WorkerPool) -> list[float]:
    """Losses of six uninterrupted steps in one plain process."""
    return pool.run(train, ALONE, world_size=1)[0].losses


def test_the_option_takes_a_bool() -> None:
    with pytest.raises(OptionError, match=r"async_save='yes' is of type str. Pass bool."):
        CommonOptions(async_save="yes")  # type: ignore[arg-type]


# --- what is saved ------------------------------------------------------------------------------------


def test_training_goes_on_and_the_checkpoint_is_of_the_step_that_asked(
    pool: WorkerPool, tmp_path: Path, whole: list[float]
) -> None:
    path = str(tmp_path / "half.ckpt")
    run = replace(RUN, save=path, save_at=HALF)
    for outcome, was_in_flight in pool.run(save_late, run, 5, world_size=2):
        assert was_in_flight
        assert outcome.losses == pytest.approx(whole, abs=1e-5)
    assert verified(path) == ([], HALF)
    for read in pool.run(train, replace(RUN, resume=path, devices=3), world_size=3):
        assert read.losses == pytest.approx(whole[HALF:], abs=1e-5)


@pytest.mark.full
def test_lightnings_own_strategy_saves_from_rank_0_in_the_background(
    pool: WorkerPool, tmp_path: Path, whole: list[float]
) -> None:
    path = str(tmp_path / "half.ckpt")
    held = pool.run(save_late_beside_ddp, replace(DDP, save=path, save_at=HALF), 5, world_size=2)
    assert held == [True, True]
    assert verified(path) == ([], HALF)
    for read in pool.run(train, replace(DDP, resume=path), world_size=2):
        assert read.losses == pytest.approx(whole[HALF:], abs=1e-5)


# --- ModelCheckpoint ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last_as_it_does_without_background(
    pool: WorkerPool, tmp_path: Path, save_last: Any
) -> None:
    expected = pool.run(keep_best, "auto", 1, str(tmp_path / "one"), save_last, world_size=1)[0]
    folder = tmp_path / "two"
    for report in pool.run(keep_best_in_background, 2, str(folder), save_last, world_size=2):
        for key in ("names", "link", "best", "step", "restored best"):
            assert report[key] == expected[key], key
        for key in ("scores", "test best", "losses", "resumed"):
            assert report[key] == pytest.approx(expected[key], abs=1e-5), key
    for entry in folder.iterdir():
        assert storage.verify(entry) == [], entry


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("run", [RUN, DDP], ids=["fsdp_auto", "ddp"])
def test_there_is_always_a_complete_checkpoint_while_one_replaces_another(
    pool: WorkerPool, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "kept"
    left = pool.run(keep_one, run, str(folder), world_size=2)
    assert left[0].names == [left[0].best]
    assert verified(str(folder / left[0].best)) == ([], run.steps)
    for each in left:
        assert each.least_after_first >= 1
        assert each.most_at_once <= 2


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_an_error_ends_the_run_at_one_step_on_every_rank(
    pool: WorkerPool, tmp_path: Path, slow_rank: int
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = replace(RUN, save=str(tmp_path / "file"), steps=40)
    first, second = pool.run(fail, run, 2, slow_rank, world_size=2)
    assert first == second
    ended, name, text, left = first
    assert 3 < ended < 40
    assert (name, left) == ("CheckpointError", False)
    assert f"cannot save to '{tmp_path / 'file'}': it is a file" in text


def test_an_error_of_the_last_save_is_raised_at_the_end(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = replace(RUN, save=str(tmp_path / "file"), steps=3)
    first, second = pool.run(fail, run, 3, 1, world_size=2)
    assert first == second
    assert first[0] == 3
    assert first[1] == "CheckpointError"


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("at", "ended"), [(2, range(3, 15)), (15, range(15, 16))])
def test_under_lightnings_own_strategy_rank_0_raises(
    pool: WorkerPool, tmp_path: Path, at: int, ended: range
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = replace(DDP, save=str(tmp_path / "file"), steps=15, devices=1)
    ((step, name, text, left),) = pool.run(fail, run, at, 0, world_size=1)
    assert step in ended
    assert (name, left) == ("CheckpointError", False)
    assert "it is a file" in text


@pytest.mark.full
@pytest.mark.parametrize("run", [RUN, DDP], ids=["fsdp_auto", "ddp"])
@pytest.mark.parametrize(
    ("error", "ends"),
    [("ValueError", "ValueError: the user's; None"), ("KeyboardInterrupt", "SystemExit: 1; None")],
)
def test_an_error_of_the_users_is_not_hidden_and_the_save_in_flight_is_kept(
    pool: WorkerPool, tmp_path: Path, run: Run, error: str, ends: str
) -> None:
    path = str(tmp_path / "a")
    assert pool.run(interrupt, replace(run, save=path), error, world_size=2) == [ends, ends]
    assert verified(path) == ([], 2)


@pytest.mark.full
@pytest.mark.parametrize("run", [RUN, replace(DDP, devices=1)], ids=["fsdp_auto", "ddp"])
def test_an_error_of_the_users_is_not_hidden_by_one_of_the_save(
    pool: WorkerPool, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").write_text("in the way")
    run = replace(run, save=str(tmp_path / "file"))
    ends = pool.run(interrupt, run, "ValueError", world_size=run.devices)
    assert ends == ["ValueError: the user's; None"] * run.devices
    assert f"Background save to '{tmp_path / 'file'}' failed as well: " in pool.output[0]


@pytest.mark.full
@pytest.mark.parametrize("run", [RUN, DDP], ids=["fsdp_auto", "ddp"])
def test_after_a_run_saving_waits_and_the_next_run_saves_in_the_background_again(
    pool: WorkerPool, tmp_path: Path, run: Run
) -> None:
    run = replace(run, steps=1, save=str(tmp_path / "a"))
    assert pool.run(save_after, run, str(tmp_path / "after"), world_size=2) == [(True, True, True)] * 2
    assert verified(str(tmp_path / "after")) == ([], 1)


# --- Fabric -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_fabric_saves_in_the_background(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = pool.run(fabric, 2, str(tmp_path), world_size=2)
    assert first == second
    assert first["in flight"] and first["left"]
    assert first["step"] == 2
    assert first["second"] == first["first"]
    number, message = first["error"]
    assert number >= 0
    assert "it is a file" in message

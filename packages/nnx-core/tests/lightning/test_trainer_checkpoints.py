"""Checkpoints with Trainer: users' hooks, callbacks and plugins, and loading into other models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx
import nnx_checkpoint as storage
from jobs.lightning_checkpoint_jobs import (
    average,
    cell,
    counts,
    error_of,
    fit_with,
    keep_best,
    load_partly,
    load_untied,
    resume_and_watch,
    save_at_once,
    save_weights_only,
)
from nnx_checkpoint.reading.naming import RANKS
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.training import Run, train

RUN = Run(options=OPTIONS, steps=6, groups=2)
ALONE = replace(RUN, strategy="auto", options={}, devices=1)
HALF = 3


@pytest.fixture(scope="module")
def whole(pool: WorkerPool) -> list[float]:
    """Losses of six uninterrupted steps in one plain process."""
    return pool.run(train, ALONE, world_size=1)[0].losses


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of the third step, written by two ranks."""
    path = str(tmp_path_factory.mktemp("saved") / "half.ckpt")
    pool.run(train, replace(RUN, steps=HALF, save=path), world_size=2)
    return path


@pytest.mark.full  # the check `model_checkpoint_keeps_best` tries it
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last_as_under_lightnings_own_strategy(
    pool: WorkerPool, tmp_path: Path, save_last: Any
) -> None:
    expected = pool.run(keep_best, "auto", 1, str(tmp_path / "one"), save_last, world_size=1)[0]
    for report in pool.run(keep_best, "fsdp_auto", 2, str(tmp_path / "two"), save_last, world_size=2):
        for key in ("names", "link", "best", "step", "restored best"):
            assert report[key] == expected[key], key
        assert report["link"] == (save_last == "link")
        for key in ("scores", "test best", "losses", "resumed"):
            assert report[key] == pytest.approx(expected[key], abs=1e-5), key
        assert len(report["resumed"]) == 4 and "last.ckpt" in report["names"]
    for entry in (tmp_path / "two").iterdir():
        assert storage.verify(entry) == [], entry


@pytest.mark.full
def test_weights_only_checkpoints_have_no_optimizer_entries(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "weights.ckpt")
    for report in pool.run(save_weights_only, replace(RUN, steps=2), path, world_size=2):
        assert report["loss"] == pytest.approx(report["expected"], abs=1e-6)
        assert "contains only the model" in report["error"]
    stored = storage.open_checkpoint(path)
    assert not [name for name in stored.tensors if not name.startswith("model.")]
    assert stored.objects.get("optim") is None
    assert "optimizer_states" not in stored.objects["trainer"]


def test_tied_weights_are_stored_once_and_frozen_ones_and_buffers_are_there(saved: str) -> None:
    stored = storage.open_checkpoint(saved)
    assert stored.aliases == {"model.back.weight": "model.head.weight"}
    assert "model.back.weight" not in stored.tensors
    assert {"model.frozen.weight", "model.scale"} <= set(stored.tensors)
    assert "optim.0.state.frozen.weight.exp_avg" not in stored.tensors


def test_a_single_file_keeps_the_random_state_of_every_rank(saved: str, tmp_path: Path) -> None:
    storage.merge(saved, tmp_path / "one.ckpt")
    stored = storage.open_checkpoint(saved)
    loaded = nnx.CheckpointIO().load_checkpoint(tmp_path / "one.ckpt")
    assert [ranks["rng"] for ranks in loaded[RANKS]] == [stored.rank_objects(r)["rng"] for r in range(2)]


def test_lightnings_own_strategies_store_tied_weights_once_too(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "tied.ckpt")
    pool.run(train, replace(RUN, strategy="ddp", options={}, steps=1, save=path), world_size=2)
    stored = storage.open_checkpoint(path)
    assert stored.aliases == {"model.back.weight": "model.head.weight"}
    assert "model.back.weight" not in stored.tensors


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_hook_may_rename_entries_and_only_those_are_read_as_a_whole(
    pool: WorkerPool, saved: str, whole: list[float], devices: int
) -> None:
    run = replace(RUN, model="renamed", resume=saved, devices=devices)
    bias = storage.open_checkpoint(saved).read("model.embed.bias").sum().item()
    for read in pool.run(resume_and_watch, run, world_size=devices):
        assert read.losses == pytest.approx(whole[HALF:], abs=1e-5)
        assert set(read.whole) == {"model.embed.weight", "model.embed.bias"}
        assert read.hook_saw == {"type": "Tensor", "bias": bias}


@pytest.mark.full
def test_without_a_hook_nothing_is_read_as_a_whole(pool: WorkerPool, saved: str) -> None:
    for read in pool.run(resume_and_watch, replace(RUN, resume=saved), world_size=2):
        assert read.whole == []


@pytest.mark.full
def test_a_hook_may_leave_entries_out_and_put_them_back(
    pool: WorkerPool, tmp_path: Path, whole: list[float]
) -> None:
    path = str(tmp_path / "selective.ckpt")
    run = replace(RUN, model="selective")
    pool.run(cell, replace(run, steps=HALF, save=path), HALF, world_size=2)
    assert "model.frozen.weight" not in storage.open_checkpoint(path).tensors
    for read in pool.run(resume_and_watch, replace(run, resume=path, devices=3), world_size=3):
        assert read.losses == pytest.approx(whole[HALF:], abs=1e-5)
        assert read.hook_saw == {"left out": "frozen", "values": (1, 2.5)}


def test_strict_loading_can_be_turned_off(pool: WorkerPool, saved: str) -> None:
    run = replace(RUN, validate_every=2)
    expected = pool.run(
        load_partly, replace(run, strategy="ddp", options={}), saved_file(pool, saved), world_size=2
    )
    for report in pool.run(load_partly, run, saved, world_size=2):
        assert report["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)
        assert report["untouched"]


def saved_file(pool: WorkerPool, saved: str) -> str:
    """Return the same step as a plain Lightning file."""
    path = str(Path(saved).with_name("half-plain.ckpt"))
    if not Path(path).exists():
        pool.run(fit_with, replace(ALONE, steps=HALF, save=path), None, world_size=1)
    return path


@pytest.mark.full
def test_extra_state_and_hyperparameters_come_back(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "extra.ckpt")
    run = replace(RUN, model="extra", steps=2)
    pool.run(counts, replace(run, save=path), world_size=2)
    hparams = storage.open_checkpoint(path).objects["trainer"]["hyper_parameters"]
    assert hparams == {"width": 10, "name": "extra"}
    for seen, _ in pool.run(counts, replace(run, resume=path, steps=4, devices=3), world_size=3):
        assert seen == [(2, [1.0, 1.0]), (3, [1.5, 1.5])]


@pytest.mark.full
def test_a_callbacks_tensors_are_saved_and_restored(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ema.ckpt")
    halves = pool.run(average, replace(RUN, steps=HALF, save=path), world_size=2)
    alone = pool.run(average, replace(ALONE, steps=HALF), world_size=1)[0][0]
    for held, restored, _ in pool.run(average, replace(RUN, resume=path), world_size=2):
        assert set(restored) == set(alone) == set(held)
        for name, value in restored.items():
            assert torch.equal(value, halves[0][0][name])
            torch.testing.assert_close(value, alone[name], atol=1e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("model", ["plain_sgd", "net"])
def test_an_optimizer_without_state_and_a_scheduler_resume(
    pool: WorkerPool, tmp_path: Path, model: str
) -> None:
    path = str(tmp_path / "half.ckpt")
    run = replace(RUN, model=model, groups=1, scheduler=model == "net")
    alone = replace(run, strategy="auto", options={}, devices=1)
    expected = pool.run(cell, alone, HALF, world_size=1)[0].losses
    before = pool.run(cell, replace(run, save=path, save_at=HALF), HALF, world_size=2)[0]
    for seen in pool.run(cell, replace(run, resume=path, devices=3), HALF, world_size=3):
        assert (seen.weights, seen.optimizer) == (before.weights, before.optimizer)
        assert seen.losses == pytest.approx(expected[HALF:], abs=1e-5)


@pytest.mark.full
def test_saving_before_the_first_step_changes_nothing_and_resumes(
    pool: WorkerPool, tmp_path: Path, whole: list[float]
) -> None:
    path = str(tmp_path / "start.ckpt")
    for losses in pool.run(save_at_once, replace(RUN, save=path), world_size=2):
        assert losses == pytest.approx(whole, abs=1e-5)
    for outcome in pool.run(train, replace(RUN, resume=path), world_size=2):
        assert outcome.losses == pytest.approx(whole, abs=1e-5)


# --- other files and other plugins --------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("writer", ["auto", "ddp"])
def test_a_plain_file_of_lightnings_resumes(
    pool: WorkerPool, tmp_path: Path, whole: list[float], writer: str
) -> None:
    path = str(tmp_path / "plain.ckpt")
    devices = 2 if writer == "ddp" else 1
    run = replace(ALONE, strategy=writer, devices=devices, steps=HALF, save=path)
    pool.run(fit_with, run, None, world_size=devices)
    assert Path(path).is_file()
    for target in (2, 3):
        for outcome in pool.run(train, replace(RUN, resume=path, devices=target), world_size=target):
            assert outcome.losses == pytest.approx(whole[HALF:], abs=1e-5)


@pytest.mark.full
def test_lightnings_own_io_plugin_gets_complete_tensors_and_writes_a_plain_file(
    pool: WorkerPool, tmp_path: Path, whole: list[float]
) -> None:
    path = str(tmp_path / "plain.ckpt")
    pool.run(fit_with, replace(RUN, steps=HALF, save=path), "torch", world_size=2)
    content = torch.load(path, weights_only=True)
    assert type(content["state_dict"]["embed.weight"]) is torch.Tensor
    assert content["optimizer_states"][0]["param_groups"][0]["params"][0] == 0
    plain = pool.run(fit_with, replace(ALONE, resume=path), None, world_size=1)[0]
    assert plain == pytest.approx(whole[HALF:], abs=1e-5)
    for losses in pool.run(fit_with, replace(RUN, resume=path), "torch", world_size=2):
        assert losses == pytest.approx(whole[HALF:], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("plugin", ["async", "async nnx"])
def test_lightnings_async_plugin_wraps_ours(
    pool: WorkerPool, tmp_path: Path, whole: list[float], plugin: str
) -> None:
    path = str(tmp_path / "async.ckpt")
    pool.run(fit_with, replace(RUN, steps=HALF, save=path), plugin, world_size=2)
    assert storage.verify(path) == []
    for losses in pool.run(fit_with, replace(RUN, resume=path, devices=3), plugin, world_size=3):
        assert losses == pytest.approx(whole[HALF:], abs=1e-5)


@pytest.mark.full
def test_one_plain_process_reads_and_writes_the_shared_checkpoint(
    pool: WorkerPool, tmp_path: Path, saved: str, whole: list[float]
) -> None:
    path = str(tmp_path / "alone.ckpt")
    losses = pool.run(fit_with, replace(ALONE, resume=saved, steps=4, save=path), "nnx", world_size=1)[0]
    assert losses == pytest.approx(whole[HALF:4], abs=1e-5)
    for outcome in pool.run(train, replace(RUN, resume=path), world_size=2):
        assert outcome.losses == pytest.approx(whole[4:], abs=1e-5)


@pytest.mark.full
def test_weights_that_were_tied_when_saved_load_into_a_model_that_does_not_tie_them(
    pool: WorkerPool, saved: str
) -> None:
    head = storage.open_checkpoint(saved).read("model.head.weight")
    for weights in pool.run(load_untied, RUN, saved, world_size=2):
        assert torch.equal(weights["head.weight"], head)
        assert torch.equal(weights["back.weight"], head)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_checkpoint_is_cast_to_the_precision_of_the_model(
    pool: WorkerPool, saved: str, whole: list[float], precision: str
) -> None:
    run = replace(RUN, precision=precision, resume=saved)
    for outcome in pool.run(train, run, world_size=2):
        assert outcome.losses == pytest.approx(whole[HALF:], rel=0.05 if precision == "bf16-true" else 1e-5)
        expected = torch.bfloat16 if precision == "bf16-true" else torch.float64
        assert outcome.weights["embed.weight"].dtype == expected


# --- errors -------------------------------------------------------------------------------------------


def test_another_model_gets_one_error_that_names_every_difference_on_every_rank(
    pool: WorkerPool, saved: str
) -> None:
    for error in pool.run(error_of, replace(RUN, model="wider", resume=saved), world_size=2, timeout=60):
        start, missing, unexpected, shapes = error.split("; ")[:4]
        assert start == "CheckpointError: the checkpoint is of another model"
        assert missing == "missing in the checkpoint: top.weight, top.bias"
        assert unexpected.startswith("unexpected in the checkpoint: blocks.2.down.bias")
        assert "embed.weight is (10, 6) in the checkpoint and (11, 6) in the model" in shapes
        assert "strict_loading=False" in error


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizers": 2, "groups": 1}, "this run has 2 optimizers and the checkpoint has 1."),
        ({"groups": 1}, "AdamW has 1 param groups and the checkpoint has 2."),
    ],
    ids=["optimizers", "groups"],
)
def test_other_optimizers_get_one_error_on_every_rank(
    pool: WorkerPool, saved: str, settings: dict[str, Any], message: str
) -> None:
    for source in (saved, saved_file(pool, saved)):
        for error in pool.run(error_of, replace(RUN, resume=source, **settings), world_size=2, timeout=60):
            assert error.startswith("CheckpointError: ") and message in error, error


def test_a_path_that_is_not_there_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere.ckpt")
    for error in pool.run(error_of, replace(RUN, resume=path), world_size=2, timeout=60):
        assert error.startswith("CheckpointNotFoundError: ") and path in error


def test_storage_options_are_refused_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    run = replace(RUN, steps=1, save=str(tmp_path / "x.ckpt"))
    for error in pool.run(error_of, run, {"anon": True}, world_size=2, timeout=60):
        assert "storage_options={'anon': True} is not supported by nnx.CheckpointIO." in error
    assert not (tmp_path / "x.ckpt").exists()


@pytest.mark.full
def test_an_object_without_a_safe_form_is_named_by_its_key_path(pool: WorkerPool, tmp_path: Path) -> None:
    run = replace(RUN, model="opaque", steps=1, save=str(tmp_path / "x.ckpt"))
    for error in pool.run(error_of, run, world_size=2, timeout=60):
        assert error.startswith("CheckpointError: ")
        assert "hyper_parameters" in error and "thing" in error and "Opaque" in error
        assert 'allow pickle for such objects: opaque_objects="pickle" on the strategy' in error
    assert not (tmp_path / "x.ckpt").exists()

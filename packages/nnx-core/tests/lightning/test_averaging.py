"""Lightning's averaging callbacks: the average is sharded like the model, and equals that of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nnx
import nnx_checkpoint as storage
from jobs.averaging_jobs import (
    copied_at_setup,
    error_while_averaging,
    every_stage,
    fail_while_averaging,
    fit,
    read_as_a_whole,
    resume_without,
    save_afterwards,
)
from nnx_conformance.pool import JobError, WorkerPool
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.training import MODELS, Run

RUN = Run(options=OPTIONS, steps=4, validate_every=2, groups=2)
ALONE = replace(RUN, strategy="auto", options={}, devices=1)
LONG, HALF = 6, 3


def under(strategy: str, run: Run = RUN, **changes: Any) -> Run:
    """The same run under another strategy."""
    return replace(run, strategy=strategy, options=OPTIONS if "fsdp" in strategy else {}, **changes)


def assert_same(report: dict[str, Any], expected: dict[str, Any], *, since: int = 0) -> None:
    assert report["losses"] == pytest.approx(expected["losses"][since:], abs=1e-5)
    assert report["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-5)
    assert_close(report["average"], expected["average"])
    assert_close(report["weights"], expected["weights"])
    assert report["plain"] and report["routed"] == [] and report["own function"]


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("kind", ["ema", "mean", "lists", "no_buffers"])
def test_the_average_over_steps_is_that_of_one_process_and_is_sharded(pool: WorkerPool, kind: str) -> None:
    expected = pool.run(fit, ALONE, kind, world_size=1)[0]
    assert any(
        (expected["average"][n] - expected["weights"][n]).abs().max() == 0 for n in expected["weights"]
    )
    for report in pool.run(fit, RUN, kind, world_size=2):
        assert_same(report, expected)
        assert report["share"] == pytest.approx(0.5, abs=0.02)
        assert report["same_kinds"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["epochs", "swa"])
def test_the_average_over_epochs_is_that_of_one_process(pool: WorkerPool, kind: str) -> None:
    run = replace(RUN, steps=100, scheduler=True, groups=1)
    expected = pool.run(fit, replace(run, strategy="auto", options={}, devices=1), kind, 3, world_size=1)[0]
    for report in pool.run(fit, run, kind, 3, world_size=2):
        assert_same(report, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", ["fsdp_offload", "fsdp_manual", "tiny", "column_parallel", "flat_masters"]
)
def test_every_engine_averages_what_it_holds(pool: WorkerPool, strategy: str) -> None:
    model = "wrapped" if strategy == "fsdp_manual" else "net"
    expected = pool.run(fit, ALONE, "ema", world_size=1)[0]
    for report in pool.run(fit, replace(under(strategy), options={}, model=model), "ema", world_size=2):
        assert_same(report, expected)
        assert report["same_kinds"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ema", "lists", "swa"])
def test_averaged_buffers_are_those_of_ddp_and_the_same_on_every_rank(pool: WorkerPool, kind: str) -> None:
    epochs = 3 if kind == "swa" else None
    run = replace(RUN, model="normed", validate_every=None, steps=100 if epochs else 4)
    expected = pool.run(fit, under("ddp", run), kind, epochs, world_size=2)[0]
    for report in pool.run(fit, run, kind, epochs, world_size=2):
        names = [name for name in expected["average"] if kind != "swa" or "running" not in name]
        for name in names:
            torch.testing.assert_close(report["average"][name], expected["average"][name], msg=name)


@pytest.mark.full
def test_parameters_that_a_forward_has_left_gathered_are_sharded_before_they_are_averaged(
    pool: WorkerPool,
) -> None:
    run = replace(RUN, model="looks", groups=1)
    alone = replace(run, strategy="auto", options={}, devices=1)
    expected = pool.run(fit, alone, "ema", world_size=1)[0]
    for report in pool.run(fit, run, "ema", world_size=2):
        assert_same(report, expected)


@pytest.mark.full
def test_an_average_that_has_begun_keeps_its_values(pool: WorkerPool) -> None:
    expected = pool.run(fit, ALONE, "pretrained", world_size=1)[0]
    for report in pool.run(fit, RUN, "pretrained", world_size=2):
        assert_same(report, expected)


@pytest.mark.full
def test_every_stage_of_a_trainer_uses_the_weights_that_it_uses_in_one_process(pool: WorkerPool) -> None:
    expected = pool.run(every_stage, ALONE, "ema", world_size=1)[0]
    reports = pool.run(every_stage, RUN, "ema", world_size=2)
    assert sum(r["predicted"] for r in reports) == pytest.approx(expected["predicted"], rel=1e-5)
    for report in reports:
        for key in ("val", "test"):
            assert report[key] == pytest.approx(expected[key], abs=1e-5), key
        for key in ("first", "average after"):
            assert_close(report[key], expected[key])
        assert_same(report, expected)
    assert expected["val"] != pytest.approx(expected["test"], abs=1e-3)


@pytest.mark.full
def test_a_model_of_low_precision_has_the_average_that_it_has_under_ddp(pool: WorkerPool) -> None:
    run = replace(RUN, precision="bf16-true", validate_every=None)
    expected = pool.run(fit, under("ddp", run), "ema", world_size=2)[0]["average"]
    for report in pool.run(fit, run, "ema", world_size=2):
        for name, value in report["average"].items():
            assert value.dtype == expected[name].dtype, name
            torch.testing.assert_close(value, expected[name], atol=0.05, rtol=0.05, msg=name)


# --- memory -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_no_complete_copy_is_made_before_the_model_is_sharded(pool: WorkerPool, kind: str) -> None:
    total = sum(parameter.numel() for parameter in MODELS["net"](RUN).parameters())
    for in_copy, in_module in pool.run(copied_at_setup, RUN, kind, world_size=2):
        assert (in_copy, in_module) == (0, total)


@pytest.mark.full
def test_a_model_built_on_the_meta_device_has_an_average_of_real_weights(pool: WorkerPool) -> None:
    run = replace(RUN, model="on_meta")
    first, second = pool.run(fit, run, "ema", world_size=2)
    assert first["plain"] and first["same_kinds"] and second["same_kinds"]
    assert_close(first["average"], second["average"])
    assert_close(
        first["average"], first["weights"]
    )  # which Lightning's callback makes the average at the end
    assert all(value.isfinite().all() for value in first["average"].values())


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(pool: WorkerPool) -> dict[str, Any]:
    """Six uninterrupted steps in one plain process."""
    return pool.run(fit, replace(ALONE, steps=LONG), "ema", world_size=1)[0]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of the third step: of two sharded ranks, of ddp, and a file of one plain process."""
    folder = tmp_path_factory.mktemp("averaged")
    for strategy in ("fsdp_auto", "ddp", "auto"):
        devices = 1 if strategy == "auto" else 2
        run = under(strategy, devices=devices, steps=LONG, save=str(folder / strategy), save_at=HALF)
        pool.run(fit, run, "ema", world_size=devices)
    return {strategy: str(folder / strategy) for strategy in ("fsdp_auto", "ddp", "auto")}


@pytest.mark.quick(every=16)
@pytest.mark.parametrize(
    ("source", "target", "devices"),
    [
        ("fsdp_auto", "fsdp_auto", 1),
        ("fsdp_auto", "fsdp_auto", 3),
        ("fsdp_auto", "ddp", 2),
        ("fsdp_auto", "column_parallel", 2),
        ("fsdp_auto", "flat_masters", 2),
        ("ddp", "fsdp_auto", 2),
        ("ddp", "column_parallel", 2),
        ("auto", "fsdp_auto", 2),
        ("auto", "flat_masters", 2),
    ],
)
def test_a_resumed_average_goes_on_as_if_uninterrupted(
    pool: WorkerPool, whole: dict[str, Any], saved: dict[str, str], source: str, target: str, devices: int
) -> None:
    run = under(target, devices=devices, steps=LONG, resume=saved[source])
    for report in pool.run(fit, run, "ema", world_size=devices):
        assert_same(report, whole, since=HALF)


@pytest.mark.full
def test_an_average_moves_from_two_ranks_to_one_and_back(
    pool: WorkerPool, whole: dict[str, Any], saved: dict[str, str], tmp_path: Path
) -> None:
    path = str(tmp_path / "four.ckpt")
    run = replace(RUN, steps=HALF + 1, devices=1, resume=saved["fsdp_auto"], save=path)
    pool.run(fit, run, "ema", world_size=1)
    for report in pool.run(fit, replace(RUN, steps=LONG, resume=path), "ema", world_size=2):
        assert_same(report, whole, since=HALF + 1)


@pytest.mark.full
@pytest.mark.parametrize("target", ["fsdp_auto", "ddp"])
def test_swa_resumes_with_its_average_and_its_scheduler(
    pool: WorkerPool, tmp_path: Path, target: str
) -> None:
    path = str(tmp_path / "swa.ckpt")
    run = replace(RUN, steps=100, model="warming", validate_every=None)
    expected = pool.run(fit, under("auto", run, devices=1), "swa", 4, world_size=1)[0]
    pool.run(fit, replace(run, save=path, save_at=4), "swa", 3, world_size=2)
    stored = storage.open_checkpoint(path)
    assert any("average_model_state.blocks.0.up.weight" in name for name in stored.tensors)
    for report in pool.run(fit, under(target, run, resume=path), "swa", 4, world_size=2):
        assert_same(report, expected, since=4)


@pytest.mark.full
def test_no_weights_are_gathered_to_be_saved_or_read_as_a_whole(
    pool: WorkerPool, saved: dict[str, str]
) -> None:
    stored = storage.open_checkpoint(saved["fsdp_auto"])
    for name in ("model.blocks.0.up.weight", "objects.trainer.current_model_state.blocks.0.up.weight"):
        assert len({piece.file for piece in stored.tensors[name].pieces}) == 2, name
    assert stored.aliases == {"model.back.weight": "model.head.weight"}
    for source in saved.values():
        for read in pool.run(read_as_a_whole, replace(RUN, steps=LONG, resume=source), world_size=2):
            assert [name for name in read if "state." in name and "averaging" not in name] == []
            assert [name for name in read if name.startswith("model.")] == []


@pytest.mark.full
def test_what_is_loaded_elsewhere_is_the_average(
    pool: WorkerPool, saved: dict[str, str], tmp_path: Path
) -> None:
    average = pool.run(fit, replace(RUN, steps=HALF), "ema", world_size=2)[0]["average"]
    loaded = nnx.load_from_checkpoint(MODELS["net"], saved["fsdp_auto"], run=RUN)
    assert_close(dict(loaded.state_dict()), average)
    storage.merge(saved["fsdp_auto"], tmp_path / "one.ckpt")
    plain = MODELS["net"].load_from_checkpoint(tmp_path / "one.ckpt", run=RUN)
    assert_close(dict(plain.state_dict()), average)
    for report in pool.run(resume_without, replace(RUN, steps=LONG), saved["fsdp_auto"], world_size=2):
        assert_close(report["weights"], average)
        assert len(report["losses"]) == LONG - HALF


@pytest.mark.full
@pytest.mark.parametrize("plugin", ["torch", "async nnx"])
def test_other_ways_of_saving_hold_the_average_too(
    pool: WorkerPool, whole: dict[str, Any], tmp_path: Path, plugin: str
) -> None:
    run = replace(RUN, steps=HALF, save=str(tmp_path / "saved.ckpt"))
    pool.run(fit, run, "ema", None, plugin, world_size=2)
    loaded = nnx.load_from_checkpoint(MODELS["net"], run.save or "", run=RUN)
    resumed = replace(RUN, steps=LONG, resume=run.save)
    for report in pool.run(fit, resumed, "ema", None, plugin, world_size=2):
        assert_same(report, whole, since=HALF)
    average = pool.run(fit, replace(RUN, steps=HALF), "ema", world_size=2)[0]["average"]
    assert_close(dict(loaded.state_dict()), average)


@pytest.mark.full
def test_a_merged_file_resumes_under_lightnings_own_strategy(
    pool: WorkerPool, whole: dict[str, Any], saved: dict[str, str], tmp_path: Path
) -> None:
    storage.merge(saved["fsdp_auto"], tmp_path / "one.ckpt")
    run = under("ddp", steps=LONG, resume=str(tmp_path / "one.ckpt"))
    for report in pool.run(fit, run, "ema", world_size=2):
        assert_same(report, whole, since=HALF)


@pytest.mark.full
def test_a_checkpoint_without_an_average_starts_one(pool: WorkerPool, tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    for strategy, devices in (("auto", 1), ("fsdp_auto", 2)):
        run = under(strategy, devices=devices, save=str(tmp_path / f"{strategy}.ckpt"), save_at=2)
        pool.run(fit, run, "none", world_size=devices)
        resumed = under(strategy, devices=devices, steps=LONG, resume=run.save)
        reports += pool.run(fit, replace(resumed, validate_every=None), "late", world_size=devices)
    for report in reports[1:]:
        assert_close(report["average"], reports[0]["average"])


@pytest.mark.full
def test_a_checkpoint_can_be_saved_when_training_is_over(
    pool: WorkerPool, whole: dict[str, Any], tmp_path: Path
) -> None:
    paths = [str(tmp_path / name) for name in ("first.ckpt", "second.ckpt")]
    pool.run(save_afterwards, replace(RUN, steps=HALF), paths[0], world_size=2)
    average = pool.run(fit, replace(RUN, steps=HALF), "ema", world_size=2)[0]["average"]
    for path, start, steps in ((paths[0], None, HALF), (paths[1], paths[0], LONG)):
        reports = pool.run(save_afterwards, replace(RUN, steps=steps), path, start, world_size=2)
        loaded = nnx.load_from_checkpoint(MODELS["net"], path, run=RUN)
        for report in reports:
            assert_close(dict(loaded.state_dict()), report["weights"])
        if start is None:
            assert_close(reports[0]["weights"], average)


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_error_on_all_ranks_leaves_a_complete_average(pool: WorkerPool) -> None:
    expected = pool.run(fail_while_averaging, ALONE, [0], world_size=1)[0]
    for report in pool.run(fail_while_averaging, RUN, [0, 1], world_size=2):
        assert (report["error"], report["routed"]) == ("bad batch", set())
        assert_close(report["average"], expected["average"])


@pytest.mark.full  # it waits for a limit of twenty seconds
def test_after_an_error_on_one_rank_nothing_waits_for_the_average(pool: WorkerPool) -> None:
    with pytest.raises(JobError) as failure:
        pool.run(fail_while_averaging, RUN, [1], world_size=2, timeout=60, end_after=3)
    failures, output = failure.value.failures, failure.value.output
    assert failures[1] == "the process died with exit code 3"
    assert "the ranks did not fail together" in output[1] and "routed: []" in output[1]
    assert "hung" not in failures[0]


def test_the_average_of_another_model_is_refused(pool: WorkerPool) -> None:
    for message in pool.run(error_while_averaging, RUN, "of_another", world_size=2):
        assert message.startswith("UnsupportedError: OfAnother averages into a module with other parameters")
        assert "they differ in more.bias, more.weight." in message
        assert message.endswith("as Lightning's own callbacks do.")

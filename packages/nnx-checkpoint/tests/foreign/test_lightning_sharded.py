"""nnx resumes sharded directories of Lightning's strategies, and writes ones that Lightning resumes."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import nnx_checkpoint as storage
from jobs.sharded_jobs import cell, fabric_run, load_as_fsdp
from nnx_checkpoint.foreign.dcp_directory import LightningSharded
from nnx_checkpoint.reading.naming import stored_optimizer_states
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.training import Run

MODEL_PARALLEL: dict[str, Any] = {"strategy": "model_parallel", "model": "parallelized"}
FSDP: dict[str, Any] = {"strategy": "fsdp_auto", "options": {"min_num_params": 100}}
DDP: dict[str, Any] = {"strategy": "ddp_find_unused_parameters_true"}
SETUPS: dict[str, dict[str, Any]] = {
    "several optimizers": {"optimizer": "mixed", "optimizers": 2},
    "a scheduler": {"optimizer": "sgd", "scheduler": True},
}
STEP, STEPS = 2, 4


def train(pool: WorkerPool, devices: int, **more: Any) -> Any:
    run = Run(devices=devices, steps=STEPS, **more)
    return pool.run(cell, run, STEP * run.optimizers, world_size=devices)[0]


def assert_goes_on(resumed: Any, saved: Any, setup: dict[str, Any]) -> None:
    assert resumed.weights == saved.weights
    assert resumed.optimizer == saved.optimizer
    assert resumed.losses == pytest.approx(saved.losses[STEP:], abs=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_lightnings_directories_resume_under_other_strategies(
    pool: WorkerPool, tmp_path: Path, setup: dict[str, Any]
) -> None:
    path = tmp_path / "sharded"
    step = STEP * setup.get("optimizers", 1)
    saved = train(pool, 2, save=str(path), save_at=step, **MODEL_PARALLEL, **setup)
    assert (path / "meta.pt").is_file()
    for devices, target in ((3, FSDP), (2, DDP)):
        assert_goes_on(train(pool, devices, resume=str(path), **target, **setup), saved, setup)


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_lightning_resumes_from_directories_that_we_write(
    pool: WorkerPool, tmp_path: Path, setup: dict[str, Any]
) -> None:
    step = STEP * setup.get("optimizers", 1)
    saved = train(pool, 2, save=str(tmp_path / "ours"), save_at=step, **FSDP, **setup)
    path = tmp_path / "sharded"
    LightningSharded().write(storage.open_checkpoint(tmp_path / "ours"), path)
    for devices in (1, 3):
        assert_goes_on(train(pool, devices, resume=str(path), **MODEL_PARALLEL, **setup), saved, setup)


@pytest.mark.full
def test_lightning_resumes_from_its_own_directory_after_two_conversions(
    pool: WorkerPool, tmp_path: Path
) -> None:
    saved = train(pool, 3, save=str(tmp_path / "a"), save_at=STEP, groups=2, **MODEL_PARALLEL)
    storage.convert(tmp_path / "a", tmp_path / "b", to="nnx")
    storage.convert(tmp_path / "b", tmp_path / "c", to="lightning_sharded")
    resumed = train(pool, 3, resume=str(tmp_path / "c"), groups=2, **MODEL_PARALLEL)
    assert resumed.losses == saved.losses[STEP:]
    assert (resumed.weights, resumed.optimizer) == (saved.weights, saved.optimizer)


@pytest.mark.full
def test_optimizers_of_named_parameters_resume(pool: WorkerPool, tmp_path: Path) -> None:
    named = {**MODEL_PARALLEL, "model": "named"}
    saved = train(pool, 2, save=str(tmp_path / "a"), save_at=STEP, **named)
    (state,) = stored_optimizer_states(storage.open_checkpoint(tmp_path / "a")) or []
    assert "embed.weight" in state["param_groups"][0]["params"]
    LightningSharded().write(storage.open_checkpoint(tmp_path / "a"), tmp_path / "b")
    assert_goes_on(train(pool, 2, resume=str(tmp_path / "b"), **named), saved, {})


# --- Fabric -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_fabrics_directories_resume_under_our_strategies_and_back(pool: WorkerPool, tmp_path: Path) -> None:
    theirs, ours, again = (str(tmp_path / name) for name in ("theirs", "ours", "again"))
    saved = pool.run(fabric_run, "model_parallel", 2, range(3), theirs, None)[0]
    resumed = pool.run(fabric_run, "nnx", 3, range(3, 5), None, theirs, world_size=3)[0]
    assert (resumed.weights, resumed.momenta) == (saved.weights, saved.momenta)
    assert resumed.note == {"epoch": 5}
    whole = pool.run(fabric_run, "nnx", 2, range(3), ours, None)[0]
    LightningSharded().write(storage.open_checkpoint(ours), again)
    back = pool.run(fabric_run, "model_parallel", 2, range(3, 5), None, again)[0]
    assert (back.weights, back.momenta) == (whole.weights, whole.momenta)
    assert back.note == {"epoch": 5}
    assert back.rest == ["nnx"]
    assert back.losses == pytest.approx(resumed.losses, abs=2e-6)


# --- FSDPStrategy -------------------------------------------------------------------------------------


def fsdp_directory(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """As FSDPStrategy writes it; the strategy itself needs an accelerator."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer_0": state}, checkpoint_id=path, no_dist=True)
    meta = {"epoch": 1, "global_step": 9, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {}}}
    torch.save(meta, path / "meta.pt")
    return weights, state


def test_reads_the_directories_of_fsdp_strategy(tmp_path: Path) -> None:
    weights, _ = fsdp_directory(tmp_path / "d")
    checkpoint = storage.open_checkpoint(tmp_path / "d")
    assert checkpoint.format == "lightning_sharded"
    assert all(torch.equal(checkpoint.read(f"model.{name}"), value) for name, value in weights.items())
    assert checkpoint.objects["trainer"]["global_step"] == 9
    assert checkpoint.objects["optim"][0]["groups"][0]["params"] == list(weights)


def test_writes_what_fsdp_strategy_loads(pool: WorkerPool, tmp_path: Path) -> None:
    weights, state = fsdp_directory(tmp_path / "d")
    LightningSharded().write(storage.open_checkpoint(tmp_path / "d"), tmp_path / "out", strategy="fsdp")
    loaded = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(loaded["model"][name], value) for name, value in weights.items())
    (optimizer,) = pool.run(load_as_fsdp, str(tmp_path / "out"), weights, world_size=1, init="gloo")
    for name, entries in state["state"].items():
        for key, value in entries.items():
            assert torch.equal(optimizer["state"][name][key], value)
    assert optimizer["param_groups"][0]["params"] == list(weights)
    meta = torch.load(tmp_path / "out" / "meta.pt", weights_only=True)
    assert (meta["global_step"], meta["lr_schedulers"]) == (9, [])


# --- bad input ----------------------------------------------------------------------------------------


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_runs_nothing_that_meta_brings_along(tmp_path: Path) -> None:
    fsdp_directory(tmp_path / "d")
    torch.save({"epoch": Payload(tmp_path / "executed")}, tmp_path / "d" / "meta.pt")
    with pytest.raises(CheckpointError, match=r"meta\.pt' .*weights_only=False"):
        storage.open_checkpoint(tmp_path / "d")
    assert not (tmp_path / "executed").exists()


def test_refuses_meta_that_is_no_dict_or_truncated(tmp_path: Path) -> None:
    fsdp_directory(tmp_path / "d")
    meta = tmp_path / "d" / "meta.pt"
    os.truncate(meta, meta.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"meta\.pt"):
        storage.open_checkpoint(tmp_path / "d")
    torch.save([1], meta)
    with pytest.raises(CheckpointError, match=r"meta\.pt' holds a list, expected a dict"):
        storage.open_checkpoint(tmp_path / "d")


def test_opens_without_meta_and_says_what_is_lost(
    pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "d"
    train(pool, 1, save=str(path), save_at=STEP, **MODEL_PARALLEL)
    (path / "meta.pt").unlink()
    checkpoint = storage.open_checkpoint(path)
    assert checkpoint.format == "dcp"
    assert "lacks Lightning's meta.pt" in caplog.text
    assert "model.embed.weight" in checkpoint.tensors


def test_refuses_weights_of_a_later_save_than_meta(tmp_path: Path) -> None:
    fsdp_directory(tmp_path / "d")
    start = time.time() - 5000
    os.utime(tmp_path / "d" / "meta.pt", (start, start))
    with pytest.raises(
        CheckpointError, match=r"files of two saves: .*\.metadata were written \d+ seconds after"
    ):
        storage.open_checkpoint(tmp_path / "d")


def test_names_are_needed_where_parameters_are_numbered(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(
        {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "a.ckpt"
    )
    source = storage.open_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(
        CheckpointError, match=r"optimizer 0 of '.*a\.ckpt' numbers its parameters.*parameter_names"
    ):
        LightningSharded().write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    LightningSharded().write(source, tmp_path / "out", parameter_names=[["weight", "bias"]])
    stored = storage.open_checkpoint(tmp_path / "out")
    assert torch.equal(stored.read("optim.0.state.bias.exp_avg"), optimizer.state[model.bias]["exp_avg"])


def test_refuses_unknown_strategies_and_options(tmp_path: Path) -> None:
    fsdp_directory(tmp_path / "d")
    source = storage.open_checkpoint(tmp_path / "d")
    with pytest.raises(CheckpointError, match="Lightning has no sharding strategy 'zero'"):
        LightningSharded().write(source, tmp_path / "out", strategy="zero")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="format 'lightning_sharded' has no option 'level'"):
        LightningSharded().write(source, tmp_path / "out", level=9)
    shutil.rmtree(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []

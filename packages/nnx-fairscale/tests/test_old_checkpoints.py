"""Checkpoints saved by fairscale itself resume under nnx's strategies, and damage is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import nnx
from jobs.fairscale_old_jobs import STEP, STEPS, error_of, evaluate, loss_of, losses_of, save_fsdp, save_oss
from nnx_checkpoint.cli.command import app
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.training import Net, Run

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"min_num_params": 100}
ON_TWO = Run(strategy="fairscale_fsdp", options=UNITS, steps=2)


@dataclass(frozen=True)
class Saved:
    """The files of fairscale's FSDP on two ranks, and the weights that it gathered itself."""

    folder: Path
    weights: dict[str, Tensor]


@pytest.fixture(scope="module", params=[True, False], ids=["flat", "each parameter by itself"])
def saved(
    pool: WorkerPool, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    folder = tmp_path_factory.mktemp("fairscale")
    return Saved(folder, pool.run(save_fsdp, str(folder), request.param, world_size=2)[0])


@pytest.fixture(scope="module")
def oss(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    path = tmp_path_factory.mktemp("oss") / "oss.ckpt"
    return path, pool.run(save_oss, str(path), world_size=2)[0]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", ["shards", "full.pt"])
def test_a_model_is_loaded_from_what_fairscale_saved(saved: Saved, name: str) -> None:
    module = nnx.load_from_checkpoint(Net, saved.folder / name, run=Run())
    found = module.state_dict()
    assert found.keys() == saved.weights.keys()
    assert [key for key, value in found.items() if not torch.equal(value, saved.weights[key])] == []


@pytest.mark.full
@pytest.mark.parametrize("saved", [True], indirect=True, ids=["flat"])
@pytest.mark.parametrize("name", ["shards", "full.pt"])
def test_trainer_evaluates_the_weights_and_says_that_they_cannot_resume(
    pool: WorkerPool, saved: Saved, name: str
) -> None:
    run = replace(ON_TWO, resume=str(saved.folder / name))
    expected = pool.run(loss_of, saved.weights, run, world_size=2)
    for rank, (loss, error) in enumerate(pool.run(evaluate, run, world_size=2)):
        assert loss == pytest.approx(expected[rank], abs=1e-6)
        assert "checkpoint contains only the model" in error


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("strategy", "devices"), [("fairscale_oss", 2), ("fairscale_sharded", 3), ("fairscale_fsdp", 2)]
)
def test_fit_resumes_what_lightning_saved_of_oss(
    pool: WorkerPool, oss: tuple[Path, list[float]], strategy: str, devices: int
) -> None:
    options: dict[str, Any] = UNITS if strategy == "fairscale_fsdp" else {}
    path, expected = oss
    run = Run(
        strategy=strategy, options=options, devices=devices, steps=STEPS, model="whole", resume=str(path)
    )
    assert pool.run(losses_of, run, world_size=devices)[0] == pytest.approx(expected[STEP:], abs=1e-6)


@pytest.mark.quick(every=6)
def test_inspect_shows_the_weights_under_their_names(saved: Saved) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(saved.folder / "shards")])
    print(shown.output)
    assert shown.exit_code == 0
    assert all(
        word in shown.output
        for word in ("format:               fairscale", "blocks.0.up", "weight  float32 31x10")
    )


def _cut(file: Path, held: Any) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def _text(file: Path, held: Any) -> None:
    file.write_text("it was here yesterday")


def _missing(file: Path, held: Any) -> None:
    file.unlink()


def _shorter(file: Path, held: Any) -> None:
    name = next(name for name in held["weights"] if name.startswith("blocks.0"))
    held["weights"][name] = held["weights"][name].flatten()[:3].clone()
    torch.save(held, file)


def _other_dtype(file: Path, held: Any) -> None:
    held["weights"] = {name: value.half() for name, value in held["weights"].items()}
    torch.save(held, file)


def _nothing_known(file: Path, held: Any) -> None:
    for unit in held["meta"]["param_metadata"]:
        unit["params"] = {name: {} for name in unit["params"]}
    torch.save(held, file)


def _not_a_list(file: Path, held: Any) -> None:
    held["meta"]["param_metadata"] = 3
    torch.save(held, file)


DAMAGE: list[tuple[Callable[[Path, Any], None], int, str]] = [
    (_cut, 0, "shards"),
    (_cut, 1, "model-shard1.pt"),
    (_text, 1, "model-shard1.pt"),
    (_missing, 0, "Make sure that the files of all ranks are there"),
    (_missing, 1, "Make sure that the files of all ranks are there"),
    (_shorter, 0, "shards"),
    (_shorter, 1, "shards"),
    (_other_dtype, 1, "model-shard1.pt"),
    (_nothing_known, 0, "shards"),
    (_nothing_known, 1, "shards"),
    (_not_a_list, 0, "shards"),
    (_not_a_list, 1, "shards"),
]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("damage", "rank", "named"), DAMAGE)
def test_damage_is_one_error_that_names_the_files(
    saved: Saved, tmp_path: Path, damage: Callable[[Path, Any], None], rank: int, named: str
) -> None:
    shards = copytree(saved.folder / "shards", tmp_path / "shards")
    file = shards / f"model-shard{rank}.pt"
    damage(file, torch.load(file, weights_only=True))
    with pytest.raises(CheckpointError) as caught:
        nnx.load_from_checkpoint(Net, shards, run=Run())
    assert named in str(caught.value)


@pytest.mark.quick(every=6)
def test_trainer_raises_it_on_every_rank(pool: WorkerPool, saved: Saved, tmp_path: Path) -> None:
    shards = copytree(saved.folder / "shards", tmp_path / "shards")
    _text(shards / "model-shard1.pt", None)
    for error in pool.run(error_of, replace(ON_TWO, resume=str(shards)), world_size=2):
        assert error.startswith("CheckpointError") and "model-shard1.pt" in error

"""What programs saved with fairscale itself trains on under nnx's strategies, and damage is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import nnx
from jobs.fairscale_old_jobs import STEP, STEPS, error_of, evaluate, loss_of, losses_of, save_fsdp, save_oss
from jobs.training import Net, Run
from nnx.checkpoint import open_checkpoint
from nnx.cli.ckpt import app
from nnx.errors import CheckpointError
from nnx.testing.pool import WorkerPool

pytest.importorskip("fairscale", reason="fairscale is not installed")

UNITS = {"min_num_params": 100}
ON_TWO = Run(strategy="fairscale_fsdp", options=UNITS, steps=2)


@dataclass(frozen=True)
class Saved:
    """What fairscale's FSDP saved on two ranks, and the weights that it gathered itself."""

    folder: Path
    weights: dict[str, Tensor]

    def copy(self, target: Path) -> list[Path]:
        """The files of all ranks, copied."""
        target.mkdir()
        sources = sorted((self.folder / "shards").iterdir())
        return [
            Path(target / source.name)
            for source in sources
            if (target / source.name).write_bytes(source.read_bytes())
        ]


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


@pytest.mark.parametrize("name", ["shards", "full.pt"])
def test_a_model_is_loaded_from_what_fairscale_saved(saved: Saved, name: str) -> None:
    module = nnx.load_from_checkpoint(Net, saved.folder / name, run=Run())
    found = module.state_dict()
    assert found.keys() == saved.weights.keys()
    assert [key for key, value in found.items() if not torch.equal(value, saved.weights[key])] == []


@pytest.mark.parametrize("name", ["shards", "full.pt"])
def test_trainer_evaluates_the_weights_and_says_that_they_cannot_resume(
    pool: WorkerPool, saved: Saved, name: str
) -> None:
    run = Run(strategy="fairscale_fsdp", options=UNITS, steps=2, resume=str(saved.folder / name))
    expected = pool.run(loss_of, saved.weights, run, world_size=2)
    for rank, (loss, error) in enumerate(pool.run(evaluate, run, world_size=2)):
        assert loss == pytest.approx(expected[rank], abs=1e-6)
        assert "checkpoint contains only the model" in error


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


def test_inspect_shows_the_weights_under_their_names(saved: Saved) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(saved.folder / "shards")])
    print(shown.output)
    assert shown.exit_code == 0
    assert all(
        word in shown.output
        for word in ("format:               fairscale", "blocks.0.up", "weight  float32 31x10")
    )

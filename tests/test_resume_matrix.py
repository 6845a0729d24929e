"""Any strategy at any world size resumes any other's checkpoint, exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from jobs.resume_jobs import Seen, run_cell
from jobs.training import Run
from nnx.testing.pool import WorkerPool

STEP, STEPS = 3, 5
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp_auto": {"strategy": "fsdp_auto", "options": {"min_num_params": 100}},
    "fsdp_manual": {"strategy": "fsdp_manual", "model": "wrapped"},
    "ddp": {"strategy": "ddp"},
}
CELLS = [(name, devices) for name in STRATEGIES for devices in (1, 2, 3)]
TRAINING = {"groups": 2, "steps": STEPS}


class Matrix:
    """Runs each saving cell once and keeps its checkpoint."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.saved = lru_cache(maxsize=None)(self._save)

    def _save(self, name: str, devices: int) -> tuple[Path, Seen]:
        path = self.folder / f"{name}-{devices}.ckpt"
        run = Run(devices=devices, save=str(path), save_at=STEP, **TRAINING, **STRATEGIES[name])
        return path, self.pool.run(run_cell, run, STEP, world_size=devices)[0]

    def resumed(self, path: Path, name: str, devices: int) -> list[Seen]:
        run = Run(devices=devices, resume=str(path), **TRAINING, **STRATEGIES[name])
        return self.pool.run(run_cell, run, STEP, world_size=devices)


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(pool, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("source", CELLS, ids=lambda cell: f"from-{cell[0]}-{cell[1]}")
def test_every_cell_resumes_exactly(matrix: Matrix, source: tuple[str, int]) -> None:
    path, saved = matrix.saved(*source)
    for target in CELLS:
        for seen in matrix.resumed(path, *target):
            assert seen.weights == saved.weights, f"weights differ in {target}"
            assert seen.optimizer == saved.optimizer, f"optimizer state differs in {target}"
            # The states are bit-equal; sums over another number of ranks round differently.
            assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5), target


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_optimizers_of_other_kinds_and_numbers_resume_too(
    pool: WorkerPool, tmp_path: Path, optimizer: str, optimizers: int
) -> None:
    path = tmp_path / "last.ckpt"
    step = STEP * optimizers
    base = Run(optimizer=optimizer, optimizers=optimizers, steps=STEPS, **STRATEGIES["fsdp_auto"])
    saved = pool.run(run_cell, replace(base, save=str(path), save_at=step), step, world_size=2)[0]
    resumed = pool.run(run_cell, replace(base, devices=3, resume=str(path)), step, world_size=3)
    for seen in resumed:
        assert (seen.weights, seen.optimizer) == (saved.weights, saved.optimizer)
        assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5)


def test_sharded_checkpoints_resume_like_deduped_ones(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    options = {"min_num_params": 100, "state_dict_type": "sharded"}
    base = Run(options=options, steps=STEPS, groups=2)
    saved = pool.run(run_cell, replace(base, save=str(path), save_at=STEP), STEP, world_size=2)[0]
    for devices in (1, 2, 3):
        resumed = pool.run(
            run_cell, replace(base, devices=devices, resume=str(path)), STEP, world_size=devices
        )
        assert {(seen.weights, seen.optimizer) for seen in resumed} == {(saved.weights, saved.optimizer)}

"""Any strategy at any world size resumes any other's checkpoint, exactly.

With NNX_MATRIX=full each of the 22 saving cells is resumed by all 22. By default each is resumed by its own
strategy at every world size, and by every other strategy at one that goes round, so that every pair
of strategies meets at every world size on either side.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import nnx.checkpoint
from jobs.resume_jobs import Seen, run_cell
from jobs.training import Run
from nnx.testing.pool import WorkerPool

STEP, STEPS = 2, 3
FSDP = {"min_num_params": 100}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp_auto": {"strategy": "fsdp_auto", "options": FSDP},
    "fsdp_manual": {"strategy": "fsdp_manual", "model": "wrapped"},
    "fsdp_offload": {"strategy": "fsdp_offload", "options": FSDP},
    "fsdp_hybrid": {"strategy": "fsdp_hybrid", "options": {**FSDP, "replicate_size": 2}},
    # Under plain ddp, one step of several optimizers leaves parameters unused.
    "ddp": {"strategy": "ddp_find_unused_parameters_true"},
    "model_parallel": {"strategy": "model_parallel", "model": "parallelized"},
}
Cell = tuple[str, int]


def sizes_of(strategy: str) -> tuple[int, ...]:
    """World sizes at which a strategy runs; hybrid sharding needs pairs."""
    return (2, 4) if strategy == "fsdp_hybrid" else (1, 2, 3, 4)


CELLS: list[Cell] = [(name, devices) for name in STRATEGIES for devices in sizes_of(name)]


def targets_of(source: Cell) -> list[Cell]:
    """The cells that resume a source's checkpoint."""
    if os.environ.get("NNX_MATRIX") == "full":
        return CELLS
    strategy, devices = source
    targets = [(strategy, size) for size in sizes_of(strategy)]
    names = list(STRATEGIES)
    for name in names:
        turn = sizes_of(strategy).index(devices) + names.index(strategy) + names.index(name)
        if name != strategy:
            targets.append((name, sizes_of(name)[turn % len(sizes_of(name))]))
    return targets


def optimizers_of(source: Cell, target: Cell) -> int:
    """AdamW in two groups, SGD with momentum and Adafactor, which Lightning's own strategy cannot step."""
    return 2 if "model_parallel" in (source[0], target[0]) else 3


class Matrix:
    """Runs each saving cell once and keeps its checkpoint."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.saved = lru_cache(maxsize=None)(self._save)
        self.converted = lru_cache(maxsize=None)(self._convert)

    def _run(self, cell: Cell, optimizers: int, **more: Any) -> Run:
        name, devices = cell
        return Run(
            devices=devices, steps=STEPS, optimizer="mixed", optimizers=optimizers, **STRATEGIES[name], **more
        )

    def _save(self, cell: Cell, optimizers: int) -> tuple[Path, Seen]:
        path = self.folder / f"{cell[0]}-{cell[1]}-{optimizers}.ckpt"
        step = STEP * optimizers
        run = self._run(cell, optimizers, save=str(path), save_at=step)
        return path, self.pool.run(run_cell, run, step, world_size=cell[1])[0]

    def _convert(self, cell: Cell, optimizers: int) -> Path:
        """Lightning's ModelParallelStrategy reads nothing but its own directories."""
        path, _ = self.saved(cell, optimizers)
        converted = path.with_suffix(".sharded")
        nnx.checkpoint.convert(path, converted, to="lightning_sharded")
        return converted

    def resumed(self, source: Cell, target: Cell) -> list[Seen]:
        """Resume a source's checkpoint under another strategy or world size."""
        optimizers = optimizers_of(source, target)
        foreign = target[0] == "model_parallel" != source[0]
        path = self.converted(source, optimizers) if foreign else self.saved(source, optimizers)[0]
        run = self._run(target, optimizers, resume=str(path))
        return self.pool.run(run_cell, run, STEP * optimizers, world_size=target[1])


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(pool, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("source", CELLS, ids=lambda cell: f"from-{cell[0]}-{cell[1]}")
def test_every_cell_resumes_exactly(matrix: Matrix, source: Cell) -> None:
    for target in targets_of(source):
        _, saved = matrix.saved(source, optimizers_of(source, target))
        for seen in matrix.resumed(source, target):
            assert seen.weights == saved.weights, f"weights differ in {target}"
            assert seen.optimizer == saved.optimizer, f"optimizer state differs in {target}"
            # The states are bit-equal; sums over another number of ranks round differently.
            assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5), target


def test_every_two_strategies_meet_at_every_world_size() -> None:
    meetings = {(source, target) for source in CELLS for target in targets_of(source)}
    for one in STRATEGIES:
        for other in STRATEGIES:
            saved_at = {s[1] for s, t in meetings if (s[0], t[0]) == (one, other)}
            resumed_at = {t[1] for s, t in meetings if (s[0], t[0]) == (one, other)}
            assert saved_at == set(sizes_of(one))
            assert len(resumed_at) >= min(len(sizes_of(one)), len(sizes_of(other)))


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

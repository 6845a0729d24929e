"""Every ZeRO stage resumes what any other strategy saved, and the other way round, bit for bit.

What a run saves when it has resumed, before its first step, is what the other run saved.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from jobs.engine_resume_jobs import run_and_save, tensors_of
from jobs.training import Run
from nnx.testing.pool import WorkerPool

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

STEP, STEPS = 2, 4
PARTS = {"persistence_threshold": 0}
STAGES = {
    "nnx_deepspeed_1": {},
    "nnx_deepspeed_2": {},
    "nnx_deepspeed_3": PARTS,
    "nnx_deepspeed_3_cpu": {"persistence_threshold": 50},
}
OTHERS = {"fsdp_auto": {"min_num_params": 100}, "ddp": {}}
Cell = tuple[str, int]
CELLS = [(name, devices) for name in STAGES for devices in (1, 2)]


class Saved:
    """Saves each cell once, with AdamW in two groups."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._resumed = itertools.count()
        self.by = lru_cache(maxsize=None)(self._save)

    def _run(self, cell: Cell, **more: str) -> Run:
        options = {**STAGES, **OTHERS}[cell[0]]
        return Run(strategy=cell[0], options=options, devices=cell[1], steps=STEPS, groups=2, **more)

    def _save(self, cell: Cell) -> tuple[Path, list[float]]:
        path = self._folder / f"{cell[0]}-{cell[1]}.ckpt"
        losses = self._pool.run(run_and_save, self._run(cell), STEP, str(path), world_size=cell[1])
        return path, losses[0].losses

    def resumed(self, source: Cell, target: Cell) -> tuple[Path, list[float]]:
        """What a target saves that has resumed what the source saved, and its losses."""
        path = self._folder / f"resumed-{next(self._resumed)}.ckpt"
        run = self._run(target, resume=str(self.by(source)[0]))
        losses = self._pool.run(run_and_save, run, STEP, str(path), world_size=target[1])
        return path, losses[0].losses


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool, tmp_path_factory.mktemp("deepspeed"))


def pairs() -> list[tuple[Cell, Cell]]:
    """Every stage meets every other stage and world size in turn, and the other strategies both ways."""
    turned = [(CELLS[i], CELLS[(i + step) % len(CELLS)]) for step in (1, 3, 5) for i in range(len(CELLS))]
    others = [(cell, (name, 3 - cell[1])) for name in OTHERS for cell in CELLS]
    back = [((name, cell[1]), cell) for name in OTHERS for cell in CELLS]
    return turned + others + back


@pytest.mark.parametrize(("source", "target"), pairs(), ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_a_stage_resumes_exactly_what_was_saved(saved: Saved, source: Cell, target: Cell) -> None:
    path, losses = saved.by(source)
    expected = tensors_of(path)
    again, after = saved.resumed(source, target)
    found = tensors_of(again)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert any("exp_avg_sq" in name for name in found)
    assert after == pytest.approx(losses[STEP:], abs=1e-5)

"""Every fairscale strategy resumes what another one saved at another world size, bit for bit, and back.

What a run saves when it has resumed, before its first step, is what the other run saved.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.engine_resume_jobs import run_and_save, tensors_of
from jobs.training import Run
from nnx.testing.pool import WorkerPool

pytest.importorskip("fairscale", reason="fairscale is not installed")

STEP, STEPS = 2, 4
UNITS = {"min_num_params": 100}
OPTIONS: dict[str, dict[str, Any]] = {
    "fairscale_fsdp": UNITS,
    "fairscale_oss": {},
    "fairscale_sharded": {},
    "fsdp_auto": UNITS,
    "ddp": {},
}
Cell = tuple[str, int]
PAIRS: list[tuple[Cell, Cell]] = [
    (("fairscale_fsdp", 2), ("fairscale_fsdp", 3)),
    (("fairscale_fsdp", 2), ("fsdp_auto", 3)),
    (("fairscale_fsdp", 2), ("fairscale_sharded", 1)),
    (("fairscale_oss", 3), ("fairscale_fsdp", 1)),
    (("fairscale_oss", 3), ("fsdp_auto", 2)),
    (("fairscale_sharded", 2), ("fairscale_oss", 3)),
    (("fairscale_sharded", 2), ("ddp", 1)),
    (("fsdp_auto", 2), ("fairscale_fsdp", 3)),
    (("fsdp_auto", 2), ("fairscale_oss", 2)),
    (("ddp", 2), ("fairscale_sharded", 3)),
]


class Saved:
    """Saves each cell once, with AdamW in two groups."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._resumed = itertools.count()
        self.by = lru_cache(maxsize=None)(self._save)

    def _run(self, cell: Cell, **more: str) -> Run:
        return Run(strategy=cell[0], options=OPTIONS[cell[0]], devices=cell[1], steps=STEPS, groups=2, **more)

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
    return Saved(pool, tmp_path_factory.mktemp("fairscale"))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_a_strategy_resumes_exactly_what_was_saved(saved: Saved, source: Cell, target: Cell) -> None:
    path, losses = saved.by(source)
    expected = tensors_of(path)
    again, after = saved.resumed(source, target)
    found = tensors_of(again)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert any("exp_avg_sq" in name for name in found)
    assert after == pytest.approx(losses[STEP:], abs=1e-5)

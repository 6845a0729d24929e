"""Checkpoints of any tiers and world size resume under any other, under `fsdp_auto` and under plain `ddp`.

The runs use 16-mixed on simulated devices whose copies take random times. A few targets, in rotation, resume
each source; in the cases marked `full`, all targets do.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from jobs.colossalai_resume_jobs import Exact, run_cell
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.training import Run

Cell = tuple[str, int]

STEP, STEPS = 3, 4
SCALE = {"initial_scale": 2.0**8, "growth_interval": 2, "hysteresis": 3}
MIXES: dict[str, dict[str, Any]] = {
    "gathered": {"placement_policy": "gathered"},
    "sharded": {"placement_policy": "sharded", "overlap": "none"},
    "offloaded": {"placement_policy": "offloaded"},
    "streamed": {"placement_policy": "streamed"},
    "fractions": {"offload_fraction": 0.7, "stream_fraction": 0.3, "overlap": "none"},
    "layers": {
        "tiers": {"blocks.0": "streamed", "blocks.1": "gathered", "blocks.2": "offloaded", "": "sharded"}
    },
}
SIZES = (1, 2, 4)
OURS: list[Cell] = [(mix, size) for mix in MIXES for size in SIZES]
OTHERS: list[Cell] = [(name, size) for name in ("fsdp_auto", "ddp") for size in (1, 2)]
CELLS = OURS + OTHERS


def targets_of(source: Cell) -> list[Cell]:
    """Return the few cells that resume a source's checkpoint."""
    turn = CELLS.index(source)
    if source in OTHERS:
        return [OURS[(4 * turn) % len(OURS)], OURS[(4 * turn + 7) % len(OURS)]]
    return [OURS[(turn + 4) % len(OURS)], OTHERS[turn % len(OTHERS)]]


class Matrix:
    """Runs each source once and keeps its checkpoint."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.saved = lru_cache(maxsize=None)(self._save)

    def _run(self, cell: Cell, **more: Any) -> list[Exact]:
        name, devices = cell
        ours = name in MIXES
        options = {**MIXES[name], **SCALE} if ours else {}
        if name != "ddp":
            options["min_num_params"] = 100
        strategy = "colossalai" if ours else "ddp_find_unused_parameters_true" if name == "ddp" else name
        run = Run(strategy, options, devices, steps=STEPS, groups=2, precision="16-mixed", **more)
        seed = CELLS.index(cell) if ours else None
        return self.pool.run(run_cell, run, STEP, seed, world_size=devices)

    def _save(self, cell: Cell) -> tuple[Path, Exact]:
        path = self.folder / f"{cell[0]}-{cell[1]}.ckpt"
        ranks = self._run(cell, save=str(path), save_at=STEP)
        assert len({(seen.weights, seen.optimizer) for seen in ranks}) == 1
        return path, ranks[0]

    def resumed(self, source: Cell, target: Cell) -> list[Exact]:
        """Return the state that each rank of the target reads from a source's checkpoint."""
        return self._run(target, resume=str(self.saved(source)[0]))


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(pool, tmp_path_factory.mktemp("tiers"))


@pytest.mark.quick(every=26)
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        *(pytest.param(cell, targets_of(cell), id=f"from-{cell[0]}-{cell[1]}") for cell in CELLS),
        *(
            pytest.param(cell, CELLS, id=f"from-{cell[0]}-{cell[1]}-to-all", marks=pytest.mark.full)
            for cell in CELLS
        ),
    ],
)
def test_masters_moments_steps_and_loss_scale_resume_to_the_bit(
    matrix: Matrix, source: Cell, targets: list[Cell]
) -> None:
    _, saved = matrix.saved(source)
    for target in targets:
        common = saved.scaler.keys()
        if (source in OURS) != (target in OURS):
            common &= {"scale", "_growth_tracker"}  # what torch's scaler and the historical one both have
        for seen in matrix.resumed(source, target):
            assert seen.weights == saved.weights, f"masters differ in {target}"
            assert seen.optimizer == saved.optimizer, f"moments or steps differ in {target}"
            for key in common:
                assert seen.scaler[key] == saved.scaler[key], f"the loss scale's {key} differs in {target}"
            after = saved.losses[STEP:]
            exact = source[1] == target[1] and source in OURS and target in OURS
            assert seen.losses == (after if exact else pytest.approx(after, rel=1e-2)), target


def test_every_mix_meets_the_other_strategies_and_every_world_size_is_left_and_entered() -> None:
    meetings = {(source, target) for source in CELLS for target in targets_of(source)}
    assert {(source[0], target[0]) for source, target in meetings} >= {
        (mix, other) for mix in MIXES for other in ("fsdp_auto", "ddp")
    }
    assert {target for _, target in meetings} >= set(OURS)
    assert {(source[1], target[1]) for source, target in meetings} >= {
        (one, other) for one in SIZES for other in SIZES if one != other
    }


@pytest.mark.full
def test_the_scale_that_was_saved_is_not_the_one_a_run_begins_with(matrix: Matrix) -> None:
    _, saved = matrix.saved(("layers", 2))
    assert saved.scaler["scale"] == 2.0**9
    assert saved.scaler["_growth_tracker"] == 1

"""FSDP's own strategies resume one another's checkpoints exactly, in a ring, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.resume_jobs import Seen, run_cell
from nnx_test_helpers.training import Run

STEP, STEPS = 1, 2
UNITS = {"min_num_params": 100}
SIBLINGS: dict[str, dict[str, Any]] = {
    "fsdp_auto": {"options": UNITS},
    "fsdp_hybrid": {"options": {**UNITS, "replicate_size": 2}},
    "fsdp_manual": {"model": "wrapped"},
    "fsdp_offload": {"options": UNITS},
}
Saved = tuple[str, Seen]
Saves = Callable[[str], Saved]
RING = list(zip(SIBLINGS, [*list(SIBLINGS)[1:], next(iter(SIBLINGS))], strict=True))


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The checkpoints of each strategy, with AdamW in two groups on two ranks, saved once."""
    folder: Path = tmp_path_factory.mktemp("siblings")

    @cache
    def save(strategy: str) -> Saved:
        path = str(folder / f"{strategy}.ckpt")
        return path, pool.run(run_cell, run_of(strategy, 2, save=path, save_at=STEP), STEP, world_size=2)[0]

    return save


def run_of(strategy: str, devices: int, **more: Any) -> Run:
    return Run(strategy=strategy, devices=devices, steps=STEPS, groups=2, **SIBLINGS[strategy], **more)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("source", "target"), [*RING, *(turn[::-1] for turn in RING)])
def test_siblings_resume_exactly_what_the_next_one_saved(
    pool: WorkerPool, saved: Saves, source: str, target: str
) -> None:
    path, expected = saved(source)
    devices = 2 if target == "fsdp_hybrid" else 3  # hybrid sharding needs pairs
    seen = pool.run(run_cell, run_of(target, devices, resume=path), STEP, world_size=devices)[0]
    assert seen.weights == expected.weights
    assert seen.optimizer == expected.optimizer
    assert seen.losses == pytest.approx(expected.losses[STEP:], abs=1e-5)

"""Lite with the plugins' strategies: losses of the plain loop, and checkpoints shared with Trainer."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from jobs import lite_jobs as jobs
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.resume_jobs import Seen

PACKAGES = {"fsdp_auto": "nnx_fsdp", "nnscaler": "nnx_nnscaler", "colossalai": "nnx_colossalai"}
STRATEGIES = ["ddp", *PACKAGES]
STEPS = 2
SIZES = (1, 2, 3)
OTHERS = [(one, other) for one in STRATEGIES for other in STRATEGIES]


def needed(*strategies: str) -> None:
    for strategy in strategies:
        if strategy in PACKAGES:
            pytest.importorskip(PACKAGES[strategy])


class Runs:
    """Saves once under each strategy, by Lite and by Trainer, on two processes."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.saved = lru_cache(maxsize=None)(self._save)
        self.plain = jobs.plain(2 * STEPS)

    def _save(self, by: str, strategy: str) -> tuple[str, Seen]:
        path = str(self.folder / f"{by}-{strategy}.ckpt")
        seen = self.pool.run(getattr(jobs, by), strategy, 2, STEPS, path, world_size=2)
        for each in seen:
            assert each.losses == pytest.approx(self.plain[:STEPS], abs=1e-6)
        return path, seen[0]

    def resumed(self, by: str, strategy: str, devices: int, path: str) -> list[Seen]:
        return self.pool.run(getattr(jobs, by), strategy, devices, STEPS, None, path, world_size=devices)


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("lite"))


def check(runs: Runs, saved_by: str, source: str, resumed_by: str, target: str, devices: int) -> None:
    """Check that the saved state is restored bitwise, and that the losses continue the plain loop's."""
    path, saved = runs.saved(saved_by, source)
    for seen in runs.resumed(resumed_by, target, devices, path):
        assert seen.weights == saved.weights
        assert seen.optimizer == saved.optimizer
        assert seen.losses == pytest.approx(runs.plain[STEPS:], abs=1e-6)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize(("source", "target"), OTHERS)
def test_lite_resumes_lite_under_another_strategy_and_world_size(
    runs: Runs, source: str, target: str
) -> None:
    needed(source, target)
    turn = STRATEGIES.index(source) + STRATEGIES.index(target)
    check(runs, "lite", source, "lite", target, SIZES[turn % 3])


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("source", STRATEGIES)
def test_trainer_resumes_what_lite_saved(runs: Runs, source: str) -> None:
    target = STRATEGIES[(STRATEGIES.index(source) + 1) % len(STRATEGIES)]
    needed(source, target)
    check(runs, "lite", source, "trainer", target, 3)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("source", STRATEGIES)
def test_lite_resumes_what_trainer_saved(runs: Runs, source: str) -> None:
    target = STRATEGIES[(STRATEGIES.index(source) + 3) % len(STRATEGIES)]
    needed(source, target)
    check(runs, "trainer", source, "lite", target, 3)

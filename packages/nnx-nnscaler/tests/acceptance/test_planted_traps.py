"""Models that tracing silently gets wrong elsewhere train right here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.nnscaler_defect_jobs import Strategy
from jobs.nnscaler_planted_jobs import PLANTED, train_planted
from nnx_conformance.pool import WorkerPool

STRATEGIES: dict[str, Strategy] = {
    "tp": ("nnscaler_tp", {}),
    "data": ("nnscaler", {"policy": "data"}),
    "zero": ("nnscaler_zero", {}),
}


def trained(
    pool: WorkerPool, policy: str, model: str, tmp_path: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the reports of one process and of each of two ranks."""
    name, options = STRATEGIES[policy]
    strategy = (name, {**options, "gen_savedir": str(tmp_path)})
    (expected,) = pool.run(train_planted, ("auto", {}), 1, model, world_size=1)
    return expected, pool.run(train_planted, strategy, 2, model, world_size=2)


@pytest.mark.quick(every=24)
@pytest.mark.parametrize("policy", STRATEGIES)
@pytest.mark.parametrize("model", PLANTED)
def test_it_trains_and_evaluates_as_one_process_does(
    pool: WorkerPool, tmp_path: Path, model: str, policy: str
) -> None:
    expected, found = trained(pool, policy, model, tmp_path)
    assert len(set(expected["losses"])) == 4
    for seen in found:
        assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert seen["validated"] == pytest.approx(expected["validated"], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("policy", STRATEGIES)
def test_hooks_are_called_as_often_as_in_one_process(pool: WorkerPool, tmp_path: Path, policy: str) -> None:
    expected, found = trained(pool, policy, "Hooked", tmp_path)
    assert expected["calls"] == 6  # four steps, two batches of validation
    assert [seen["calls"] for seen in found] == [6, 6]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("policy", STRATEGIES)
def test_what_is_checkpointed_is_recomputed(pool: WorkerPool, tmp_path: Path, policy: str) -> None:
    expected, found = trained(pool, policy, "Checkpointed", tmp_path)
    assert expected["calls"] == 10
    programs = "".join(path.read_text() for path in tmp_path.rglob("forward.py"))
    for seen in found:
        # Either the user's own function runs, twice in each step, or the program itself recomputes it.
        assert seen["calls"] == 10 or "checkpoint(" in programs

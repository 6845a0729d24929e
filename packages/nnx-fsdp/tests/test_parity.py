"""Losses of the FSDP strategies equal those of one process on the same global batches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.training import Outcome, Run, train

BLOCKS = {"min_num_params": 100}
"""Small enough that the three blocks of the test model become units."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation of 2": {"accumulate": 2, "steps": 5},
    "clipping by norm": {"clip": 0.05},
    "clipping by value": {"clip": 0.01, "clip_algorithm": "value"},
    "two parameter groups": {"groups": 2},
    "two optimizers": {"optimizers": 2, "clip": 0.1},
    "a scheduler": {"scheduler": True},
    "AdamW, SGD with momentum and Adafactor": {"optimizer": "mixed", "optimizers": 3},
    "everything": {"accumulate": 2, "steps": 5, "clip": 0.05, "groups": 2},
}


@cache
def _one_process(run: Run) -> Outcome:
    return train(run)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Any:
    """Runs a description on one plain process, once."""
    results: dict[str, Outcome] = {}

    def run(description: Run) -> Outcome:
        key = repr(description)
        if key not in results:
            results[key] = pool.run(train, description, world_size=1)[0]
        return results[key]

    return run


@pytest.mark.quick(every=24)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_fsdp_auto_equals_one_process(pool: WorkerPool, alone: Any, case: str, devices: int) -> None:
    run = Run(options=BLOCKS, devices=devices, **CASES[case])
    expected = alone(replace(run, strategy="auto", options={}, devices=1))
    for outcome in pool.run(train, run, world_size=devices):
        assert len(outcome.losses) == run.steps * run.accumulate
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
        for name, value in expected.weights.items():
            torch.testing.assert_close(outcome.weights[name], value, atol=1e-4, rtol=1e-4)

"""Programs are those of the modes that a step computes in, and none is compiled in vain."""

from __future__ import annotations

import pytest

from jobs.nnscaler_modes_jobs import trained_and_validated
from nnx_conformance.pool import WorkerPool


@pytest.mark.parametrize(("precision", "asked"), [("bf16-mixed", True), ("32-true", False)])
def test_training_and_evaluation_have_one_program_each(pool: WorkerPool, precision: str, asked: bool) -> None:
    for found in pool.run(trained_and_validated, "nnscaler_tp", precision, world_size=2):
        assert found["modes"] == [True, False]
        assert found["contexts"] == [asked, asked]
        assert found["causes"] == []
        assert found["off"] < (2e-2 if asked else 1e-6)

"""Programs match the modes of a step's computation, and none is compiled in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.nnscaler_modes_jobs import losses_of_reading, trained_and_validated
from nnx_conformance.pool import WorkerPool


@pytest.mark.full
@pytest.mark.parametrize(("precision", "asked"), [("bf16-mixed", True), ("32-true", False)])
def test_training_and_evaluation_have_one_program_each(pool: WorkerPool, precision: str, asked: bool) -> None:
    for found in pool.run(trained_and_validated, "nnscaler_tp", precision, world_size=2):
        assert found["modes"] == [True, False]
        assert found["contexts"] == [asked, asked]
        assert found["causes"] == []
        assert found["off"] < (2e-2 if asked else 1e-6)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("place", ["hparams", "dict", "object", "tensor", "function", "global", "trainer"])
def test_what_a_forward_reads_is_read_in_each_step_and_each_run(
    pool: WorkerPool, place: str, tmp_path: Path
) -> None:
    (alone,) = pool.run(losses_of_reading, "auto", place, 1.0, str(tmp_path), world_size=1)
    first = alone[0]
    assert alone == pytest.approx([first, 4 * first, 9 * first], rel=1e-5)
    for factor in (1.0, 5.0):  # the second finds the programs of the first
        expected = [first * (factor + step) ** 2 for step in range(3)]
        for losses in pool.run(losses_of_reading, "nnscaler_tp", place, factor, str(tmp_path), world_size=2):
            assert losses == pytest.approx(expected, rel=1e-5)

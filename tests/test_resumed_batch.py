"""A run that resumes with another global batch size than its checkpoint's logs this once."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.resumed_batch_jobs import warnings_of_resumed_runs
from nnx_conformance.pool import WorkerPool
from nnx_core.lightning.beginning import another_batch


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param("fsdp_auto", "nnscaler_dp", (16, 32, 32), marks=pytest.mark.full),
        ("ddp", "nnscaler_tp", (8, 16, 16)),
        pytest.param("nnscaler_tp", "ddp", (16, 32, 32), marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_warns_of_another_global_batch(
    pool: WorkerPool, tmp_path: Path, first: str, second: str, expected: tuple[int, ...]
) -> None:
    runs = pool.run(warnings_of_resumed_runs, first, second, str(tmp_path / "last.ckpt"), world_size=2)
    before = 8 if first == "nnscaler_tp" else 16
    for now, on_rank_zero, on_rank_one in zip(expected, *runs, strict=True):
        assert on_rank_one == []
        assert len(on_rank_zero) == (now != before)
        for warning in on_rank_zero:
            assert f"trained with a global batch of {before}, this run has {now}" in warning


def test_the_warning_names_what_keeps_the_old_batch() -> None:
    def said(before: int, size: int, **more: int) -> str:
        numbers = {"ranks": 2, "shares": 1, "accumulate": 1, **more}
        return another_batch(before, size, own_batch="plan_ngpus=1", **numbers)

    assert said(16, 8).endswith("16, this run has 8; plan_ngpus=1 or batch_size=16 keeps 16.")
    assert said(32, 8, shares=2).endswith("; batch_size=16 or accumulate_grad_batches=2 keeps 32.")
    assert said(7, 8, shares=2).endswith("of 7, this run has 16.")
    assert said(16, 8, shares=2) == ""

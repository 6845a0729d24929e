"""Every precision string of Lightning that a CPU supports, and loss scaling over several ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint as storage
from jobs.precision_jobs import START, scaled, scaled_in_fabric, with_precision
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.training import Run

# For each: the dtypes of input, hidden activations and weights while training, and how closely losses agree.
PRECISIONS: dict[str, tuple[str, str, str, float]] = {
    "32-true": ("float32", "float32", "float32", 1e-6),
    "64-true": ("float64", "float64", "float64", 1e-13),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16", 3e-2),
    "bf16-mixed": ("bfloat16", "bfloat16", "float32", 1e-3),
    "16-true": ("float16", "float16", "float16", 5e-3),
}


@pytest.fixture(scope="module")
def exact(pool: WorkerPool) -> dict[str, Any]:
    """The reference of all runs: one process in double precision."""
    return _run(pool, "64-true", 1)[0]


def _run(pool: WorkerPool, precision: str, devices: int) -> list[dict[str, Any]]:
    strategy: dict[str, Any] = (
        {"strategy": "auto"} if devices == 1 else {"strategy": "fsdp_auto", "options": OPTIONS}
    )
    run = Run(
        devices=devices, precision=precision, steps=4, validate_every=4, optimizer="sgd", clip=1.0, **strategy
    )
    return pool.run(with_precision, run, world_size=devices)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_computes_what_one_process_computes_in_the_same_dtypes(
    pool: WorkerPool, exact: dict[str, Any], precision: str
) -> None:
    _, hidden, weight, tolerance = PRECISIONS[precision]
    expected = _run(pool, precision, 1)[0]
    for report in _run(pool, precision, 2):
        assert report["dtypes"] == expected["dtypes"]
        assert report["dtypes"]["hidden"] == f"torch.{hidden}"
        assert report["dtypes"]["weight"] == f"torch.{weight}"
        assert report["stored"] == expected["stored"] == {f"torch.{weight}"}
        assert report["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)
        assert report["val"] == pytest.approx(expected["val"], rel=tolerance, abs=tolerance)
        for name, value in report["weights"].items():
            limit = max(10 * tolerance, 1e-12)
            torch.testing.assert_close(value, expected["weights"][name], atol=limit, rtol=limit)
    difference = abs(expected["losses"][0] - exact["losses"][0])
    rounds = {"32-true": 1e-6, "64-true": 0.0}.get(precision, 1e-1)
    assert difference <= rounds
    assert difference > 0 or precision == "64-true"


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("where", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(
    pool: WorkerPool, where: int
) -> None:
    reports = pool.run(scaled, 2, "fsdp_auto", (2, where), world_size=2)
    for report in reports:
        assert report["scaler"] == "ParallelGradScaler"
        assert report["scales"] == [START, START, START, START / 2, START / 2, START / 2]
        assert report["digests"][2] == report["digests"][1]
        assert len(set(report["digests"])) == 4
        assert report["digests"] == reports[0]["digests"]
        assert all(math.isfinite(loss) for loss in report["losses"])


def test_scaled_training_equals_one_process(pool: WorkerPool) -> None:
    expected = pool.run(scaled, 1, "auto", (2, 0), world_size=1)[0]
    assert expected["scales"][3] == START / 2
    for report in pool.run(scaled, 3, "fsdp_auto", (2, 1), world_size=3):
        assert report["scales"] == expected["scales"]
        assert report["losses"] == pytest.approx(expected["losses"], rel=5e-3)


@pytest.mark.full
@pytest.mark.parametrize("start", [2.0**4, 2.0**14])
def test_gradients_are_clipped_after_they_were_unscaled(pool: WorkerPool, start: float) -> None:
    expected = pool.run(scaled, 1, "auto", (-1, -1), 0.05, START, world_size=1)[0]
    for report in pool.run(scaled, 2, "fsdp_auto", (-1, -1), 0.05, start, world_size=2):
        assert report["norms"] == pytest.approx([0.05] * 5, rel=1e-3)
        assert report["losses"] == pytest.approx(expected["losses"], rel=5e-3)


@pytest.mark.full
def test_the_scalers_state_is_saved_and_restored(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "scaled.ckpt")
    clean: tuple[int, int] = (-1, -1)
    pool.run(scaled, 2, "fsdp_auto", (1, 0), None, START, path, None, 3, world_size=2)
    state = storage.open_checkpoint(path).objects["trainer"]["MixedPrecision"]
    assert (state["scale"], state["_growth_tracker"]) == (START / 2, 1)
    for report in pool.run(scaled, 3, "fsdp_auto", clean, None, 4.0, None, path, 5, world_size=3):
        assert report["scales"] == [START / 2] * 3


@pytest.mark.full
def test_fabric_skips_the_step_on_all_ranks_too(pool: WorkerPool) -> None:
    reports = pool.run(scaled_in_fabric, 2, world_size=2)
    for report in reports:
        assert report["digests"][1] == report["digests"][0] != report["digests"][2]
        assert report["digests"] == reports[0]["digests"]
        assert report["scale"] == START / 2
        assert math.isnan(report["norms"][1]) and 0.1 < report["norms"][0] < 10

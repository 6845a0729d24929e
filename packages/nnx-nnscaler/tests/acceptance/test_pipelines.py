"""Every schedule of a pipeline has the losses of one process, in every shape of a world.

By default some combinations are tried, in turns (see `turns`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jobs.nnscaler_models import Case, losses_of
from jobs.nnscaler_pipeline_jobs import (
    auxiliary_loss,
    held_microbatches,
    planned_losses_with,
    second_backward,
    stored_and_predicted,
    unequal_batches,
)
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.options import SCHEDULES

SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp2": ("nnscaler_pp", 2, {}),
    "pp4": ("nnscaler_pp", 4, {}),
    "pp2 x dp2": ("nnscaler_pp", 4, {"plan_ngpus": 2}),
    "pp2 x zero2": ("nnscaler_pp", 4, {"plan_ngpus": 2, "use_zero": True}),
    "pp2 x tp2": ("nnscaler_hybrid", 4, {}),
}
MODELS = ("gpt_with_loss", "gpt2", "llama", "t5", "unet")
STEPS = 6


@pytest.fixture(scope="module")
def of_one_process(pool: WorkerPool) -> Any:
    @cache
    def losses(model: str) -> tuple[list[float], list[float]]:
        return pool.run(losses_of, Case(model, steps=STEPS, clip=0.5), world_size=1)[0]

    return losses


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_has_the_losses_of_one_process(
    pool: WorkerPool, of_one_process: Any, tmp_path: Path, schedule: str, shape: str, model: str
) -> None:
    strategy, devices, options = SHAPES[shape]
    options = {**options, "pipeline_scheduler": schedule, "gen_savedir": str(tmp_path)}
    case = Case(model, strategy, options, devices, STEPS, clip=0.5)
    expected = of_one_process(model)
    for losses, validated in pool.run(losses_of, case, world_size=devices):
        assert losses == pytest.approx(expected[0], abs=1e-5, rel=0)
        assert validated == pytest.approx(expected[1], abs=1e-5, rel=0)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("zero_bubble", 2), ("interleaved", 6)])
def test_the_microbatches_that_a_rank_holds_do_not_grow_with_their_number(
    pool: WorkerPool, tmp_path: Path, schedule: str, most: int
) -> None:
    for microbatches in (4, 8, 16):
        held = pool.run(held_microbatches, str(tmp_path), schedule, microbatches, world_size=2)
        assert max(held) <= most


@pytest.mark.parametrize(
    ("shape", "precision", "more"),
    [
        ("pp2", "32-true", {"pipeline_nstages": 4}),
        ("pp2", "bf16-true", {"fp32_masters": True}),
        ("pp2 x zero2", "32-true", {}),
        ("pp2 x tp2", "32-true", {}),
    ],
)
def test_parameters_gradients_and_optimizer_state_take_the_bytes_that_were_predicted(
    pool: WorkerPool, tmp_path: Path, shape: str, precision: str, more: dict[str, Any]
) -> None:
    strategy, devices, options = SHAPES[shape]
    options = {**options, **more}
    case = str(tmp_path), strategy, devices, precision, options
    for counted, predicted in pool.run(stored_and_predicted, *case, world_size=devices):
        assert counted == predicted > 0


def test_last_batches_and_other_sizes_train_as_in_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(unequal_batches, "", "", world_size=1)[0]
    for schedule in ("gpipe", "1f1b", "dualpipev"):
        for losses in pool.run(unequal_batches, schedule, str(tmp_path), world_size=2):
            assert losses == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (auxiliary_loss, r"a gradient goes into a result of the forward that is not its loss"),
        (second_backward, r"a second backward goes through one forward of a pipeline"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_on_every_rank(
    pool: WorkerPool, tmp_path: Path, job: Any, message: str
) -> None:
    for raised in pool.run(job, str(tmp_path), world_size=2):
        assert raised[0] == UnsupportedError.__name__
        assert message in raised[1]
        assert "pipeline_scheduler='gpipe'" in raised[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_nstages": 64},
            r"can be cut into \d+ stages, and 64 are asked for\. Set pipeline_nstages",
        ),
        ({"stage_cuts": ["layers.9"]}, r"stage_cuts names 'layers\.9', which computes nothing\. Use names"),
        ({"pipeline_nmicros": 3}, r"pipeline_nmicros=3 does not divide a batch of 256 samples\. Choose"),
        (
            {"memory_limit": 1000},
            r"'pp' fits into 1000 bytes on each of 2 ranks: .* takes \d+ bytes .*What helps",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_error_on_every_rank(
    pool: WorkerPool, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    for losses, _, error in pool.run(
        planned_losses_with, str(tmp_path), "nnscaler_pp", options, world_size=2
    ):
        assert not losses
        assert re.search(message, error)


@pytest.mark.full
def test_a_script_that_catches_the_error_ends_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_CATCHES)
    jobs = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(jobs)}, timeout=150, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.count("3 stages cannot be dealt out to 2 ranks evenly") == 2


_CATCHES = """
from jobs.nnscaler_pipeline_jobs import Deep, rows, train
from nnx_core.errors import OptionError

try:
    train(Deep(), rows(16), batch=8, folder=".", pipeline_nstages=3)
except OptionError as error:
    print(f"{error}\\n", end="")
"""

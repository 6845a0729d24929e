"""Every schedule of a pipeline has the losses of one process, for every shape of the world.

By default some combinations run, in rotation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.nnscaler_models import Case, losses_of
from jobs.nnscaler_pipeline_jobs import (
    auxiliary_loss,
    evaluated,
    held_microbatches,
    logged,
    loop_of_ones_own,
    losses_in_turns,
    measured,
    odd_steps,
    planned_losses_with,
    scaled,
    second_backward,
    stored_and_predicted,
    unequal_batches,
    weights_after,
)
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import NnxError, UnsupportedError
from nnx_nnscaler.options import SCHEDULES, V_SHAPED
from nnx_nnscaler.pipeline.picture import read_timeline
from nnx_nnscaler.plan.schedules import Action, Arrangement, order

SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp2": ("nnscaler_pp", 2, {}),
    "pp4": ("nnscaler_pp", 4, {}),
    "pp2 x dp2": ("nnscaler_pp", 4, {"plan_ngpus": 2}),
    "pp2 x zero2": ("nnscaler_pp", 4, {"plan_ngpus": 2, "use_zero": True}),
    "pp2 x tp2": ("nnscaler_hybrid", 4, {}),
}
LOSS_IN_FORWARD = ("gpt_with_loss", "gpt2", "t5", "unet")
LOSS_IN_STEP = (
    "gpt",  # with dropout, which replicas draw for themselves
    *("plain_gpt", "gpt2_loss_in_step", "llama_loss_in_step", "t5_loss_in_step", "unet_loss_in_step"),
)
STEPS = 6


@pytest.fixture(scope="module")
def of_one_process(pool: WorkerPool) -> Any:
    @cache
    def losses(model: str) -> tuple[list[float], list[float]]:
        return pool.run(losses_of, Case(model, steps=STEPS, clip=0.5), world_size=1)[0]

    return losses


@pytest.mark.quick(every=520, first=250)
@pytest.mark.parametrize("model", (*LOSS_IN_FORWARD, *LOSS_IN_STEP))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_has_the_losses_of_one_process(
    pool: WorkerPool, of_one_process: Any, tmp_path: Path, schedule: str, shape: str, model: str
) -> None:
    strategy, devices, options = SHAPES[shape]
    if model == "gpt" and "plan_ngpus" in options:
        pytest.skip("replicas draw masks of their own")
    options = {**options, "pipeline_scheduler": schedule, "gen_savedir": str(tmp_path)}
    case = Case(model, strategy, options, devices, STEPS, clip=0.5)
    expected = of_one_process(model)
    for losses, validated, in_turns in pool.run(losses_in_turns, case, world_size=devices):
        assert losses == pytest.approx(expected[0], abs=1e-5, rel=0)
        assert validated == pytest.approx(expected[1], abs=1e-5, rel=0)
        assert in_turns == (0 if schedule == "gpipe" else STEPS)


@pytest.mark.full
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("zero_bubble", 2), ("interleaved", 6)])
def test_the_microbatches_that_a_rank_holds_do_not_grow_with_their_number(
    pool: WorkerPool, tmp_path: Path, schedule: str, most: int, in_step: bool
) -> None:
    for microbatches in (4, 16):
        held = pool.run(held_microbatches, str(tmp_path), schedule, microbatches, in_step, world_size=2)
        assert max(held) <= most


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_a_step_returns_and_logs_is_that_of_one_process(
    pool: WorkerPool, tmp_path: Path, schedule: str
) -> None:
    """With a last batch that is smaller, gradients of two batches, and a number that changes in mid-run."""
    expected, _ = pool.run(logged, {}, "", world_size=1)[0]
    for values, in_turns in pool.run(logged, {"pipeline_scheduler": schedule}, str(tmp_path), world_size=2):
        assert values == pytest.approx(expected, abs=1e-5, rel=1e-6)
        assert in_turns == 8


@pytest.mark.full
def test_an_overflow_of_the_scaled_loss_is_one_decision_in_turns(pool: WorkerPool, tmp_path: Path) -> None:
    """The same as where all goes forward before it goes back; a whole batch's gradients overflow earlier."""
    expected, scale, _ = pool.run(scaled, "gpipe", str(tmp_path), world_size=2)[0]
    assert scale < 2.0**24
    for losses, found, in_turns in pool.run(scaled, "1f1b", str(tmp_path), world_size=2):
        assert losses == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert found == scale
        assert in_turns == 16


@pytest.mark.full
def test_steps_that_a_program_could_not_repeat_run_as_they_are(pool: WorkerPool, tmp_path: Path) -> None:
    expected, _ = pool.run(odd_steps, "", "", world_size=1)[0]
    for losses, in_turns in pool.run(odd_steps, "1f1b", str(tmp_path), world_size=2):
        assert in_turns == 0
        for name, values in expected.items():
            assert losses[name] == pytest.approx(values, abs=1e-5, rel=0), name


def test_a_loop_of_ones_own_goes_in_turns_where_the_forward_returns_its_loss(
    pool: WorkerPool, tmp_path: Path
) -> None:
    expected, _ = pool.run(loop_of_ones_own, "", "", world_size=1)[0]
    for losses, in_turns in pool.run(loop_of_ones_own, "1f1b", str(tmp_path), world_size=2):
        assert losses == pytest.approx(expected, abs=1e-5, rel=0)
        assert in_turns == 4


@pytest.mark.quick(every=4)
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


@pytest.mark.full
def test_last_batches_and_other_sizes_train_as_in_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(unequal_batches, "", "", world_size=1)[0]
    for schedule in ("gpipe", "1f1b", "dualpipev"):
        for losses in pool.run(unequal_batches, schedule, str(tmp_path), world_size=2):
            assert losses == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_evaluation_goes_through_the_stages_in_microbatches_within_the_planned_memory(
    pool: WorkerPool, tmp_path: Path, schedule: str
) -> None:
    expected, uncut, _, _ = pool.run(evaluated, "", str(tmp_path / "one"), world_size=1)[0]
    for losses, counted, planned, microbatches in pool.run(
        evaluated, schedule, str(tmp_path / "two"), world_size=2
    ):
        assert losses == pytest.approx(expected, abs=1e-6, rel=1e-5)
        assert microbatches == 8
        assert counted <= 1.25 * planned < uncut / 2


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_what_a_loss_does_not_see_is_not_stepped_and_masks_and_penalties_count_once(
    pool: WorkerPool, tmp_path: Path, schedule: str
) -> None:
    expected = pool.run(weights_after, "", "", world_size=1)[0]
    for found in pool.run(weights_after, schedule, str(tmp_path), world_size=2):
        for name, weights in found.items():
            torch.testing.assert_close({name: weights}, {name: expected[name]}, atol=2e-6, rtol=0)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "schedule",
    [name if name in ("gpipe", "zbv") else pytest.param(name, marks=pytest.mark.full) for name in SCHEDULES],
)
def test_a_timeline_has_what_each_rank_did_in_three_steps(
    pool: WorkerPool, tmp_path: Path, schedule: str
) -> None:
    file = tmp_path / "runs" / "timeline.json"
    pool.run(measured, str(tmp_path), str(file), schedule, 8, world_size=2)
    spans = read_timeline(file)
    stages = 1 + max(span.action.stage for span in spans)
    wanted = order(schedule, Arrangement(2, stages, schedule in V_SHAPED), 4)
    for step in (3, 4, 5):
        own = sorted((span for span in spans if span.step == step), key=lambda span: span.start)
        for rank in (0, 1):
            done = [span for span in own if span.rank == rank]
            assert [span.action for span in done] == list(wanted[rank])
            assert all(one.stop <= other.start for one, other in pairwise(done))
        times = {span.action: span for span in own}
        for (kind, stage, index), span in times.items():
            if kind == "F" and stage:
                assert times[Action("F", stage - 1, index)].stop <= span.start
            if kind in ("B", "I") and stage < stages - 1:
                before = times.get(Action("B", stage + 1, index)) or times[Action("I", stage + 1, index)]
                assert before.stop <= span.start
    assert {span.step for span in spans} == {3, 4, 5}


def test_a_run_that_is_too_short_says_that_nothing_was_measured(pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    short = pool.run(measured, str(tmp_path), str(file), "1f1b", 2, world_size=2)
    assert len(short[0]) == 2
    assert file.read_text() == ""
    with pytest.raises(NnxError, match="is not a timeline"):
        read_timeline(file)


@pytest.mark.quick(every=2)
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


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_nstages": 64},
            r"can be cut into \d+ stages at most, and 64 are requested\. Set pipeline_nstages",
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
    assert done.stdout.count("3 stages cannot be distributed evenly over 2 ranks") == 2


_CATCHES = """
from jobs.nnscaler_pipeline_jobs import Deep, rows, train
from nnx_core.errors import OptionError

try:
    train(Deep(), rows(16), batch=8, folder=".", pipeline_nstages=3)
except OptionError as error:
    print(f"{error}\\n", end="")
"""

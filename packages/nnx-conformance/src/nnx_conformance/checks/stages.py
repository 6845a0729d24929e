"""Stages: fit, validate, test and predict in any order, each with the weights and the mode it should have.

What evaluation gives is compared batch by batch with one process on the same global batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnx_conformance import stages_jobs as jobs
from nnx_conformance import stages_models as models
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import (
    TOLERANCE,
    expect_equal_losses,
    expect_equal_weights,
    expect_parity,
    expect_same_run,
)
from nnx_conformance.task import Outcome, Task

_TASK = Task(batches=2, steps=2)


def _compare(bench: Bench, job: Callable[..., Outcome], task: Task, *args: Any) -> None:
    """Training, the weights in the end, and what evaluation gave are those of one process."""
    alone: Outcome = bench.alone(job, task, *args)
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(job, task, *args, world_size=world_size)
        _expect_same_evaluation(ranks, alone)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype], what="training")


def _expect_same_evaluation(ranks: list[Outcome], alone: Outcome) -> None:
    for rank, outcome in enumerate(ranks):
        for stage in sorted({"validate", "test", "predict"} & alone.notes.keys()):
            expected = alone.notes[stage]
            where = f"{stage}, rank {rank} of {len(ranks)}"
            seen = outcome.notes.get(stage, [])
            expect_equal_losses(seen, expected, tolerance=TOLERANCE["float32"], where=where)


# --- any order ----------------------------------------------------------------------------------------


@check()
def evaluation_before_fit(bench: Bench) -> None:
    """A module can be validated, tested and predicted with before it is trained, which then goes as ever."""
    _compare(bench, jobs.evaluate_then_fit, _TASK)


@check()
def evaluation_after_fit(bench: Bench) -> None:
    """A new Trainer tests, predicts and validates with the trained weights."""
    _compare(bench, jobs.fit_then_evaluate, _TASK, "other")


@check()
def evaluation_with_the_same_trainer(bench: Bench) -> None:
    """The Trainer that trained tests, predicts and validates with the trained weights."""
    _compare(bench, jobs.fit_then_evaluate, _TASK, "same")


@check()
def fit_again(bench: Bench) -> None:
    """A second Trainer goes on from the trained weights."""
    _compare(bench, jobs.fit_again, _TASK)


@check(of_adapter=True)
def fit_further(bench: Bench) -> None:
    """The same Trainer, given more steps, goes on from the trained weights."""
    _compare(bench, jobs.fit_further, _TASK)


@check(full=True)
def any_order(bench: Bench) -> None:
    """One module goes through every stage in an unusual order, and each sees the weights of its time."""
    _compare(bench, jobs.any_order, _TASK)


# --- evaluation within fit ------------------------------------------------------------------------------

_VALIDATED = Task(model=models.Watched, batches=3)
_BRANCHING = Task(batches=3)


@check()
def validation_sees_current_weights(bench: Bench) -> None:
    """Validation within fit, and before its first step, uses the weights of that moment."""
    alone: Outcome = bench.alone(jobs.fit_and_validate, _VALIDATED)
    for world_size in bench.world_sizes:
        ranks = bench.run(jobs.fit_and_validate, _VALIDATED, world_size=world_size)
        _expect_same_evaluation(ranks, alone)


@check()
def validation_leaves_training_alone(bench: Bench) -> None:
    """Training goes on after validation as if there had been none."""
    without = bench.train_alone(Task(batches=3))
    for world_size in bench.world_sizes:
        ranks = bench.run(jobs.fit_and_validate, _VALIDATED, world_size=world_size)
        expect_same_run(ranks, without, tolerance=TOLERANCE["float32"])


@check("gradient_accumulation")
def validation_while_gradients_accumulate(bench: Bench) -> None:
    """Validation between two batches of one step loses nothing of the gradients accumulated so far."""
    task = Task(model=models.Watched, batches=4, steps=2, accumulate=2)
    without = bench.train_alone(Task(batches=4, steps=2, accumulate=2))
    for world_size in bench.world_sizes:
        ranks = bench.run(jobs.fit_and_validate, task, world_size=world_size)
        expect_same_run(ranks, without, tolerance=TOLERANCE["float32"])


@check(of_adapter=True)
def evaluation_takes_the_eval_branch(bench: Bench) -> None:
    """In evaluation every module is in evaluation mode: dropout is off and `self.training` False."""
    alone: Outcome = bench.alone(jobs.branch, _BRANCHING)
    for world_size in bench.world_sizes:
        ranks = bench.run(jobs.branch, _BRANCHING, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            in_training = [any_part for _, any_part in outcome.notes["modes"]["evaluate"]]
            expect(
                not any(in_training),
                f"rank {rank}: modules were in training mode in {sum(in_training)} of {len(in_training)} "
                "steps of evaluation.",
            )
        _expect_same_evaluation(ranks, alone)


@check(of_adapter=True)
def training_takes_the_training_branch_again(bench: Bench) -> None:
    """After validation every module is in training mode again: dropout is on and `self.training` True."""
    alone: Outcome = bench.alone(jobs.branch, _BRANCHING)
    for world_size in bench.world_sizes:
        ranks = bench.run(jobs.branch, _BRANCHING, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            wrong = [i for i, (every_part, _) in enumerate(outcome.notes["modes"]["train"]) if not every_part]
            expect(not wrong, f"rank {rank}: modules were in evaluation mode in training steps {wrong}.")
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check(of_adapter=True)
def submodules_keep_their_mode(bench: Bench) -> None:
    """A submodule that the user put into evaluation mode is still in it after validation."""
    for rank, seen in enumerate(bench.run(jobs.modes_of_submodules, Task(batches=3))):
        expect(
            seen == [(False, True)] * 3,
            f"rank {rank}: the first block was put into evaluation mode and the second was not; the modes "
            f"in the training steps were {seen}.",
        )


@check()
def evaluation_computes_no_gradients(bench: Bench) -> None:
    """Evaluation runs without gradients and leaves neither gradients nor inference tensors behind."""
    task = Task(batches=2, steps=2)
    for rank, report in enumerate(bench.run(jobs.look_at_evaluation, task)):
        where = f"rank {rank}"
        expect(not report["with gradients"], f"{where}: gradients are on during {report['with gradients']}.")
        expect(not report["outputs"], f"{where}: what predict returns requires gradients.")
        expect(not report["gradients"], f"{where}: evaluation left gradients of {report['gradients']}.")
        expect(
            not report["inference"],
            f"{where}: evaluation left inference tensors, which cannot be trained: {report['inference']}.",
        )
        expect(len(report["losses"]) == 2, f"{where}: {len(report['losses'])} steps instead of 2.")


@check(of_adapter=True)
def predictions_of_each_rank(bench: Bench) -> None:
    """`Trainer.predict` returns on each rank the outputs for that rank's own share, in order."""
    task = Task(batches=3, last_batch=6)
    _, expected = bench.alone(jobs.predict, task)
    for world_size in bench.world_sizes:
        by_share = dict(bench.run(jobs.predict, task, world_size=world_size))
        for batch, wanted in enumerate(expected):
            shares = [by_share[share][batch : batch + 1] for share in sorted(by_share)]
            seen = torch.cat([output for outputs in shares for output in outputs] or [torch.empty(0)])
            expect_equal_weights(
                {"outputs": seen}, {"outputs": wanted}, tolerance=1e-5, where=f"predicted batch {batch}"
            )


# --- batches --------------------------------------------------------------------------------------------


@check()
def smaller_last_batch(bench: Bench) -> None:
    """An epoch's last batch may be smaller; training and evaluation use it as it is."""
    task = Task(model=models.Watched, batches=2, last_batch=6, steps=4)
    _compare(bench, jobs.fit_and_validate, task)


@check()
def last_batch_of_one_sample(bench: Bench) -> None:
    """The last batch may leave each rank a single sample."""
    for world_size in bench.world_sizes:
        task = Task(batches=2, last_batch=world_size, steps=4)
        ranks = bench.train(task, world_size=world_size)
        expect_same_run(ranks, bench.train_alone(task), tolerance=TOLERANCE["float32"])


@check()
def unequal_shares(bench: Bench) -> None:
    """Ranks may have different numbers of samples in a batch."""
    expect_parity(bench, Task(model=models.UnequalShares, batches=3, steps=8))


@check()
def batch_size_changes(bench: Bench) -> None:
    """Every step may have another batch size, also a larger one than the first."""
    expect_parity(bench, Task(model=models.VaryingBatches, batches=6, steps=5))


@check()
def other_batch_size_in_evaluation(bench: Bench) -> None:
    """Evaluation may have other batch sizes than training."""
    task = Task(model=models.OtherBatchesInEvaluation, batches=5, steps=2)
    _compare(bench, jobs.fit_then_evaluate, task, "other")


@check(of_adapter=True)
def empty_validation(bench: Bench) -> None:
    """A validation loader without samples is passed over."""
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": 1, "max_steps": -1, "max_epochs": 2}
    _ends_alike(bench, Task(model=models.EmptyValidation, batches=2), settings)


# --- the end of a run -----------------------------------------------------------------------------------


def _ends_alike(bench: Bench, task: Task, settings: dict[str, Any]) -> None:
    """A run with these settings of Trainer ends where it does in one process, with the same numbers."""
    alone: Outcome = bench.alone(jobs.fit_until, task, settings)
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(jobs.fit_until, task, settings, world_size=world_size)
        for rank, outcome in enumerate(ranks):
            seen, expected = outcome.notes["end"], alone.notes["end"]
            expect(seen == expected, f"rank {rank}: the run ended {seen}; in one process {expected}.")
        _expect_same_evaluation(ranks, alone)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"], what="training")


@check(of_adapter=True)
def epochs_end(bench: Bench) -> None:
    """`max_epochs` ends a run after that many epochs."""
    _ends_alike(bench, _TASK, {"max_steps": -1, "max_epochs": 2})


@check(of_adapter=True)
def limited_batches(bench: Bench) -> None:
    """`limit_train_batches`, `limit_val_batches` and `limit_test_batches` hold, as numbers and fractions."""
    limits = {"limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1}
    settings = {**limits, "max_steps": -1, "max_epochs": 2}
    _ends_alike(bench, Task(batches=4), settings)


@check(of_adapter=True)
def one_rank_stops_all(bench: Bench) -> None:
    """Ranks decide together: one that wants to stop stops all, and all must want what needs all."""
    ranks = bench.run(jobs.decide_on_rank_zero, Task(steps=4), world_size=2)
    for rank, (decided, batches) in enumerate(ranks):
        where = f"rank {rank}: rank 0 alone wants to stop"
        expect(all(decided["any"]), f"{where}, and `any` told the ranks {decided['any']}.")
        expect(not any(decided["all"]), f"{where}, and `all` told the ranks {decided['all']}.")
        expect(batches == 2, f"{where} after batch 2; training ended after batch {batches}.")


@check(of_adapter=True)
def early_stopping(bench: Bench) -> None:
    """`EarlyStopping` on a logged metric ends the run at the same step on every rank."""
    task = Task(batches=1)
    expected = bench.alone(jobs.stop_early, task)
    for world_size in bench.world_sizes:
        seen = bench.run(jobs.stop_early, task, world_size=world_size)
        expect(
            seen == [expected] * world_size,
            f"training ended after {seen} batches on the {world_size} ranks; alone after {expected}.",
        )

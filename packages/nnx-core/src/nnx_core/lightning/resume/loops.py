"""Correct the loop counters of Lightning's checkpoints, so that a run resumes where it stopped.

Lightning 2.6 resumes three kinds of runs at the wrong place. A run that ``max_steps`` ended inside an epoch
resumes under the next epoch's number. A run that ended with an epoch trains one batch too many.
`interruption` rewrites their counters before Lightning reads them. A run that was saved in the end hook of a
batch omits the validation, or the end of the epoch, after that batch; `complete_batch` runs them.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

_EPOCHS = "epoch_progress"


_BATCHES = "epoch_loop.batch_progress"


@dataclass(frozen=True, slots=True)
class Interruption:
    """The interruption of a run.

    Attributes:
        batches: The trained batches of the epoch.
        inside: True if the pass over the data continues; otherwise a new one begins.
    """

    batches: int
    inside: bool


def interruption(checkpoint: dict[str, Any], *, iteration_based: bool) -> Interruption | None:
    """Locate the interruption of a checkpoint's run, and correct the counters in the checkpoint.

    Args:
        checkpoint: Lightning's dict; its ``loops`` are replaced, not changed.
        iteration_based: True if the run that resumes counts steps (``max_steps``) rather than epochs.

    Returns:
        The interruption; None if the checkpoint has no loops, as those of Fabric.
    """
    if "fit_loop" not in checkpoint.get("loops", {}):
        return None
    checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": copy.deepcopy(checkpoint["loops"]["fit_loop"])}
    loops = checkpoint["loops"]["fit_loop"]
    epochs, batches = loops[_EPOCHS], loops[_BATCHES]
    current = batches["current"]
    # `ready` counts batches that began, `processed` those that were trained. A save in the middle of a batch
    # has one more `ready`. An epoch with `started == processed` has ended, or `max_steps` has ended it.
    exhausted = batches["is_last_batch"] and current["processed"] == current["ready"]
    between = epochs["current"]["started"] == epochs["current"]["processed"]
    if batches["total"]["ready"] == 0:
        return Interruption(0, inside=True)
    if between and iteration_based and not exhausted:
        _reopen_epoch(epochs)
        return Interruption(current["processed"], inside=True)
    if between:
        _close_epoch(epochs, batches)
    return Interruption(current["processed"], inside=not (between or exhausted))


def _reopen_epoch(epochs: dict[str, Any]) -> None:
    """Undo the end of an epoch that Lightning counted because ``max_steps`` was reached inside it."""
    for progress in (epochs["total"], epochs["current"]):
        progress["processed"] -= 1
        progress["completed"] = progress["processed"]


def _close_epoch(epochs: dict[str, Any], batches: dict[str, Any]) -> None:
    """Complete the end of an epoch, for saves in any hook between two epochs."""
    for progress in (epochs["total"], epochs["current"]):
        for counter in ("ready", "started", "completed"):
            progress[counter] = progress["processed"]
    batches["current"].update(dict.fromkeys(batches["current"], 0))
    batches["is_last_batch"] = False


def count_batches(trainer: Any, batches: int) -> None:
    """Set the number of trained batches of the epoch; the state of the last batch does not change."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    moved = batches - current.processed
    for counter in ("ready", "started", "processed", "completed"):
        setattr(current, counter, getattr(current, counter) + moved)


def complete_batch(trainer: Any) -> None:
    """Run the validation, or the end of the epoch, after a batch in whose end hook the run was saved.

    Called after Lightning has prepared its loops to resume, and before the first batch.
    """
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    progress = loop.batch_progress
    if progress.is_last_batch and fit.max_batches != float("inf"):
        count_batches(trainer, fit.max_batches)  # the number of batches for this world size
    if not loop.restarted_on_train_batch_end:
        return
    if progress.is_last_batch and fit.restarted_mid_epoch:
        # Lightning has counted the epoch as processed, but its end is still due.
        for counters in (fit.epoch_progress.total, fit.epoch_progress.current):
            counters.processed -= 1
            counters.completed -= 1
    is_due = loop._should_check_val_fx(fit._data_fetcher)
    if not (is_due or progress.is_last_batch):
        return
    progress.increment_completed()
    loop._restart_stage = _stages(loop).RESTARTED_ON_LAST
    if is_due:  # let Lightning resume a validation as if it had begun
        loop.val_loop.restarting = False
        loop.val_loop._restart_stage = _stages(loop.val_loop).RESTARTED_MID_EVALUATION
    else:  # an exhausted fetcher makes Lightning end the epoch
        fit._data_fetcher.iterator = iter(())
        loop._batches_that_stepped += 1


def _stages(loop: Any) -> Any:
    return importlib.import_module(type(loop).__module__).RestartStage

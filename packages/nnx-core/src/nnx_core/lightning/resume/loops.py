"""Where Lightning's loops were, and putting them there.

Lightning 2.6 resumes some places otherwise than it left them. A run that ``max_steps`` ended inside an
epoch goes on under the next epoch's number, and one that ended with an epoch trains one batch too many:
`interruption` rewrites their counters before Lightning reads them. What follows a batch that was saved in
its own end hook (validation, the end of the epoch) is left out: `complete_batch` makes up for it.
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
    """Where a run was interrupted.

    Attributes:
        batches: Batches of the epoch that were trained on.
        inside: True if the pass over the data continues; otherwise a new one begins.
    """

    batches: int
    inside: bool


def interruption(checkpoint: dict[str, Any], *, iteration_based: bool) -> Interruption | None:
    """Find out where the run of a checkpoint was interrupted, and correct the counters in it.

    Args:
        checkpoint: Lightning's dict; its ``loops`` are replaced, not changed.
        iteration_based: True if the run that resumes counts steps (``max_steps``) rather than epochs.

    Returns:
        None if the checkpoint has no loops, as Fabric's have none.
    """
    if "fit_loop" not in checkpoint.get("loops", {}):
        return None
    checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": copy.deepcopy(checkpoint["loops"]["fit_loop"])}
    loops = checkpoint["loops"]["fit_loop"]
    epochs, batches = loops[_EPOCHS], loops[_BATCHES]
    current = batches["current"]
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
    """The steps ran out inside an epoch, which Lightning counts as its end."""
    for progress in (epochs["total"], epochs["current"]):
        progress["processed"] -= 1
        progress["completed"] = progress["processed"]


def _close_epoch(epochs: dict[str, Any], batches: dict[str, Any]) -> None:
    """The epoch is over, whichever hook at its end or at the next one's beginning saved it."""
    for progress in (epochs["total"], epochs["current"]):
        for counter in ("ready", "started", "completed"):
            progress[counter] = progress["processed"]
    batches["current"].update(dict.fromkeys(batches["current"], 0))
    batches["is_last_batch"] = False


def count_batches(trainer: Any, batches: int) -> None:
    """Set how many batches of the epoch have been trained on, keeping how far the last one has got."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    moved = batches - current.processed
    for counter in ("ready", "started", "processed", "completed"):
        setattr(current, counter, getattr(current, counter) + moved)


def complete_batch(trainer: Any) -> None:
    """Let the validation or the end of the epoch follow the batch in whose end hook the run was saved.

    Called when Lightning has prepared its loops for resuming, and before the first batch.
    """
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    progress = loop.batch_progress
    if progress.is_last_batch and fit.max_batches != float("inf"):
        count_batches(trainer, fit.max_batches)  # as this world size counts them
    if not loop.restarted_on_train_batch_end:
        return
    if progress.is_last_batch and fit.restarted_mid_epoch:  # Lightning has closed the epoch: it is not over
        for counters in (fit.epoch_progress.total, fit.epoch_progress.current):
            counters.processed -= 1
            counters.completed -= 1
    is_due = loop._should_check_val_fx(fit._data_fetcher)
    if not (is_due or progress.is_last_batch):
        return
    progress.increment_completed()
    loop._restart_stage = _stages(loop).RESTARTED_ON_LAST
    if is_due:  # Lightning goes back into a validation that had begun
        loop.val_loop.restarting = False
        loop.val_loop._restart_stage = _stages(loop.val_loop).RESTARTED_MID_EVALUATION
    else:  # and ends an epoch whose data is at its end
        fit._data_fetcher.iterator = iter(())
        loop._batches_that_stepped += 1


def _stages(loop: Any) -> Any:
    return importlib.import_module(type(loop).__module__).RestartStage

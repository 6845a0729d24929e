"""What Lightning's saved loops say about where a run was interrupted, and how to take it up there.

Lightning 2.6 resumes some places otherwise than it left them: a run that ``max_steps`` ended inside an
epoch goes on with the next epoch's number, and one that ended with an epoch trains one batch too many.
This module rewrites the counters of a checkpoint, before Lightning reads them, so that it does neither.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

__all__ = ["Interruption", "interruption"]

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"


@dataclass(frozen=True, slots=True)
class Interruption:
    """Where a run was interrupted.

    Attributes:
        batches: Batches of the epoch that were trained on.
        inside: Whether the pass over the data goes on; otherwise a new one begins.
    """

    batches: int
    inside: bool


def interruption(checkpoint: dict[str, Any], *, iteration_based: bool) -> Interruption | None:
    """Find out where the run of a checkpoint was interrupted, and correct the counters in it.

    Args:
        checkpoint: Lightning's dict; its ``loops`` are replaced, not changed.
        iteration_based: Whether the run that resumes counts steps (``max_steps``) rather than epochs.

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

"""Exact resume of a Trainer: each rank's random state and its position in the data.

Lightning restores weights, optimizers and counters; data it reads again from the beginning of the epoch, and
random numbers it draws anew. This module saves what is missing for each rank, and puts it back when it
counts: the position when the loaders are made, random numbers just before training begins. Where the strategy
is Lightning's own, `nnx_core.lightning.callbacks` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from nnx_checkpoint.collective import control_group, together
from nnx_checkpoint.naming import RANKS
from nnx_core import random_state
from nnx_core.errors import CheckpointError
from nnx_core.lightning.training_data import (
    Interruption,
    Position,
    TrainingData,
    begin_late,
    complete_batch,
    interruption,
)
from nnx_core.shares import of_process

_NO_DATA: Mapping[str, Any] = {"loaders": (), "stateful": ()}
"""Fabric's checkpoints hold random state alone."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a checkpoint holds of the run that is resumed."""

    own: Mapping[str, Any] | None
    first: Mapping[str, Any]
    step: int


@dataclass(frozen=True, slots=True)
class _Opened:
    """What resuming needs of a checkpoint that was opened."""

    place: Interruption | None
    saved: _Saved | None
    said: list[str]


class ExactResume:
    """Saves and restores random state and data position of one Trainer on this rank.

    Args:
        resume_data: ``"skip"`` passes over the data that the epoch has seen; ``"restart"`` leaves the
            loaders to the user and to Lightning.
        strict_rng: Refuse checkpoints whose random state cannot be continued exactly.
    """

    def __init__(self, *, resume_data: str, strict_rng: bool) -> None:
        self.strict_rng = strict_rng
        self._data = TrainingData() if resume_data == "skip" else None
        self._opened: _Opened | None = None
        self._forget()

    def _forget(self) -> None:
        self._saved: _Saved | None = None
        self._place: Interruption | None = None
        self._said: list[str] = []

    # --- saving -------------------------------------------------------------------------------

    def state(self, trainer: Any) -> dict[str, Any]:
        """This rank's random state and data position, as plain data."""
        positions = [] if self._data is None else self._data.positions(trainer)
        return {
            **random_state.RandomState().state_dict(),
            "data": {
                "loaders": [None if position is None else position.as_dict() for position in positions],
                "stateful": trainer.fit_loop.on_save_checkpoint().get("combined_loader", []),
            },
        }

    # --- resuming -----------------------------------------------------------------------------

    def load(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Take what concerns resuming out of an opened checkpoint, for `activate`. Collective.

        Args:
            trainer: Only its ``fit`` resumes; evaluation leaves random numbers alone.
            checkpoint: Lightning's dict; its counters are corrected.

        Raises:
            CheckpointError: It holds no random state, and `strict_rng` asks for it.
        """
        ranks = checkpoint.pop(RANKS, ())
        self._opened = None
        if trainer.state.fn != "fit":
            return
        said: list[str] = []
        place = interruption(checkpoint, iteration_based=trainer.max_steps != -1)
        with together(control_group(), doing="reading the random state"):
            saved = self._read(ranks, of_process(trainer.global_rank), checkpoint.get("global_step", 0))
            if saved is not None and place is not None:
                said += _put_loader_states(trainer, saved, ranks, checkpoint)
        self._opened = _Opened(place, saved, said)

    def activate(self) -> None:
        """Let the training that begins next go on where that of the opened checkpoint stood.

        Called when Trainer restores the training state. What trained before it, since the checkpoint was
        opened, such as a search for a learning rate, began anew.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self._saved, self._place, self._said = opened.saved, opened.place, opened.said
        loaders = []
        if self._saved is not None:
            data = (self._saved.own or self._saved.first).get("data", _NO_DATA)
            loaders = [None if saved is None else Position(**saved) for saved in data["loaders"]]
        if self._data is not None:
            self._data.resume_at(self._place, loaders)

    def _read(self, ranks: Any, rank: int, step: int) -> _Saved | None:
        first = ranks[0] if len(ranks) > 0 else {}
        if "rng" in first:
            return _Saved(ranks[rank] if rank < first["world_size"] else None, first, step)
        if self.strict_rng:
            raise CheckpointError(
                "the checkpoint holds no random state, so randomness cannot go on exactly.",
                remedy="Resume from one that an nnx strategy, or nnx.CheckpointIO, saved while training; or "
                "pass strict_rng=False.",
            )
        return None

    def process(self, trainer: Any, loader: Any) -> Any:
        """Prepare a loader that Trainer is about to use; returns it."""
        if self._data is not None and trainer.training:
            self._data.process(trainer, loader)
        return loader

    def start(self, trainer: Any) -> None:
        """Restore counters and random state: the last thing before the first batch is asked for.

        Raises:
            CheckpointError: This run has other loaders; or another number of ranks, with `strict_rng`.
        """
        saved, self._saved = self._saved, None
        if self._data is not None:
            self._data.start(trainer)
            self._said += self._data.said
        if self._place is not None and not self._place.inside:
            begin_late(trainer)
        if self._place is not None:
            complete_batch(trainer)
        if saved is not None:
            said = random_state.resume(
                None if saved.own is None else saved.own["rng"],
                seed=saved.first["rng"]["seed"],
                rank=of_process(trainer.global_rank),
                size=of_process(trainer.world_size),
                saved_size=saved.first["world_size"],
                step=saved.step,
                strict=self.strict_rng,
            )
            self._said += [said] if said else []
        for said in self._said:
            rank_zero_warn(f"Resuming: {said}")
        self._place, self._said = None, []

    def close(self, trainer: Any) -> None:
        """Leave the user's loaders as they were; what was to be resumed and was not is forgotten."""
        self._opened = None
        self._forget()
        if self._data is not None:
            self._data.close(trainer)


def _put_loader_states(trainer: Any, saved: _Saved, ranks: Any, checkpoint: dict[str, Any]) -> list[str]:
    """Lightning restores loaders that have a state; it would give every rank that of rank 0.

    Returns:
        What the user should know about it.
    """
    if not saved.first.get("data", _NO_DATA)["stateful"]:
        return []
    loops = checkpoint["loops"]["fit_loop"]["state_dict"]
    size, saved_size = of_process(trainer.world_size), saved.first["world_size"]
    if saved.own is not None and size == saved_size:
        loops["combined_loader"] = saved.own["data"]["stateful"]
        return []
    if _all_equal([ranks[rank]["data"]["stateful"] for rank in range(saved_size)]):
        return [
            f"the states of the training loaders, the same on all {saved_size} ranks, are restored on "
            f"{size} ranks: that is right unless they count what one rank has read."
        ]
    loops.pop("combined_loader", None)
    return [
        f"the training loaders start over, as each of {saved_size} ranks had a state of its own and "
        f"this run has {size}."
    ]


def _all_equal(states: Sequence[Any]) -> bool:
    try:
        return all(bool(state == states[0]) for state in states)
    except (RuntimeError, ValueError):  # tensors and arrays in them are not compared as a whole
        return False

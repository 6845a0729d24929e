"""Exact resume of a Trainer: each rank's random state and its position in the data.

Lightning restores weights, optimizers and counters; data it reads again from the beginning of the epoch,
and random numbers it draws anew. This module saves what is missing for each rank, and puts it back when it
counts: the position when the loaders are made, random numbers just before training begins.
Where the strategy is Lightning's own, `nnx.lightning.resume_callback` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from nnx import random_state
from nnx.canonical import RANKS
from nnx.collective import control_group, together
from nnx.data_position import Position
from nnx.errors import CheckpointError
from nnx.lightning.loop_progress import Interruption, complete_batch, interruption
from nnx.lightning.training_data import TrainingData, begin_late

__all__ = ["ExactResume"]
_NO_DATA: Mapping[str, Any] = {"loaders": (), "stateful": ()}
"""Fabric's checkpoints hold random state alone."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a checkpoint holds of the run that is resumed."""

    own: Mapping[str, Any] | None
    first: Mapping[str, Any]
    step: int


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
        """Take what concerns resuming out of an opened checkpoint; nothing is restored yet. Collective.

        Args:
            trainer: Only its ``fit`` resumes; evaluation leaves random numbers alone.
            checkpoint: Lightning's dict; its counters are corrected.

        Raises:
            CheckpointError: It holds no random state, and `strict_rng` asks for it.
        """
        ranks = checkpoint.pop(RANKS, ())
        self._saved, self._place, self._said = None, None, []
        if trainer.state.fn != "fit":
            return
        self._place = interruption(checkpoint, iteration_based=trainer.max_steps != -1)
        with together(control_group(), doing="reading the random state"):
            self._saved = self._read(ranks, trainer.global_rank, checkpoint.get("global_step", 0))
            if self._saved is not None:
                self._put_loader_states(trainer, self._saved, ranks, checkpoint)
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

    def _put_loader_states(self, trainer: Any, saved: _Saved, ranks: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning restores loaders that have a state; it would give every rank that of rank 0."""
        if self._place is None or not saved.first.get("data", _NO_DATA)["stateful"]:
            return
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        size, saved_size = trainer.world_size, saved.first["world_size"]
        if saved.own is not None and size == saved_size:
            loops["combined_loader"] = saved.own["data"]["stateful"]
        elif _all_equal([ranks[rank]["data"]["stateful"] for rank in range(saved_size)]):
            self._said.append(
                f"the states of the training loaders, the same on all {saved_size} ranks, are restored on "
                f"{size} ranks: that is right unless they count what one rank has read."
            )
        else:
            loops.pop("combined_loader", None)
            self._said.append(
                f"the training loaders start over, as each of {saved_size} ranks had a state of its own and "
                f"this run has {size}."
            )

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
                rank=trainer.global_rank,
                size=trainer.world_size,
                saved_size=saved.first["world_size"],
                step=saved.step,
                strict=self.strict_rng,
            )
            self._said += [said] if said else []
        for said in self._said:
            rank_zero_warn(f"Resuming: {said}")
        self._place, self._said = None, []

    def close(self, trainer: Any) -> None:
        """Leave the user's loaders as they were."""
        if self._data is not None:
            self._data.close(trainer)


def _all_equal(states: Sequence[Any]) -> bool:
    try:
        return all(bool(state == states[0]) for state in states)
    except (RuntimeError, ValueError):  # tensors and arrays in them are not compared as a whole
        return False

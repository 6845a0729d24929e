"""The training loaders of one Trainer: where each stands, and taking them up where a saved run stood.

Loaders over a dataset with indices pass over what has been seen; those that have a state of their own are
Lightning's to restore; others start over. `nnx_core.data_position` does the work on one loader.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nnx_core.data_position import Position, TrackedSampler, is_skippable, track, tracked, untrack
from nnx_core.errors import CheckpointError
from nnx_core.lightning.loop_progress import Interruption, count_batches

__all__ = ["TrainingData"]

_LIGHTNINGS_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Where this process began an epoch in the middle: its number; batches in all and in each pass."""

    epoch: int
    batches: int
    items: tuple[int, ...]


class TrainingData:
    """Follows the training loaders of a Trainer, and makes them begin in the middle of an epoch.

    Attributes:
        said: What the user should know about how the data goes on.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self._place: Interruption | None = None
        self._saved: Sequence[Position | None] = ()
        self._index = 0
        self._beginning: _Beginning | None = None
        self._loaders: list[Any] = []
        self._final: list[Position | None] | None = None

    # --- while training -----------------------------------------------------------------------

    def positions(self, trainer: Any) -> list[Position | None]:
        """Where every training loader stands; None for those whose data cannot be passed over."""
        if self._final is not None:
            return self._final
        fit = trainer.fit_loop
        if fit._combined_loader is None:
            return []
        loaders = fit._combined_loader.flattened
        begun = self._beginning
        if begun is None or begun.epoch != fit.epoch_progress.current.ready:
            begun = _Beginning(0, 0, (0,) * len(loaders))
        since = fit.epoch_loop.batch_progress.current.processed - begun.batches
        samplers = [tracked(loader) for loader in loaders]
        if all(sampler is None for sampler in samplers):
            return [None] * len(samplers)  # also after the run, when the share of the data is not known
        size = data_parallel_rank_and_size(trainer)[1]
        mode = fit._combined_loader._mode
        return [
            None if sampler is None else sampler.position(_in_pass(first + since, sampler, mode), size)
            for sampler, first in zip(samplers, begun.items, strict=True)
        ]

    def close(self, trainer: Any) -> None:
        """Give the loaders their samplers back, and keep the positions for a checkpoint saved afterwards."""
        if self._loaders:
            self._final = self.positions(trainer)
        for loader in self._loaders:
            untrack(loader)
        self._loaders = []
        self.resume_at(None, ())

    # --- resuming -----------------------------------------------------------------------------

    def resume_at(self, place: Interruption | None, saved: Sequence[Position | None]) -> None:
        """Remember where the saved run stood, for the loaders that `process` will see.

        Args:
            place: Where Lightning's counters say that it was interrupted.
            saved: The position of every loader; empty if the checkpoint has none.
        """
        self._place, self._saved, self._index, self.said = place, saved, 0, []

    def process(self, trainer: Any, loader: Any) -> None:
        """Follow a training loader; after `resume_at`, make its first pass begin in the middle."""
        self._final = None
        index, self._index = self._index, self._index + 1
        inside = self._place is not None and self._place.inside
        if not is_skippable(loader) or _has_state(loader):
            if inside and not _has_state(loader):
                self.said.append(
                    f"the training data of {type(loader).__name__} starts over, as it has neither indices to "
                    "pass over nor `state_dict` and `load_state_dict`."
                )
            return
        sampler = track(loader)
        self._loaders.append(loader)
        saved = self._saved[index] if index < len(self._saved) else None
        if saved is not None and saved.seed is not None and hasattr(sampler.leaf, "seed"):
            sampler.leaf.seed = saved.seed
        if not inside:
            return
        set_epoch = getattr(sampler.leaf, "set_epoch", None)
        if callable(set_epoch):  # workers ask for indices before Lightning sets the epoch
            set_epoch(trainer.fit_loop.epoch_progress.current.processed)
        if saved is None:
            self._begin_without_position(sampler)
        else:
            self._begin_at(sampler, saved, data_parallel_rank_and_size(trainer)[1])

    def _begin_without_position(self, sampler: TrackedSampler) -> None:
        """Lightning's own checkpoints say how many batches were seen, which then are as many now."""
        assert self._place is not None
        items = _in_pass(self._place.batches, sampler, "max_size_cycle")
        sampler.begin_at(sampler.units_before(items), None)

    def _begin_at(self, sampler: TrackedSampler, saved: Position, size: int) -> None:
        order = type(sampler.leaf).__name__
        if (saved.order, saved.unit) != (order, sampler.unit):
            self.said.append(
                f"the order of the training data was made by {saved.order} and now is by {order}, so samples "
                "of this epoch may be seen twice or not at all."
            )
        units, left = divmod(saved.consumed, size)
        if left:
            self.said.append(
                f"{saved.consumed} {saved.unit} of this epoch were seen, which is no multiple of {size} "
                f"ranks: {left} of them will be seen again."
            )
        sampler.begin_at(units, saved.started_from)

    def start(self, trainer: Any) -> None:
        """Make Lightning's counters agree with where the loaders begin. Called when training begins.

        Raises:
            CheckpointError: This run has not the loaders of the saved one.
        """
        place, self._place = self._place, None
        if place is None:
            return
        loaders = trainer.fit_loop._combined_loader.flattened
        if self._saved and len(self._saved) != len(loaders):
            raise CheckpointError(
                f"this run has {len(loaders)} training loaders and the checkpoint has {len(self._saved)}.",
                remedy="Return the same loaders as when it was saved, or pass resume_data='restart'.",
            )
        samplers = [tracked(loader) for loader in loaders]
        for index, sampler in enumerate(samplers):
            if sampler is None:
                continue
            sampler.begin_at_start()
            saved = self._saved[index] if self._saved else None
            if saved is not None and not (place.inside and saved.started_from):
                sampler.restore_generators(saved.generators)
        if place.inside:
            self._count_from(trainer, samplers)

    def _count_from(self, trainer: Any, samplers: Sequence[TrackedSampler | None]) -> None:
        """Set the batches of the epoch to those of the loader that makes the epoch as long as it is."""
        fit = trainer.fit_loop
        combined = fit._combined_loader
        known = [sampler for sampler in samplers if sampler is not None]
        if len(known) < len(samplers):
            return
        warnings.filterwarnings("ignore", message=_LIGHTNINGS_WARNING)  # it does not know of this
        lengths = [
            min(_length(sampler), limit) for sampler, limit in zip(known, combined.limits, strict=True)
        ]
        decisive = (min if combined._mode == "min_size" else max)(range(len(known)), key=lengths.__getitem__)
        batches = known[decisive].first_items
        count_batches(trainer, batches)
        items = tuple(sampler.first_items for sampler in known)
        self._beginning = _Beginning(fit.epoch_progress.current.ready, batches, items)


class LateIterator(Iterator[Any]):
    """Begins a pass when the first batch is asked for, as Lightning does in every epoch but the first.

    Args:
        loader: What to iterate over.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)


def begin_late(trainer: Any) -> None:
    """Throw the pass away that Lightning began while setting up: hooks may draw random numbers first."""
    fetcher = trainer.fit_loop._data_fetcher
    loaders = trainer.fit_loop._combined_loader.flattened
    if fetcher.length is not None and not any(map(_has_state, loaders)):
        fetcher.iterator = LateIterator(fetcher.combined_loader)


def data_parallel_rank_and_size(trainer: Any) -> tuple[int, int]:
    """Which share of the data this rank reads."""
    share = trainer.distributed_sampler_kwargs
    return (0, 1) if share is None else (share["rank"], share["num_replicas"])


def _has_state(loader: Any) -> bool:
    """Whether Lightning saves and restores the loader through its own state."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def _length(sampler: TrackedSampler) -> float:
    try:
        return len(sampler)
    except TypeError:
        return float("inf")


def _in_pass(items: int, sampler: TrackedSampler, mode: str) -> int:
    """Of some batches in all, how many belong to the current pass of a loader among several."""
    length = _length(sampler)
    if items <= length:
        return items
    return int(length) if mode == "max_size" else (items - 1) % int(length) + 1

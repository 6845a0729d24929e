"""Exact resume of a Trainer: each rank's random state and its position in the data.

Lightning restores weights, optimizers and counters; data it reads again from the beginning of the epoch, and
random numbers it draws anew. This module saves what is missing for each rank, and puts it back when it
counts: the position when the loaders are made, random numbers just before training begins. Where the strategy
is Lightning's own, `nnx_core.lightning.callbacks` calls it.

Loaders over a dataset with indices pass over what has been seen; those that have a state of their own are
Lightning's to restore; others start over.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from nnx_base.ranks import control_group, together
from nnx_checkpoint.reading.naming import RANKS
from nnx_core import random_state
from nnx_core.errors import CheckpointError
from nnx_core.lightning.beginning import another_batch, size_of_loader
from nnx_core.lightning.resume.loaders import track, tracked, untrack
from nnx_core.lightning.resume.loops import Interruption, complete_batch, count_batches, interruption
from nnx_core.lightning.resume.positions import Position, TrackedSampler

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
        said: A sentence about the resumed data, for the user.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self._place: Interruption | None = None
        self._saved: Sequence[Position | None] = ()
        self._index = 0
        self._beginning: _Beginning | None = None
        self._loaders: list[Any] = []
        self._final: list[Position | None] | None = None

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
        size = _data_parallel_size(trainer)
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

    def resume_at(self, place: Interruption | None, saved: Sequence[Position | None]) -> None:
        """Remember where the saved run stood, for the loaders that `process` will see.

        Args:
            place: The place at which it was interrupted, by Lightning's counters.
            saved: The position of every loader; empty if the checkpoint has none.
        """
        self._place, self._saved, self._index, self.said = place, saved, 0, []

    def process(self, trainer: Any, loader: Any) -> None:
        """Follow a training loader; after `resume_at`, make its first pass begin in the middle."""
        self._final = None
        index, self._index = self._index, self._index + 1
        inside = self._place is not None and self._place.inside
        # Over a dataset with indices, seen data can be passed over without loading it.
        is_skippable = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not is_skippable or _has_state(loader):
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
            self._begin_at(sampler, saved, _data_parallel_size(trainer))

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


def begin_late(trainer: Any) -> None:
    """Throw the pass away that Lightning began while setting up: hooks may draw random numbers first."""
    fetcher = trainer.fit_loop._data_fetcher
    loaders = trainer.fit_loop._combined_loader.flattened
    if fetcher.length is not None and not any(map(_has_state, loaders)):
        fetcher.iterator = _late_iterator(fetcher.combined_loader)


def _late_iterator(loader: Any) -> Iterator[Any]:
    """Begins a pass when the first batch is asked for, as Lightning does in every epoch but the first."""
    yield from loader


def _data_parallel_size(trainer: Any) -> int:
    share = trainer.distributed_sampler_kwargs
    return 1 if share is None else share["num_replicas"]


def _has_state(loader: Any) -> bool:
    """Return True if Lightning saves and restores the loader through its own state."""
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


_NO_DATA: Mapping[str, Any] = {"loaders": (), "stateful": ()}
"""Fabric's checkpoints hold random state alone."""


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The checkpoint's record of the run to resume.

    Attributes:
        place: The place at which it was interrupted; None where the checkpoint has no loops.
        own: The state that this rank had saved; None if there were fewer ranks.
        first: The state that rank 0 had saved; empty if there is none.
        step: The step that it had come to.
        said: Sentences that the user should read.
    """

    place: Interruption | None
    own: Mapping[str, Any] | None
    first: Mapping[str, Any]
    step: int
    said: list[str] = field(default_factory=list)


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
        self._opened: _Resumed | None = None
        self._resumed: _Resumed | None = None
        self._samples: int | None = None
        self._batch_before: int | None = None

    def state(self, trainer: Any) -> dict[str, Any]:
        """This rank's random state and data position, as plain data."""
        positions = [] if self._data is None else self._data.positions(trainer)
        return {
            **random_state.RandomState().state_dict(),
            "global_batch": self._global_batch(trainer),
            "data": {
                "loaders": [None if position is None else position.as_dict() for position in positions],
                "stateful": trainer.fit_loop.on_save_checkpoint().get("combined_loader", []),
            },
        }

    def _global_batch(self, trainer: Any) -> int | None:
        """The samples of a step; None before the first batch, and where their number changes."""
        if self._samples is None or _is_scheduled(trainer):
            return None
        return self._samples * int(trainer.accumulate_grad_batches)

    def compare_batch(self, trainer: Any, batch: Any, *, own_batch: str) -> None:
        """Note how many samples a step takes, and warn where the checkpoint was trained with another number.

        Args:
            trainer: The Trainer, in its first training step.
            batch: The batch of that step.
            own_batch: The option that gives every rank a batch of its own.
        """
        size = size_of_loader(trainer.train_dataloader, batch)
        shares = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        self._samples = None if size is None else size * shares
        before, self._batch_before = self._batch_before, None
        if before is None or size is None or _is_scheduled(trainer):
            return
        ranks, accumulate = trainer.world_size, int(trainer.accumulate_grad_batches)
        said = another_batch(
            before, size, ranks=ranks, shares=shares, accumulate=accumulate, own_batch=own_batch
        )
        if said:
            rank_zero_warn(f"Resuming: {said}")

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
        place = interruption(checkpoint, iteration_based=trainer.max_steps != -1)
        rank, step = trainer.global_rank, checkpoint.get("global_step", 0)
        with together(control_group(), doing="reading the random state"):
            first = self._read_first(ranks)
            own = ranks[rank] if rank < first.get("world_size", 0) else None
            opened = _Resumed(place, own, first, step)
            if first and place is not None:
                opened.said.extend(_put_loader_states(trainer, opened, ranks, checkpoint))
        self._opened = opened

    def activate(self) -> None:
        """Let the next training resume at the position of the opened checkpoint.

        Called when Trainer restores the training state. What trained before it, since the checkpoint was
        opened, such as a search for a learning rate, began anew.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self._resumed = opened
        if self._data is not None:
            data = (opened.own or opened.first).get("data", _NO_DATA)
            loaders = [None if saved is None else Position(**saved) for saved in data["loaders"]]
            self._data.resume_at(opened.place, loaders)

    def _read_first(self, ranks: Any) -> Mapping[str, Any]:
        first: Mapping[str, Any] = ranks[0] if len(ranks) > 0 else {}
        if "rng" in first:
            return first
        if self.strict_rng:
            raise CheckpointError(
                "the checkpoint holds no random state, so randomness cannot go on exactly.",
                remedy="Resume from one that an nnx strategy, or nnx.CheckpointIO, saved while training; or "
                "pass strict_rng=False.",
            )
        return {}

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
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        if self._data is not None:
            self._data.start(trainer)
            resumed.said.extend(self._data.said)
        if resumed.place is not None:
            if not resumed.place.inside:
                begin_late(trainer)
            complete_batch(trainer)
        self._batch_before = resumed.first.get("global_batch")
        if resumed.first:
            said = random_state.resume(
                None if resumed.own is None else resumed.own["rng"],
                seed=resumed.first["rng"]["seed"],
                rank=trainer.global_rank,
                size=trainer.world_size,
                saved_size=resumed.first["world_size"],
                step=resumed.step,
                strict=self.strict_rng,
            )
            resumed.said.extend([said] if said else [])
        for said in resumed.said:
            rank_zero_warn(f"Resuming: {said}")

    def close(self, trainer: Any) -> None:
        """Leave the user's loaders unchanged, and drop positions that were not resumed."""
        self._opened = self._resumed = self._batch_before = None
        if self._data is not None:
            self._data.close(trainer)


def _is_scheduled(trainer: Any) -> bool:
    """Return True if the number of batches of a step changes from epoch to epoch."""
    callbacks = getattr(trainer, "accumulation_scheduler", None), *trainer.callbacks
    return any(len(getattr(callback, "scheduling", ())) > 1 for callback in callbacks)


def _put_loader_states(trainer: Any, saved: _Resumed, ranks: Any, checkpoint: dict[str, Any]) -> list[str]:
    """Lightning restores loaders that have a state; it would give every rank that of rank 0.

    Returns:
        Return the note for the user.
    """
    if not saved.first.get("data", _NO_DATA)["stateful"]:
        return []
    loops = checkpoint["loops"]["fit_loop"]["state_dict"]
    size, saved_size = trainer.world_size, saved.first["world_size"]
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

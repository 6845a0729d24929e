"""Exact resume of a Trainer: each rank's random state and its position in the data.

Lightning restores weights, optimizers and counters, but it restarts the data of the epoch and the random
numbers. This module saves both for each rank. It restores the position when the loaders are made, and the
random state right before training begins. Under Lightning's own strategies, `nnx_core.lightning.callbacks`
calls it.

Loaders over a dataset with indices skip the samples already seen. Lightning restores loaders with a state of
their own. Other loaders start over.
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
    """An epoch that this process began in the middle: its number, the skipped batches (all, by loader)."""

    epoch: int
    batches: int
    items: tuple[int, ...]


class TrainingData:
    """Tracks the positions of a Trainer's training loaders, and resumes them inside an epoch.

    Attributes:
        notes: Sentences for the user about the resumed data.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._interruption: Interruption | None = None
        self._saved: Sequence[Position | None] = ()
        self._index = 0
        self._beginning: _Beginning | None = None
        self._loaders: list[Any] = []
        self._shares = 1
        self._final: list[Position | None] | None = None

    def positions(self, trainer: Any) -> list[Position | None]:
        """Return the position of every training loader; None for those that cannot skip samples."""
        if self._final is not None:
            return self._final
        fit = trainer.fit_loop
        if fit._combined_loader is None:
            return []
        loaders = fit._combined_loader.flattened
        begun = self._beginning
        if begun is None or begun.epoch != fit.epoch_progress.current.ready:
            begun = _Beginning(0, 0, (0,) * len(loaders))
        # Lightning's counter, not the samplers', tells the consumed batches: workers fetch ahead of training.
        since = fit.epoch_loop.batch_progress.current.processed - begun.batches
        samplers = [tracked(loader) for loader in loaders]
        mode = fit._combined_loader._mode
        return [
            None
            if sampler is None
            else sampler.position(_in_pass(first + since, sampler, mode), self._shares)
            for sampler, first in zip(samplers, begun.items, strict=True)
        ]

    def close(self, trainer: Any) -> None:
        """Restore the loaders' samplers, and keep the positions for a checkpoint that is saved afterwards."""
        if self._loaders:
            self._final = self.positions(trainer)
        for loader in self._loaders:
            untrack(loader)
        self._loaders = []
        self.resume_at(None, ())

    def resume_at(self, interruption: Interruption | None, saved: Sequence[Position | None]) -> None:
        """Set the position of the saved run, for the next loaders that `process` gets.

        Args:
            interruption: The interruption of the saved run, by Lightning's counters.
            saved: The position of every loader; empty if the checkpoint has none.
        """
        self._interruption, self._saved, self._index, self.notes = interruption, saved, 0, []

    def process(self, trainer: Any, loader: Any) -> None:
        """Track a training loader; after `resume_at`, begin its first pass at the saved position."""
        self._final = None
        index, self._index = self._index, self._index + 1
        inside = self._interruption is not None and self._interruption.inside
        # A dataset with indices lets the sampler skip seen samples without loading them.
        is_skippable = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not is_skippable or _has_state(loader):
            if inside and not _has_state(loader):
                self.notes.append(
                    f"the training data of {type(loader).__name__} starts over, because it has neither "
                    "indices to skip nor `state_dict` and `load_state_dict`."
                )
            return
        sampler = track(loader)
        self._loaders.append(loader)
        self._shares = _shares_of_data(trainer)
        saved = self._saved[index] if index < len(self._saved) else None
        if saved is not None and saved.seed is not None and hasattr(sampler.leaf, "seed"):
            sampler.leaf.seed = saved.seed
        if not inside:
            return
        set_epoch = getattr(sampler.leaf, "set_epoch", None)
        if callable(set_epoch):  # workers fetch indices before Lightning sets the epoch
            set_epoch(trainer.fit_loop.epoch_progress.current.processed)
        if saved is None:
            self._begin_without_position(sampler)
        else:
            self._begin_at(sampler, saved, self._shares)

    def _begin_without_position(self, sampler: TrackedSampler) -> None:
        """Begin at the batch count of a checkpoint of Lightning, which assumes the same world size."""
        assert self._interruption is not None
        items = _in_pass(self._interruption.batches, sampler, "max_size_cycle")
        sampler.begin_at(sampler.units_before(items), None)

    def _begin_at(self, sampler: TrackedSampler, saved: Position, size: int) -> None:
        order = type(sampler.leaf).__name__
        if (saved.order, saved.unit) != (order, sampler.unit):
            self.notes.append(
                f"the order of the training data was made by {saved.order} and now is by {order}, so samples "
                "of this epoch may be seen twice or not at all."
            )
        units, left = divmod(saved.consumed, size)
        if left:
            self.notes.append(
                f"{saved.consumed} {saved.unit} of this epoch were seen, which is no multiple of {size} "
                f"ranks: {left} of them will be seen again."
            )
        sampler.begin_at(units, saved.started_from)

    def start(self, trainer: Any) -> None:
        """Set Lightning's counters to the position of the loaders, when training begins.

        Raises:
            CheckpointError: This run has another number of loaders than the saved one.
        """
        interrupted, self._interruption = self._interruption, None
        if interrupted is None:
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
            # A pass that is drawn again ends with the right generators by itself. Any other pass, such as the
            # next epoch's, must begin from the generators of the time of the save.
            if saved is not None and not (interrupted.inside and saved.started_from):
                sampler.restore_generators(saved.generators)
        if interrupted.inside:
            self._count_from(trainer, samplers)

    def _count_from(self, trainer: Any, samplers: Sequence[TrackedSampler | None]) -> None:
        """Set Lightning's batch count from the loader that determines the length of the epoch."""
        fit = trainer.fit_loop
        combined = fit._combined_loader
        known = [sampler for sampler in samplers if sampler is not None]
        if len(known) < len(samplers):
            return
        warnings.filterwarnings("ignore", message=_LIGHTNINGS_WARNING)  # it cannot know that the data resumes
        lengths = [
            min(_length(sampler), limit) for sampler, limit in zip(known, combined.limits, strict=True)
        ]
        # Another world size changes the number of batches per epoch, so the count comes from the sampler, and
        # not from the checkpoint.
        decisive = (min if combined._mode == "min_size" else max)(range(len(known)), key=lengths.__getitem__)
        batches = known[decisive].first_items
        count_batches(trainer, batches)
        items = tuple(sampler.first_items for sampler in known)
        self._beginning = _Beginning(fit.epoch_progress.current.ready, batches, items)


def begin_late(trainer: Any) -> None:
    """Restart the pass that Lightning began during setup, with the restored random state.

    In later epochs hooks run, and may draw random numbers, before the sampler draws the order.
    """
    fetcher = trainer.fit_loop._data_fetcher
    loaders = trainer.fit_loop._combined_loader.flattened
    if fetcher.length is not None and not any(map(_has_state, loaders)):
        fetcher.iterator = _late_iterator(fetcher.combined_loader)


def _late_iterator(loader: Any) -> Iterator[Any]:
    """Begin a pass with the first batch, as Lightning does in every epoch but the first."""
    yield from loader


def _shares_of_data(trainer: Any) -> int:
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
    """Return the number of batches in the current pass of a loader, from a total over several passes."""
    length = _length(sampler)
    if items <= length:
        return items
    return int(length) if mode == "max_size" else (items - 1) % int(length) + 1


_NO_DATA: Mapping[str, Any] = {"loaders": (), "stateful": ()}
"""The data of a checkpoint of Fabric, which holds only random state."""


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The checkpoint's record of the run to resume.

    Attributes:
        interrupted: The interruption of the run; None if the checkpoint has no loops.
        own: The saved state of this rank; None if there were fewer ranks.
        first: The saved state of rank zero; empty if there is none.
        step: The global step.
        notes: Sentences for the user.
    """

    interrupted: Interruption | None
    own: Mapping[str, Any] | None
    first: Mapping[str, Any]
    step: int
    notes: list[str] = field(default_factory=list)


class ExactResume:
    """Saves and restores random state and data position of one Trainer on this rank.

    Args:
        resume_data: ``"skip"`` skips the samples that the epoch has seen; ``"restart"`` leaves the loaders to
            the user and to Lightning.
        strict_rng: Refuse checkpoints whose random state cannot be resumed exactly.
    """

    def __init__(self, *, resume_data: str, strict_rng: bool) -> None:
        self.strict_rng = strict_rng
        self._data = TrainingData() if resume_data == "skip" else None
        self._opened: _Resumed | None = None
        self._resumed: _Resumed | None = None
        self._samples: int | None = None
        self._batch_before: int | None = None

    def state(self, trainer: Any) -> dict[str, Any]:
        """Return this rank's random state and data position, as plain data."""
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
        """Return the samples of a step; None before the first batch, and if the number changes."""
        if self._samples is None or _is_scheduled(trainer):
            return None
        return self._samples * int(trainer.accumulate_grad_batches)

    def compare_batch(self, trainer: Any, batch: Any, *, own_batch: str) -> None:
        """Store the global batch size, and warn if the checkpoint was trained with another one.

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
        note = another_batch(
            before, size, ranks=ranks, shares=shares, accumulate=accumulate, own_batch=own_batch
        )
        if note:
            rank_zero_warn(f"Resuming: {note}")

    def load(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Read the state to resume from an opened checkpoint, for `activate`. Collective.

        Args:
            trainer: The Trainer; only its ``fit`` resumes, evaluation does not.
            checkpoint: Lightning's dict; its counters are corrected.

        Raises:
            CheckpointError: It holds no random state, and `strict_rng` is set.
        """
        ranks = checkpoint.pop(RANKS, ())
        self._opened = None
        if trainer.state.fn != "fit":
            return
        interrupted = interruption(checkpoint, iteration_based=trainer.max_steps != -1)
        rank, step = trainer.global_rank, checkpoint.get("global_step", 0)
        with together(control_group(), doing="reading the random state"):
            first = self._read_first(ranks)
            own = ranks[rank] if rank < first.get("world_size", 0) else None
            opened = _Resumed(interrupted, own, first, step)
            if first and interrupted is not None:
                opened.notes.extend(_put_loader_states(trainer, opened, ranks, checkpoint))
        self._opened = opened

    def activate(self) -> None:
        """Resume the next training at the position of the opened checkpoint.

        Trainer calls it when it restores the training state. Training between `load` and this call, such as a
        learning rate finder's, must start at the beginning.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self._resumed = opened
        if self._data is not None:
            data = (opened.own or opened.first).get("data", _NO_DATA)
            loaders = [None if saved is None else Position(**saved) for saved in data["loaders"]]
            self._data.resume_at(opened.interrupted, loaders)

    def _read_first(self, ranks: Any) -> Mapping[str, Any]:
        first: Mapping[str, Any] = ranks[0] if len(ranks) > 0 else {}
        if "rng" in first:
            return first
        if self.strict_rng:
            raise CheckpointError(
                "the checkpoint holds no random state, so random numbers cannot resume exactly.",
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
        """Restore counters and random state, last of all before the first batch.

        Raises:
            CheckpointError: This run has other loaders; or another number of ranks, with `strict_rng`.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        if self._data is not None:
            self._data.start(trainer)
            resumed.notes.extend(self._data.notes)
        if resumed.interrupted is not None:
            if not resumed.interrupted.inside:
                begin_late(trainer)
            complete_batch(trainer)
        self._batch_before = resumed.first.get("global_batch")
        # Setup, the sanity check and the samplers above have drawn from the generators, so these come last.
        if resumed.first:
            note = random_state.resume(
                None if resumed.own is None else resumed.own["rng"],
                seed=resumed.first["rng"]["seed"],
                rank=trainer.global_rank,
                size=trainer.world_size,
                saved_size=resumed.first["world_size"],
                step=resumed.step,
                strict=self.strict_rng,
            )
            resumed.notes.extend([note] if note else [])
        for note in resumed.notes:
            rank_zero_warn(f"Resuming: {note}")

    def close(self, trainer: Any) -> None:
        """Restore the user's loaders, and drop positions that were not resumed."""
        self._opened = self._resumed = self._batch_before = None
        if self._data is not None:
            self._data.close(trainer)


def _is_scheduled(trainer: Any) -> bool:
    """Return True if the number of batches of a step changes from epoch to epoch."""
    callbacks = getattr(trainer, "accumulation_scheduler", None), *trainer.callbacks
    return any(len(getattr(callback, "scheduling", ())) > 1 for callback in callbacks)


def _put_loader_states(trainer: Any, saved: _Resumed, ranks: Any, checkpoint: dict[str, Any]) -> list[str]:
    """Put this rank's loader states into the checkpoint: Lightning would restore rank zero's on every rank.

    Returns:
        The notes for the user.
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
            f"{size} ranks: that is right unless they count the samples of one rank."
        ]
    loops.pop("combined_loader", None)
    return [
        f"the training loaders start over, because each of {saved_size} ranks had a state of its own and "
        f"this run has {size}."
    ]


def _all_equal(states: Sequence[Any]) -> bool:
    try:
        return all(bool(state == states[0]) for state in states)
    except (RuntimeError, ValueError):  # the comparison of tensors and arrays has no single truth value
        return False

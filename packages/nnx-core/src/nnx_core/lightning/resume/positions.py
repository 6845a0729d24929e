"""The position of a `DataLoader` in its pass over the data, and how to continue from it.

The position is kept at the sampler: what a run has seen is passed over as indices, and no sample is
loaded only to be dropped. It counts over all data-parallel ranks, so that another number of ranks goes on
from it. A shuffled order is made again from the random state in which the sampler made it. This module
knows torch's loaders; it knows neither files nor Lightning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from nnx_core import random_state


@dataclass(frozen=True, slots=True)
class Position:
    """How far the data of one loader has been consumed in its current pass.

    Attributes:
        consumed: Over all data-parallel ranks; in samples, or in items of a sampler whose samples are not
            known, such as a batch sampler of the user's.
        unit: ``"samples"`` or ``"items"``.
        order: Class of the sampler that made the order.
        seed: The seed of a ``DistributedSampler``.
        started_from: Random state in which the sampler made the order; None if it has not begun.
        generators: States, now, of the generators that the loader and its samplers were given.
    """

    consumed: int
    unit: str
    order: str
    seed: int | None = None
    started_from: dict[str, Any] | None = None
    generators: list[bytes] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `Position` takes it as keyword arguments."""
        return asdict(self)


class TrackedSampler(Sampler[Any]):
    """Stands in for a loader's index sampler: remembers how its pass began, and can begin in the middle.

    Args:
        inner: The sampler that the loader would take its indices from: its batch sampler, or its sampler
            where it does not batch.
        generators: The generators that the loader and its samplers draw from, other than the global ones.

    Attributes:
        first: Units of the current pass that were passed over at its beginning, on this rank.
        first_items: The same in items, which are batches unless the loader does not batch.
        started_from: Random state in which the current pass began.
    """

    def __init__(self, inner: Any, generators: list[torch.Generator]) -> None:
        self.inner = inner
        self.generators = generators
        self.first = 0
        self.first_items = 0
        self.started_from: dict[str, Any] | None = None
        self._next_pass: tuple[int, dict[str, Any] | None] = (0, None)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner sampler's."""
        if name == "inner":  # while an instance is being rebuilt
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def unit(self) -> str:
        """The unit of `first`."""
        return "samples" if self._batch_size is not None else "items"

    @property
    def leaf(self) -> Any:
        """The sampler that decides the order of samples."""
        return getattr(self.inner, "sampler", self.inner)

    @property
    def _batch_size(self) -> int | None:
        return self.inner.batch_size if type(self.inner) is BatchSampler else None

    def begin_at(self, units: int, started_from: dict[str, Any] | None) -> None:
        """Make passes begin in the middle, until `begin_at_start`. A loader may ask for several to use one.

        Args:
            units: The number of units of this rank's share to pass over.
            started_from: Random state in which the saved run began this pass.
        """
        self._next_pass = units, started_from

    def begin_at_start(self) -> None:
        """Make the passes after those that were asked for begin at their beginning."""
        self._next_pass = (0, None)

    def __iter__(self) -> Iterator[Any]:
        self.first, self.started_from = self._next_pass
        self.first_items = self.items_before(self.first)
        if self.started_from is None:
            return self._begin(self.first)
        return self._begin_again(self.first, self.started_from)

    def _begin(self, first: int) -> Iterator[Any]:
        self.started_from = {**random_state.capture(host_only=True), "generators": self.generator_states()}
        yield from self._from(first)

    def _begin_again(self, first: int, started_from: dict[str, Any]) -> Iterator[Any]:
        """Draw the order from where it was drawn before, leaving the run's random state as it is."""
        with random_state.host_state_kept():
            random_state.restore(started_from)
            self.restore_generators(started_from["generators"])
            rest = self._from(first)
            # Samplers draw when the first index is asked for, which passing over others has done already.
            drawn = list(itertools.islice(rest, 0 if first else 1))
        yield from itertools.chain(drawn, rest)

    def _from(self, units: int) -> Iterator[Any]:
        size = self._batch_size
        indices: Iterator[Any] = iter(self.inner if size is None else self.inner.sampler)
        for _ in itertools.islice(indices, units):
            pass
        if size is None:
            return indices
        return iter(BatchSampler(indices, size, self.inner.drop_last))

    def generator_states(self) -> list[bytes]:
        """States of the loader's own generators."""
        return [generator.get_state().numpy().tobytes() for generator in self.generators]

    def restore_generators(self, states: list[bytes]) -> None:
        """Put the loader's own generators into states that `generator_states` returned."""
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def items_before(self, units: int) -> int:
        """How many items of a pass those are of which only the rest is left after some units."""
        size = self._batch_size
        if size is None:
            return units
        try:
            left = max(len(self.inner.sampler) - units, 0)
            total = len(self.inner)
        except TypeError:  # no length
            return units // size
        return total - (left // size if self.inner.drop_last else -(-left // size))

    def units_before(self, items: int) -> int:
        """How many units the first items of the current pass are, those that were passed over included."""
        size = self._batch_size
        if size is None:
            return items
        units = self.first + (items - self.first_items) * size
        try:
            return min(units, len(self.inner.sampler))
        except TypeError:  # no length
            return units

    def position(self, items: int, data_parallel_size: int) -> Position:
        """The position after some items of the current pass."""
        return Position(
            consumed=self.units_before(items) * data_parallel_size,
            unit=self.unit,
            order=type(self.leaf).__name__,
            seed=self.leaf.seed if isinstance(self.leaf, DistributedSampler) else None,
            started_from=self.started_from,
            generators=self.generator_states(),
        )

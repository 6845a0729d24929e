"""The position of a `DataLoader` in its pass over the data, and how to resume from it.

The sampler holds the position: it skips seen samples as indices, so no sample is loaded only to be dropped.
The position counts over all data-parallel ranks, so another number of ranks can resume from it. A shuffled
order is drawn again from the saved random state of the sampler. This module depends on torch's loaders, and
neither on files nor on Lightning.
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
    """The position of one loader in its current pass.

    Attributes:
        consumed: The number of consumed units over all data-parallel ranks.
        unit: ``"samples"``, or ``"items"`` of a sampler with unknown batch sizes, as a custom batch sampler.
        order: The class name of the sampler that made the order.
        seed: The seed of a ``DistributedSampler``.
        started_from: The random state at the beginning of the pass; None before its beginning.
        generators: The current states of the generators of the loader and its samplers.
    """

    consumed: int
    unit: str
    order: str
    seed: int | None = None
    started_from: dict[str, Any] | None = None
    generators: list[bytes] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, which `Position` takes as keyword arguments."""
        return asdict(self)


class TrackedSampler(Sampler[Any]):
    """Wraps a loader's index sampler: records the beginning of each pass, and can begin in the middle.

    Args:
        inner: The wrapped sampler: the loader's batch sampler, or its sampler if it does not batch.
        generators: The generators that the loader and its samplers draw from, other than the global ones.

    Attributes:
        first: The number of units that the current pass skipped at its beginning, on this rank.
        first_items: `first` in items, which are batches unless the loader does not batch.
        started_from: The random state at the beginning of the current pass.
    """

    def __init__(self, inner: Any, generators: list[torch.Generator]) -> None:
        self.inner = inner
        self.generators = generators
        self.first = 0
        self.first_items = 0
        self.started_from: dict[str, Any] | None = None
        self._next_pass: tuple[int, dict[str, Any] | None] = (0, None)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner sampler."""
        if name == "inner":  # during unpickling, before `inner` is set
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
        """Begin passes in the middle until `begin_at_start`: a loader may create several to use one.

        Args:
            units: The number of units of this rank to skip.
            started_from: The random state in which the saved run began this pass.
        """
        self._next_pass = units, started_from

    def begin_at_start(self) -> None:
        """Begin later passes at their beginning."""
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
        """Draw the order again from its saved random state; the run's own random state does not change."""
        with random_state.host_state_kept():
            random_state.restore(started_from)
            self.restore_generators(started_from["generators"])
            rest = self._from(first)
            # Samplers draw their order at the first index, so it must be fetched in this context. Skipping
            # does so; without a skip one index is fetched here.
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
        """Return the states of the loader's own generators."""
        return [generator.get_state().numpy().tobytes() for generator in self.generators]

    def restore_generators(self, states: list[bytes]) -> None:
        """Restore the loader's own generators from `generator_states`."""
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def items_before(self, units: int) -> int:
        """Return the number of items that are consumed, at least in part, after some units of a pass.

        Another world size may stop inside a batch. The batches of the remaining units then define the count.
        """
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
        """Return the number of units in the first items of the current pass, skipped ones included."""
        size = self._batch_size
        if size is None:
            return items
        units = self.first + (items - self.first_items) * size
        try:
            return min(units, len(self.inner.sampler))
        except TypeError:  # no length
            return units

    def position(self, items: int, data_parallel_size: int) -> Position:
        """Return the position after some items of the current pass."""
        return Position(
            consumed=self.units_before(items) * data_parallel_size,
            unit=self.unit,
            order=type(self.leaf).__name__,
            seed=self.leaf.seed if isinstance(self.leaf, DistributedSampler) else None,
            started_from=self.started_from,
            generators=self.generator_states(),
        )

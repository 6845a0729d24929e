"""Global batches of one size, of which each group loads its share, drawn when the quorum is known.

The order of an epoch is drawn whole, from the seed and the epoch, so it is the same in every group and does
not depend on their number. Group k of n loads the indices ``[k::n]`` of a global batch. Data workers fetch
ahead for the quorum that they know: after a change of the quorum their batches are dropped and loaded again.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from nnx_core import random_state
from nnx_core.errors import UnsupportedError
from nnx_torchft._torch_compat import with_batches

__all__ = ["ElasticLoader", "Share", "refuse_loader"]


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a group in each global batch.

    Attributes:
        index: The index of the group among those of the quorum.
        of: The number of groups.

    Example:
        >>> Share(1, 3).take([10, 11, 12, 13, 14])
        [11, 14]
        >>> Share(1, 3).weight(5)
        0.4
    """

    index: int
    of: int

    def take(self, batch: Sequence[int]) -> list[int]:
        """Return the indices of this group; one that does not count if there are more groups than samples."""
        return list(batch[self.index :: self.of]) or list(batch[:1])

    def weight(self, samples: int) -> float:
        """Return the part of a global batch's samples that this group has."""
        return len(range(self.index, samples, self.of)) / samples


class _Batches:
    """The global batches of an epoch, as indices in two arrays."""

    def __init__(self, batches: Iterator[Sequence[int]]) -> None:
        self._indices, self._ends = array("q"), array("q", [0])
        for batch in batches:
            try:
                self._indices.extend(batch)
            except TypeError:
                raise UnsupportedError(
                    f"the sampler yields {batch!r}, and elastic training divides lists of indices.",
                    remedy="Use a sampler of integer indices, or pass data='drop'.",
                ) from None
            self._ends.append(len(self._indices))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> array[int]:
        return self._indices[self._ends[number] : self._ends[number + 1]]


class _ShareSampler(Sampler[list[int]]):
    """Yields a group's indices of the remaining global batches of an epoch."""

    def __init__(self) -> None:
        self.batches, self.first, self.share = _Batches(iter(())), 0, Share(0, 1)

    def __iter__(self) -> Iterator[list[int]]:
        share = self.share
        for number in range(self.first, len(self.batches)):
            yield share.take(self.batches[number])

    def __len__(self) -> int:
        return len(self.batches) - self.first


class ElasticLoader:
    """A loader whose batches are this group's shares of global batches.

    Args:
        loader: The user's loader; its batch size is the size of the global batch.
        seed: The seed of the run.
        epoch: Returns the number of the current epoch.
        before: Called with the position of each batch in the epoch before it is loaded; returns the share.
    """

    def __init__(
        self, loader: DataLoader[Any], *, seed: int, epoch: Callable[[], int], before: Callable[[int], Share]
    ) -> None:
        self.loader = loader
        self._seed, self._epoch, self._before = seed, epoch, before
        self._sampler = _ShareSampler()
        self._own = with_batches(loader, self._sampler)
        self._iterator: Iterator[Any] | None = None
        self._next = self._ahead = 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's loader."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> ElasticLoader:
        epoch = self._epoch()
        with random_state.host_state_kept():
            seed = _seed(self._seed, epoch)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            for generator in getattr(self.loader.batch_sampler, "generators", ()):
                generator.manual_seed(seed)
            self._sampler.batches = _Batches(iter(self.loader.batch_sampler))  # type: ignore[arg-type]
        self._next, self._iterator = 0, None
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._sampler.batches):
            raise StopIteration
        position, self._next = self._next, self._next + 1
        return self.fetch(position, self._before(position))

    def fetch(self, position: int, share: Share) -> Any:
        """Load a share of a global batch of this epoch; batches that were fetched for another are dropped."""
        sampler, own = self._sampler, self._own
        if self._iterator is None or (position, share) != (self._ahead, sampler.share):
            sampler.first, sampler.share = position, share
            own.generator.manual_seed(_seed(self._seed, self._epoch(), position, share.index))
            self._iterator = iter(own)
        self._ahead = position + 1
        return next(self._iterator)

    @property
    def batch_size_of_epoch(self) -> int:
        """The number of samples of the first global batch of this epoch."""
        return self.size(0) if len(self._sampler.batches) else 0

    def size(self, position: int) -> int:
        """Return the number of samples of a global batch of this epoch."""
        return len(self._sampler.batches[position])

    def close(self) -> None:
        """End the data workers."""
        self._iterator, self._own = None, self.loader


def refuse_loader(loader: Any) -> None:
    """Refuse a training loader whose global batches cannot be divided by index.

    Raises:
        UnsupportedError: It is no `DataLoader` over a dataset with indices, or it does not batch.
    """
    remedy = "Use a DataLoader over a dataset with `__getitem__` and `__len__`, or pass data='drop'."
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"elastic training divides the batches of a DataLoader, and got a {type(loader).__name__}.",
            remedy=remedy,
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no index, so the "
            "samples of a lost group would be lost.",
            remedy=remedy,
        )
    if callable(getattr(loader, "state_dict", None)):
        raise UnsupportedError(
            f"{type(loader).__name__} keeps a position of its own, and groups share one.", remedy=remedy
        )
    if loader.batch_sampler is None:
        raise UnsupportedError(
            "the training loader has batch_size=None, and elastic training divides batches.",
            remedy="Pass the size of the global batch as `batch_size`.",
        )


def _seed(*parts: int) -> int:
    digest = blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

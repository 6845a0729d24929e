"""The data of the checks: fixed, and cut so that step *k* sees the same samples at every world size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from nnx.testing.conformance.task import GLOBAL_BATCH, Task

__all__ = ["ConsecutiveSampler", "dataset", "loader", "share_of"]

FEATURES = 6


class ConsecutiveSampler(Sampler[list[int]]):
    """Gives each rank its consecutive slice of every global batch, in order.

    Args:
        samples: Length of the dataset; where it is no multiple of the global batch, the last one is smaller.
        num_replicas: Ranks that share the data.
        rank: Which of them this is.
    """

    def __init__(self, samples: int, *, num_replicas: int, rank: int) -> None:
        self.samples, self.replicas, self.rank = samples, num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.samples, GLOBAL_BATCH):
            share = min(GLOBAL_BATCH, self.samples - start) // self.replicas
            first = start + self.rank * share
            yield list(range(first, first + share))

    def __len__(self) -> int:
        return math.ceil(self.samples / GLOBAL_BATCH)


def dataset(task: Task) -> TensorDataset:
    """An epoch of a fixed regression: inputs and targets of shape ``[samples, FEATURES]``."""
    samples = (task.batches - 1) * GLOBAL_BATCH + task.last_batch
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs).roll(1, dims=1) * 2
    return TensorDataset(inputs.to(task.torch_dtype), targets.to(task.torch_dtype))


def share_of(trainer: Any) -> dict[str, int]:
    """Which share of the data this rank reads, as the strategy says."""
    kwargs: dict[str, int] = getattr(
        trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
    )
    return {"num_replicas": kwargs["num_replicas"], "rank": kwargs["rank"]}


def loader(task: Task, trainer: Any) -> DataLoader[Any]:
    """The epoch, as this rank reads it."""
    data = dataset(task)
    return DataLoader(data, batch_sampler=ConsecutiveSampler(len(data), **share_of(trainer)))

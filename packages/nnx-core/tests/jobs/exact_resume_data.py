"""Training loaders of every kind, for runs that are interrupted and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

WIDTH = 4


@dataclass(frozen=True)
class Case:
    """One run, as data that travels to the workers.

    Attributes:
        loader: The kind of loader; see `loader_of`.
        samples: The size of the dataset.
        own_sampler: Leave the sampler to the loader, as with ``use_distributed_sampler=False``.
        save_at: The hook in which to save, and the number of its call; "afterwards" is after the run.
        plain: Write Lightning's own file instead.
    """

    strategy: str = "fsdp_auto"
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    epochs: int | None = 3
    steps: int = -1
    loader: str = "shuffled"
    workers: int = 0
    samples: int = 24
    batch: int = 3
    accumulate: int = 1
    validate: Any = None
    own_sampler: bool = False
    plain: bool = False
    save_at: tuple[str, int] = ("on_train_batch_end", 11)
    path: str = ""
    resume: str | None = None
    seed: int = 3


class Numbers(Dataset[tuple[int, Tensor]]):
    """Samples that know their number; in the main process they are augmented by all three generators."""

    def __init__(self, samples: int, augmented: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.data = torch.randn(samples, WIDTH, generator=generator)
        self.augmented = augmented
        self.loaded = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.loaded += 1
        noise = 0.0
        if self.augmented:
            noise = random.random() + np.random.rand() + float(torch.rand(()))
        return index, self.data[index] + noise


class Stream(IterableDataset[tuple[int, Tensor]]):
    """Data without indices."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return ((index, torch.full((WIDTH,), float(index))) for index in range(self.samples))


class Stateful:
    """A loader with a state of its own, which differs from rank to rank: an order that it drew at first."""

    def __init__(self, samples: int, batch: int, rank: int, size: int) -> None:
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        self.order = (torch.randperm(samples // size, generator=generator) * size + rank).tolist()
        self.batch, self.position = batch, 0

    def __len__(self) -> int:
        return len(self.order) // self.batch

    def __iter__(self) -> Iterator[Any]:
        start, self.position = self.position % len(self), 0
        return self._batches(start)

    def _batches(self, start: int) -> Iterator[Any]:
        for index in range(start, len(self)):
            self.position = index + 1
            ids = torch.tensor(self.order[index * self.batch : (index + 1) * self.batch])
            yield ids, ids[:, None].expand(-1, WIDTH) / 10

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position % len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]


class Uneven(Sampler[list[int]]):
    """A user's batch sampler, whose batches have several sizes; drawn from Python's generator."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 2 * (self.samples // 6)

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(self.samples), self.samples)
        for start in range(0, self.samples - 5, 6):
            yield order[start : start + 2]
            yield order[start + 2 : start + 6]


def loader_of(case: Case, trainer: Trainer, data: Numbers) -> Any:
    common: dict[str, Any] = {"num_workers": case.workers}
    if case.workers:
        common["multiprocessing_context"] = "fork"
    plain = {**common, "batch_size": case.batch}
    if case.loader == "ordered":
        return DataLoader(data, **plain)
    if case.loader == "shuffled":
        return DataLoader(data, shuffle=True, **plain)
    if case.loader == "drop_last":
        return DataLoader(data, shuffle=True, drop_last=True, **plain)
    if case.loader == "persistent":
        return DataLoader(data, shuffle=True, persistent_workers=True, **plain)
    if case.loader == "generator":
        generator = torch.Generator().manual_seed(case.seed)
        return DataLoader(data, shuffle=True, generator=generator, **plain)
    if case.loader == "replacement":
        return DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=21), **plain)
    if case.loader == "batch_sampler":
        return DataLoader(data, batch_sampler=Uneven(case.samples), **common)
    if case.loader == "unbatched":
        return DataLoader(data, batch_size=None, shuffle=True, **common)
    if case.loader == "stream":
        return DataLoader(Stream(case.samples), **plain)
    if case.loader == "stateful":
        return Stateful(case.samples, case.batch, trainer.global_rank, trainer.world_size)
    if case.loader == "equal states":
        torch.manual_seed(0)
        return Stateful(case.samples, case.batch, 0, 2)
    first = DataLoader(data, shuffle=True, **plain)
    second = DataLoader(Numbers(8, False), shuffle=True, **plain)
    if case.loader == "two":
        return [first, second]
    return CombinedLoader({"a": first, "b": second}, mode=case.loader)  # type: ignore[arg-type]

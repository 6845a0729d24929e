"""Which samples each rank reads: a sampler that Lightning injects, and one that the user brings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task, dataset, share_of
from nnx_conformance.training import make_trainer

_SAMPLES = 13
"""Not divisible by two or three: the last samples are padded."""


@check()
def sampler_shares(bench: Bench) -> None:
    """`strategy.distributed_sampler_kwargs` gives all ranks shares that fit together, equally often."""
    for world_size in bench.world_sizes:
        ranks = bench.run_once(_read, world_size=world_size)
        shares = [(read.share["rank"], read.share["num_replicas"]) for read in ranks]
        count = shares[0][1]
        taken = Counter(rank for rank, _ in shares)
        fits = {size for _, size in shares} == {count} and sorted(taken) == list(range(count))
        where = f"the ranks of {world_size} have the shares {[f'{rank} of {size}' for rank, size in shares]}"
        expect(fits, f"{where}, which do not make up one whole.")
        expect(len(set(taken.values())) == 1, f"{where}, some of which are taken more often than others.")


@check(of_adapter=True)
def samples_seen_once(bench: Bench) -> None:
    """In each epoch the ranks together train on every sample once, but for those that pad the last batch."""
    for world_size in bench.world_sizes:
        ranks = bench.run_once(_read, world_size=world_size)
        for epoch in range(2):
            seen = [read.train[epoch] for read in _one_of_each_share(ranks)]
            _expect_seen_once(seen, padded=True, where=f"{world_size} ranks, epoch {epoch}")


@check(of_adapter=True)
def samples_shuffled(bench: Bench) -> None:
    """Lightning's sampler shuffles the training data, anew in each epoch."""
    for rank, read in enumerate(bench.run_once(_read)):
        first, second = read.train
        expect(first != sorted(first), f"rank {rank}: the samples come in order: {first}.")
        expect(first != second, f"rank {rank}: two epochs have the samples in one order: {first}.")


@check(of_adapter=True)
def samples_shared(bench: Bench) -> None:
    """Ranks that read the same share of the data read the same samples in the same order."""
    ranks = bench.run_once(_read)
    for rank, read in enumerate(ranks):
        for other in ranks[:rank]:
            if other.share == read.share:
                expect(
                    other.train == read.train,
                    f"rank {rank} reads {read.train}, another rank of its share {other.train}.",
                )


@check(of_adapter=True)
def validation_in_order(bench: Bench) -> None:
    """Validation reads every sample once and in order, but for those that pad the last batch."""
    ranks = bench.run_once(_read)
    for rank, read in enumerate(ranks):
        number, count = read.share["rank"], read.share["num_replicas"]
        expected = [index % _SAMPLES for index in range(number, math.ceil(_SAMPLES / count) * count, count)]
        expect(
            read.validation == expected,
            f"rank {rank}: validation reads {read.validation}, expected {expected}.",
        )


@check(of_adapter=True)
def predictions_once(bench: Bench) -> None:
    """The ranks together predict every sample once, also where one has a batch more than another."""
    for world_size in bench.world_sizes:
        ranks = bench.run(_predict, world_size=world_size)
        predicted = [read.prediction for read in _one_of_each_share(ranks)]
        _expect_seen_once(predicted, padded=False, where=f"{world_size} ranks, prediction")


@check(of_adapter=True)
def own_sampler(bench: Bench) -> None:
    """With `use_distributed_sampler=False` each rank reads what the user's own sampler says, in its order."""
    expected = list(reversed(range(_SAMPLES)))
    for rank, read in enumerate(bench.run(_read_backwards)):
        expect(read == expected, f"rank {rank}: reads {read}, its sampler says {expected}.")


@check(of_adapter=True)
def own_distributed_sampler(bench: Bench) -> None:
    """A DistributedSampler that the user brings is not replaced."""
    expected = list(range(0, _SAMPLES, 3))
    for rank, read in enumerate(bench.run(_read_thirds)):
        expect(read == expected, f"rank {rank}: reads {read}, its sampler says {expected}.")


def _one_of_each_share(ranks: Sequence[_Read]) -> list[_Read]:
    """Ranks that read one share count as one."""
    return list({read.share["rank"]: read for read in ranks}.values())


def _expect_seen_once(shares: Sequence[Sequence[int]], *, padded: bool, where: str) -> None:
    seen = Counter(index for share in shares for index in share)
    missing = sorted(set(range(_SAMPLES)) - set(seen))
    again = sorted(index for index, count in seen.items() if count > 1)
    padding = -_SAMPLES % len(shares) if padded else 0
    expect(not missing, f"{where}: samples {missing} are not seen.")
    expect(
        sum(seen.values()) == _SAMPLES + padding,
        f"{where}: {sum(seen.values())} samples are seen instead of {_SAMPLES} and {padding} of padding; "
        f"more than once: {again}.",
    )


# ---- what follows runs in the workers ----------------------------------------------------------------


@dataclass
class _Read:
    """The samples that one rank read, by epoch and stage."""

    share: dict[str, int] = field(default_factory=dict)
    train: list[list[int]] = field(default_factory=list)
    validation: list[int] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)


class _Numbered(Dataset[list[Tensor]]):
    """Samples with their number."""

    def __init__(self, task: Task) -> None:
        self.samples = dataset(task)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [*self.samples[index], torch.tensor(index)]

    def __len__(self) -> int:
        return _SAMPLES


class _Reader(Plain):
    """Remembers which samples it got."""

    def build(self) -> None:
        super().build()
        self.read = _Read()

    def on_train_start(self) -> None:
        self.read.share = share_of(self.trainer)

    on_predict_start = on_train_start

    def on_train_epoch_start(self) -> None:
        self.read.train.append([])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.read.train[-1] += batch[2].tolist()
        return super().training_step(batch, index)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.read.validation += batch[2].tolist()

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        super().predict_step(batch, index)
        return batch[2]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Numbered(self.task), batch_size=3, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Numbered(self.task), batch_size=3)

    predict_dataloader = val_dataloader


def _read(subject: Subject) -> _Read:
    task = Task(model=_Reader)
    module = _Reader(task)
    trainer = make_trainer(
        subject,
        task,
        max_steps=-1,
        max_epochs=2,
        use_distributed_sampler=True,
        limit_val_batches=1.0,
        check_val_every_n_epoch=2,
    )
    trainer.fit(module)
    return module.read


def _predict(subject: Subject) -> _Read:
    task = Task(model=_Reader)
    module = _Reader(task)
    batches: Any = make_trainer(subject, task, use_distributed_sampler=True).predict(module)
    module.read.prediction = [number for batch in batches for number in batch.tolist()]
    return module.read


class _Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(_SAMPLES)))

    def __len__(self) -> int:
        return _SAMPLES


class _BackwardsReader(_Reader):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Numbered(self.task), batch_size=3, sampler=_Backwards())


class _ThirdsReader(_Reader):
    def train_dataloader(self) -> DataLoader[Any]:
        data = _Numbered(self.task)
        sampler: Any = DistributedSampler(data, num_replicas=3, rank=0, shuffle=False)
        return DataLoader(data, batch_size=3, sampler=sampler)


def _read_backwards(subject: Subject) -> list[int]:
    return _read_epoch(subject, _BackwardsReader, use_distributed_sampler=False)


def _read_thirds(subject: Subject) -> list[int]:
    return _read_epoch(subject, _ThirdsReader, use_distributed_sampler=True)


def _read_epoch(subject: Subject, model: type[_Reader], **settings: Any) -> list[int]:
    task = Task(model=model)
    module = model(task)
    make_trainer(subject, task, max_steps=-1, max_epochs=1, **settings).fit(module)
    return module.read.train[0]

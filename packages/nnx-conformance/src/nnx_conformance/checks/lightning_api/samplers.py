"""Samplers give each rank its samples; Fabric keeps names and has collectives and samplers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Block, Plain, Task, dataset, share_of
from nnx_conformance.training import make_trainer
from nnx_conformance.training import world_size as number_of_ranks

# Lightning's injected sampler, and samplers of the user.


_SAMPLES = 13
"""Not divisible by two or three, so that the last samples are padding."""


@check()
def distributed_sampler_kwargs(bench: Bench) -> None:
    """`strategy.distributed_sampler_kwargs` divides the data completely, with equally used shares."""
    for world_size in bench.world_sizes:
        ranks = bench.run_once(_read, world_size=world_size)
        shares = [(read.share["rank"], read.share["num_replicas"]) for read in ranks]
        count = shares[0][1]
        taken = Counter(rank for rank, _ in shares)
        fits = {size for _, size in shares} == {count} and sorted(taken) == list(range(count))
        where = f"the ranks of {world_size} have the shares {[f'{rank} of {size}' for rank, size in shares]}"
        expect(fits, f"{where}, which do not cover the data exactly.")
        expect(len(set(taken.values())) == 1, f"{where}, of which some are used more often than others.")


@check(of_adapter=True)
def samples_seen_once(bench: Bench) -> None:
    """In each epoch the ranks together train on every sample once, apart from padding."""
    for world_size in bench.world_sizes:
        ranks = bench.run_once(_read, world_size=world_size)
        for epoch in range(2):
            seen = [read.train[epoch] for read in _one_of_each_share(ranks)]
            _expect_seen_once(seen, padded=True, where=f"{world_size} ranks, epoch {epoch}")


@check(of_adapter=True)
def samples_shuffled(bench: Bench) -> None:
    """Lightning's sampler shuffles the training data differently in each epoch."""
    for rank, read in enumerate(bench.run_once(_read)):
        first, second = read.train
        expect(first != sorted(first), f"rank {rank}: the samples are not shuffled: {first}.")
        expect(first != second, f"rank {rank}: two epochs have the same order: {first}.")


@check(of_adapter=True)
def same_data_rank_same_samples(bench: Bench) -> None:
    """Ranks of one data share read the same samples in the same order."""
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
    """Validation reads every sample once and in order, apart from padding."""
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
    """The ranks together predict every sample once, even if one rank has an additional batch."""
    for world_size in bench.world_sizes:
        ranks = bench.run(_predict, world_size=world_size)
        predicted = [read.prediction for read in _one_of_each_share(ranks)]
        _expect_seen_once(predicted, padded=False, where=f"{world_size} ranks, prediction")


@check(of_adapter=True)
def user_sampler(bench: Bench) -> None:
    """With `use_distributed_sampler=False` each rank reads the samples of the user's sampler in order."""
    expected = list(reversed(range(_SAMPLES)))
    for rank, read in enumerate(bench.run(_read_backwards)):
        expect(read == expected, f"rank {rank}: read {read}, the sampler chose {expected}.")


@check(of_adapter=True)
def user_distributed_sampler(bench: Bench) -> None:
    """A user's DistributedSampler is not replaced."""
    expected = list(range(0, _SAMPLES, 3))
    for rank, read in enumerate(bench.run(_read_thirds)):
        expect(read == expected, f"rank {rank}: read {read}, the sampler chose {expected}.")


def _one_of_each_share(ranks: Sequence[_Read]) -> list[_Read]:
    """Count ranks of one share as one."""
    return list({read.share["rank"]: read for read in ranks}.values())


def _expect_seen_once(shares: Sequence[Sequence[int]], *, padded: bool, where: str) -> None:
    seen = Counter(index for share in shares for index in share)
    missing = sorted(set(range(_SAMPLES)) - set(seen))
    again = sorted(index for index, count in seen.items() if count > 1)
    padding = -_SAMPLES % len(shares) if padded else 0
    expect(not missing, f"{where}: no rank read samples {missing}.")
    expect(
        sum(seen.values()) == _SAMPLES + padding,
        f"{where}: {sum(seen.values())} samples were read, expected {_SAMPLES} and {padding} of padding; "
        f"more than once: {again}.",
    )


# Workers run the functions below.


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
    """Records the numbers of its samples."""

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


# Names, collectives and samplers of Fabric.


_SAMPLES_OF_FABRIC = 12


@check("fabric")
def fabric_names(bench: Bench) -> None:
    """After `fabric.setup` and after steps, the user's module and its state dict keep their own names."""
    for rank, seen in enumerate(bench.run_once(_set_up)):
        for moment, names in seen.names.items():
            expect(
                names == seen.before,
                f"rank {rank}, {moment}: the names are {names}, expected {seen.before}.",
            )


@check("fabric")
def fabric_module(bench: Bench) -> None:
    """`fabric.setup` exposes the user's own module, with its attributes and methods."""
    for rank, seen in enumerate(bench.run_once(_set_up)):
        for what, is_so in seen.facts.items():
            expect(is_so, f"rank {rank}: {what} does not hold after `fabric.setup`.")


@check("fabric", of_adapter=True)
def fabric_collectives(bench: Bench) -> None:
    """`fabric.all_gather`, `all_reduce`, `broadcast` and `barrier` reach every rank."""
    expected = {
        "all_reduce to the mean": 0.5,
        "all_reduce to the sum": 1.0,
        "broadcast from rank 1": "from 1",
    }
    for rank, (shares, seen) in enumerate(bench.run(_talk, world_size=2)):
        gathered = [float(share) for share in range(shares)]  # each share of the data contributes once
        for what, wanted in {"all_gather": gathered, **expected}.items():
            expect(seen[what] == wanted, f"rank {rank}: {what} gives {seen[what]}, expected {wanted}.")


@check("fabric", of_adapter=True)
def fabric_samplers(bench: Bench) -> None:
    """`fabric.setup_dataloaders` distributes the data over the ranks, each sample once."""
    ranks = bench.run(_load)
    shares = {tuple(samples) for samples in ranks}
    seen = sorted(sample for share in shares for sample in share)
    expect(
        seen == list(range(_SAMPLES_OF_FABRIC)),
        f"the ranks read {ranks}, expected each of {_SAMPLES} samples once.",
    )


# Workers run the functions below.


class _Net(nn.Module):
    """A plain module with a buffer and an attribute."""

    answer = 42

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(6, 10)
        self.block = Block()
        self.register_buffer("scale", torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 6]`` to ``[batch, 10]``."""
        return self.block(self.embed(x)) * self.scale  # type: ignore[no-any-return]

    def dummy_forward_args_fn(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return arguments for engines that trace the forward."""
        return {"x": batch[0]}

    @property
    def example_input_array(self) -> torch.Tensor:
        """Return an example for engines that have no batch yet."""
        return torch.zeros(2, 6)


@dataclass(frozen=True)
class _SetUp:
    before: list[str]
    names: dict[str, list[str]]
    facts: dict[str, bool]


def _launch(subject: Subject) -> Fabric:
    fabric = Fabric(
        strategy=subject.flag("lightning.fabric"), accelerator=subject.accelerator, devices=number_of_ranks()
    )
    fabric.launch()
    return fabric


def _names(module: nn.Module) -> list[str]:
    return [*(f"parameter {name}" for name, _ in module.named_parameters()), *module.state_dict()]


def _set_up(subject: Subject) -> _SetUp:
    fabric = _launch(subject)
    module = _Net()
    before = _names(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    names = {"after setup": _names(module)}
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 6)).square().mean())
        optimizer.step()
    names["after steps"] = _names(module)
    facts = {
        "`model.module is module`": model.module is module,
        "`model.answer`": model.answer == 42,
        "`isinstance(module, Net)`": isinstance(module, _Net),
        "that `model.state_dict()` has the names of `module.state_dict()`": list(model.state_dict())
        == list(module.state_dict()),
    }
    return _SetUp(before, names, facts)


def _talk(subject: Subject) -> tuple[int, dict[str, Any]]:
    fabric = _launch(subject)
    own = torch.tensor(float(dist.get_rank()), device=fabric.device)
    share = share_of(fabric)
    gathered: Any = fabric.all_gather(torch.tensor(float(share["rank"]), device=fabric.device))
    mean: Any = fabric.all_reduce(own.clone(), reduce_op="mean")
    total: Any = fabric.all_reduce(own.clone(), reduce_op="sum")
    fabric.barrier()
    return share["num_replicas"], {
        "all_gather": gathered.tolist(),
        "all_reduce to the mean": mean.item(),
        "all_reduce to the sum": total.item(),
        "broadcast from rank 1": fabric.broadcast(f"from {fabric.global_rank}", src=1),
    }


def _load(subject: Subject) -> list[int]:
    fabric = _launch(subject)
    fabric.setup(_Net())
    numbered = TensorDataset(
        torch.arange(_SAMPLES_OF_FABRIC), dataset(Task()).tensors[0][:_SAMPLES_OF_FABRIC]
    )
    loader: Any = fabric.setup_dataloaders(DataLoader(numbered, batch_size=2))
    return [number for numbers, _ in loader for number in numbers.tolist()]

"""Which samples each rank reads, and names, collectives and samplers under Fabric."""

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

# Which samples each rank reads: a sampler that Lightning injects, and one that the user brings.


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


# The functions below run in the workers.


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


# The same under Fabric: names, collectives and samplers.


_SAMPLES_OF_FABRIC = 12


@check("fabric")
def fabric_names(bench: Bench) -> None:
    """After `fabric.setup` and after steps the user's module and its state dict have their own names."""
    for rank, seen in enumerate(bench.run_once(_set_up)):
        for moment, names in seen.names.items():
            expect(
                names == seen.before,
                f"rank {rank}, {moment}: the names are {names}, they were {seen.before}.",
            )


@check("fabric")
def fabric_module(bench: Bench) -> None:
    """`fabric.setup` hands the user's own module out again, with attributes and methods of its own."""
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
        gathered = [float(share) for share in range(shares)]  # what each share of the data has, once
        for what, wanted in {"all_gather": gathered, **expected}.items():
            expect(seen[what] == wanted, f"rank {rank}: {what} gives {seen[what]}, expected {wanted}.")


@check("fabric", of_adapter=True)
def fabric_samplers(bench: Bench) -> None:
    """A loader of `fabric.setup_dataloaders` deals the data out over the ranks, each sample once."""
    ranks = bench.run(_load)
    shares = {tuple(samples) for samples in ranks}
    seen = sorted(sample for share in shares for sample in share)
    expect(
        seen == list(range(_SAMPLES_OF_FABRIC)),
        f"the ranks read {ranks}, which is not each of {_SAMPLES} samples once.",
    )


# The functions below run in the workers.


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
        """``[batch, 6]`` to ``[batch, 10]``."""
        return self.block(self.embed(x)) * self.scale  # type: ignore[no-any-return]

    def dummy_forward_args_fn(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """For engines that trace the forward."""
        return {"x": batch[0]}

    @property
    def example_input_array(self) -> torch.Tensor:
        """The same, for those that have no batch yet."""
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

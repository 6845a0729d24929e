"""Logged values, ranks and collectives of Trainer, strategy and module."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task, dataset, share_of
from nnx_conformance.training import fit, make_trainer, world_size

T = TypeVar("T")


# Logged values are reduced over the ranks only on request.


_STEPS = 2


@check(of_adapter=True)
def log_sync_dist(bench: Bench) -> None:
    """`self.log(sync_dist=True)` gives the mean, sum, maximum or minimum over all ranks, on every rank.

    A sum counts each share of the data once, even if several ranks work on it.

    """
    for size in bench.world_sizes:
        for rank, outcome in enumerate(bench.run_once(_logged, world_size=size)):
            expected = _reduced(shares=int(outcome["shares"]))
            _expect_values(outcome, expected, where=f"rank {rank} of {size}, sync_dist=True")


def _reduced(*, shares: int) -> dict[str, float]:
    steps, sizes = range(1, _STEPS + 1), range(1, shares + 1)
    values = [step * size for step in steps for size in sizes]
    weighted = sum(step * size * size for step in steps for size in sizes) / sum(sizes) / _STEPS
    return {
        "mean": weighted,  # by batch size
        "sum": sum(values),
        "max": max(values),
        "min": min(values),
        "in_step": _STEPS * sum(sizes) / shares,
    }


@check(of_adapter=True)
def log_without_sync_dist(bench: Bench) -> None:
    """`self.log(sync_dist=False)` keeps each rank's own value."""
    for rank, outcome in enumerate(bench.run_once(_logged)):
        own = {"own": (outcome["share"] + 1) * sum(range(1, _STEPS + 1))}
        _expect_values(outcome, own, where=f"rank {rank}, sync_dist=False")


@check(of_adapter=True)
def torchmetrics_reduced(bench: Bench) -> None:
    """A torchmetrics metric on the module counts the samples of all ranks, however it is logged.

    Samples that several ranks of one share saw count once.

    """
    for rank, outcome in enumerate(bench.run(_measured)):
        shares = range(1, int(outcome["shares"]) + 1)
        values = [step * share for step in range(1, _STEPS + 1) for share in shares]
        expected = {
            "metric_mean": sum(values) / len(values),
            "metric_sum": sum(values),
            "metric_max": max(values),
        }
        _expect_values(outcome, expected, where=f"rank {rank}, torchmetrics")


def _expect_values(seen: Mapping[str, float], expected: Mapping[str, float], *, where: str) -> None:
    for name, wanted in expected.items():
        value = seen.get(name)
        is_close = value is not None and abs(value - wanted) <= 1e-5 * max(1.0, abs(wanted))
        expect(is_close, f"{where}: {name!r} is logged as {value}, expected {wanted:.7g}.")


# Workers run the functions below.


class _Sharing(Plain):
    """Records its share of the data, separately from its logs."""

    share: Mapping[str, int]

    def on_train_start(self) -> None:
        super().on_train_start()
        self.share = share_of(self.trainer)


def _metrics_and_share(subject: Subject, model: type[_Sharing]) -> dict[str, float]:
    """Return the logged values of a rank, and its ``share`` of so many ``shares`` of the data."""
    task = Task(model=model, steps=_STEPS, batches=_STEPS)
    module = model(task)
    metrics = fit(subject, task, module=module).metrics
    return {**metrics, "share": module.share["rank"], "shares": module.share["num_replicas"]}


class _Logging(_Sharing):
    """Logs a different value for each share of the data, with different batch sizes."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        size = self.share["rank"] + 1
        value = float(size * (index + 1))
        epoch: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": size}
        self.log("mean", value, sync_dist=True, **epoch)
        self.log("sum", value, sync_dist=True, reduce_fx="sum", **epoch)
        self.log("max", value, sync_dist=True, reduce_fx="max", **epoch)
        self.log("min", value, sync_dist=True, reduce_fx="min", **epoch)
        self.log("own", value, sync_dist=False, reduce_fx="sum", **epoch)
        self.log("in_step", value, sync_dist=True, on_step=True, on_epoch=False)
        return super().training_step(batch, index)


def _logged(subject: Subject) -> dict[str, float]:
    return _metrics_and_share(subject, _Logging)


class _Measuring(_Sharing):
    """Has metrics as submodules."""

    def build(self) -> None:
        super().build()
        self.metrics = torch.nn.ModuleDict({"mean": MeanMetric(), "sum": SumMetric(), "max": MaxMetric()})

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        for name, metric in self.metrics.items():
            assert isinstance(metric, Metric)
            metric.update(torch.tensor(float((self.share["rank"] + 1) * (index + 1)), device=self.device))
            self.log(f"metric_{name}", metric, on_step=False, on_epoch=True)
        return super().training_step(batch, index)


def _measured(subject: Subject) -> dict[str, float]:
    return _metrics_and_share(subject, _Measuring)


# Ranks of the processes, and their own random numbers.


@check(of_adapter=True)
def rank_properties(bench: Bench) -> None:
    """Trainer, strategy and module know the process's rank, the world size and rank 0."""
    world = bench.world_sizes[-1]
    for rank, (seen, _) in enumerate(bench.run_once(_ranks, world_size=world)):
        expected = {
            "global_rank": rank,
            "local_rank": rank,
            "node_rank": 0,
            "world_size": world,
            "is_global_zero": rank == 0,
        }
        for what, value in seen.items():
            wanted = expected[what.rpartition(".")[2]]
            expect(value == wanted, f"rank {rank} of {world}: {what} is {value}, expected {wanted}.")


@check(of_adapter=True)
def rank_zero_only_runs_once(bench: Bench) -> None:
    """A function decorated with `rank_zero_only` runs only on rank 0."""
    ran = [rank for rank, (_, it_ran) in enumerate(bench.run_once(_ranks)) if it_ran]
    expect(ran == [0], f"a `rank_zero_only` function ran on ranks {ran}.")


@check(of_adapter=True)
def data_workers_seeded(bench: Bench) -> None:
    """After `seed_everything(workers=True)`, data workers draw different numbers for each data share."""
    ranks = bench.run(_drawn)
    for rank, drawn in enumerate(ranks):
        expect(
            len(set(drawn.numbers)) == len(drawn.numbers),
            f"rank {rank}: its data worker draws {drawn.numbers} for different samples.",
        )
        for other, elsewhere in enumerate(ranks[:rank]):
            same = drawn.numbers == elsewhere.numbers
            wanted = drawn.share == elsewhere.share
            expect(
                same == wanted,
                f"data workers of ranks {other} and {rank} read {_same(wanted)} data and draw {_same(same)} "
                f"random numbers.",
            )


def _same(it_is: bool) -> str:
    return "the same" if it_is else "different"


# Workers run the functions below.


def _look_at_ranks(trainer: Trainer, module: Plain) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "module.global_rank": module.global_rank,
        "module.local_rank": module.local_rank,
    }
    for name, owner in (("trainer", trainer), ("trainer.strategy", trainer.strategy)):
        properties = ("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero")
        seen |= {f"{name}.{it}": getattr(owner, it) for it in properties if hasattr(owner, it)}
    return seen


def _calls_rank_zero() -> bool:
    ran: list[bool] = []
    rank_zero_only(ran.append)(True)
    return bool(ran)


def _ranks(subject: Subject) -> tuple[dict[str, Any], bool]:
    return in_training(subject, lambda trainer, module: (_look_at_ranks(trainer, module), _calls_rank_zero()))


@dataclass(frozen=True)
class _Drawn:
    share: int
    numbers: list[float]


class _Augmented(Dataset[list[Tensor]]):
    """The task's samples, each with a random number that the data worker draws."""

    def __init__(self, task: Task) -> None:
        self.samples = dataset(task)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [*self.samples[index], torch.rand(())]

    def __len__(self) -> int:
        return 4 * world_size()


class _Drawing(Plain):
    """Records the random numbers of its data worker."""

    def build(self) -> None:
        super().build()
        self.numbers: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.numbers += batch[2].tolist()
        return super().training_step(batch, index)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Augmented(self.task), batch_size=2, num_workers=1)


def _drawn(subject: Subject) -> _Drawn:
    seed_everything(3, workers=True, verbose=False)
    task = Task(model=_Drawing, steps=2)
    module = _Drawing(task)
    trainer = make_trainer(subject, task, use_distributed_sampler=True)
    shares: list[int] = []
    module.on_train_start = lambda: shares.append(share_of(trainer)["rank"])  # type: ignore[method-assign]
    trainer.fit(module)
    return _Drawn(shares[0], module.numbers)


@check(of_adapter=True)
def all_gather(bench: Bench) -> None:
    """`self.all_gather` stacks every rank's tensors, also in tuples and dicts, on every rank.

    If several ranks work on one share of the data, the tensors of the share appear once.

    """
    for size in bench.world_sizes:
        for rank, (shares, gathered) in enumerate(bench.run(_gather, world_size=size)):
            expected = [[share, 10 * share] for share in range(shares)]
            for what, seen in gathered.items():
                expect(
                    seen == expected,
                    f"rank {rank} of {size}: all_gather of {what} returned {seen}, expected {expected}.",
                )


@check(of_adapter=True)
def all_gather_with_gradients(bench: Bench) -> None:
    """`self.all_gather(sync_grads=True)` returns each rank's gradient, summed over the ranks."""
    for rank, (share, gradient) in enumerate(bench.run(_gather_with_gradients, world_size=2)):
        expected = [float(share["num_replicas"] * (share["rank"] + 1))] * 2
        expect(gradient == expected, f"rank {rank}: the gradient is {gradient}, expected {expected}.")


@check(of_adapter=True)
def broadcast(bench: Bench) -> None:
    """`trainer.strategy.broadcast` gives every rank the objects and tensors of the source rank."""
    for size in bench.world_sizes:
        for rank, received in enumerate(bench.run(_broadcast, world_size=size)):
            for source, seen in enumerate(received):
                expected = (f"from {source}", [float(source)] * 2)
                expect(
                    seen == expected,
                    f"rank {rank} of {size}: broadcast from rank {source} gave {seen}, expected {expected}.",
                )


@check(of_adapter=True)
def reduce_over_ranks(bench: Bench) -> None:
    """`trainer.strategy.reduce` gives the mean, sum, product, maximum or minimum over all ranks, on each.

    A sum or product counts each share of the data once, even if several ranks work on it.

    """
    for size in bench.world_sizes:
        outcomes = bench.run(_reduce, world_size=size)
        column = torch.tensor([[share + 1.0, -share] for share in range(outcomes[0][0])])
        by_name = {
            "sum": column.sum(dim=0),
            "mean": column.mean(dim=0),
            "avg": column.mean(dim=0),
            "max": column.max(dim=0).values,
            "min": column.min(dim=0).values,
            "product": column.prod(dim=0),
        }
        for rank, (_, reduced) in enumerate(outcomes):
            for operation, seen in reduced.items():
                expected = by_name[operation.removeprefix("ReduceOp.").lower()].tolist()
                expect(
                    seen == expected,
                    f"rank {rank} of {size}: reduce_op={operation} returned {seen}, expected {expected}.",
                )


@check(of_adapter=True)
def reduce_boolean_decision(bench: Bench) -> None:
    """`trainer.strategy.reduce_boolean_decision` returns on every rank if all, or any, ranks agree."""
    expected = {
        "all agree": (True, True),
        "only rank 0 agrees": (False, True),
        "only rank 1 agrees": (False, True),
        "none agrees": (False, False),
    }
    for rank, decided in enumerate(bench.run(_decide, world_size=2)):
        for votes, seen in decided.items():
            expect(
                seen == expected[votes],
                f"rank {rank}: if {votes}, (all=True, all=False) gave {seen}, expected {expected[votes]}.",
            )


@check(of_adapter=True)
def barrier(bench: Bench) -> None:
    """`trainer.strategy.barrier` holds every rank until the last one arrives."""
    for rank, missing in enumerate(bench.run(_wait, str(bench.directory))):
        expect(not missing, f"rank {rank} passed the barrier before ranks {missing} arrived.")


# Workers run the functions below.


def _gather(subject: Subject) -> tuple[int, dict[str, Any]]:
    def look(trainer: Trainer, module: Plain) -> tuple[int, dict[str, Any]]:
        share = share_of(trainer)
        own = torch.tensor([share["rank"], 10 * share["rank"]], device=module.device)
        nested: Any = module.all_gather({"inside": (own, own.clone())})
        return share["num_replicas"], {
            "a tensor": _listed(module.all_gather(own)),
            "a tuple in a dict": _listed(nested["inside"][1]),
            "a tensor, by trainer.strategy": _listed(trainer.strategy.all_gather(own)),
        }

    return in_training(subject, look)


def _listed(gathered: Any) -> list[Any]:
    values: list[Any] = gathered.tolist()
    return values


def _gather_with_gradients(subject: Subject) -> tuple[dict[str, int], list[float] | None]:
    def look(trainer: Trainer, module: Plain) -> tuple[dict[str, int], list[float] | None]:
        with torch.enable_grad():
            own = torch.ones(2, device=module.device, requires_grad=True)
            gathered: Any = module.all_gather(own, sync_grads=True)
            weights = torch.arange(1.0, len(gathered) + 1, device=module.device)
            (gathered * weights[:, None]).sum().backward()
        return share_of(trainer), None if own.grad is None else _listed(own.grad)

    return in_training(subject, look)


def _broadcast(subject: Subject) -> list[tuple[str, list[float]]]:
    def look(trainer: Trainer, module: Plain) -> list[tuple[str, list[float]]]:
        received = []
        for source in range(world_size()):
            text = trainer.strategy.broadcast(f"from {trainer.global_rank}", src=source)
            own = torch.full((2,), float(dist.get_rank()), device=module.device)
            received.append((text, _listed(trainer.strategy.broadcast(own, src=source))))
        return received

    return in_training(subject, look)


def _reduce(subject: Subject) -> tuple[int, dict[str, list[float]]]:
    """Return the number of shares, and the reductions of values that differ between them."""
    names = ("mean", "avg", "sum", "max", "min", "product")
    objects = {"SUM": ReduceOp.SUM, "MAX": ReduceOp.MAX, "MIN": ReduceOp.MIN, "PRODUCT": ReduceOp.PRODUCT}
    operations: dict[str, Any] = {name: name for name in names}
    operations |= {f"ReduceOp.{name}": operation for name, operation in objects.items()}

    def look(trainer: Trainer, module: Plain) -> tuple[int, dict[str, list[float]]]:
        reduced, share = {}, share_of(trainer)
        for name, operation in operations.items():
            own = torch.tensor([share["rank"] + 1.0, -share["rank"]], device=module.device)
            reduced[name] = _listed(trainer.strategy.reduce(own, reduce_op=operation))
        return share["num_replicas"], reduced

    return in_training(subject, look)


def _decide(subject: Subject) -> dict[str, tuple[bool, bool]]:
    votes: dict[str, Callable[[int], bool]] = {
        "all agree": lambda rank: True,
        "only rank 0 agrees": lambda rank: rank == 0,
        "only rank 1 agrees": lambda rank: rank == 1,
        "none agrees": lambda rank: False,
    }

    def look(trainer: Trainer, module: Plain) -> dict[str, tuple[bool, bool]]:
        decide = trainer.strategy.reduce_boolean_decision
        return {
            name: (decide(vote(trainer.global_rank), all=True), decide(vote(trainer.global_rank), all=False))
            for name, vote in votes.items()
        }

    return in_training(subject, look)


def _wait(subject: Subject, folder: str) -> list[int]:
    def look(trainer: Trainer, module: Plain) -> list[int]:
        marks = [Path(folder) / str(rank) for rank in range(world_size())]
        if trainer.global_rank > 0:
            time.sleep(0.2)
        marks[dist.get_rank()].touch()
        trainer.strategy.barrier("until all have come")
        missing = [rank for rank, mark in enumerate(marks) if not mark.exists()]
        trainer.strategy.barrier()
        return missing

    return in_training(subject, look)


class _Probe(Callback):
    def __init__(self, look: Callable[[Trainer, Plain], object]) -> None:
        self.look = look

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Plain)
        self.seen = self.look(trainer, pl_module)


def in_training(subject: Subject, look: Callable[[Trainer, Plain], T]) -> T:
    """Return the result of a function called at the start of training, after all setup.

    Args:
        subject: The strategy.
        look: The function, which gets the Trainer and the module.

    """
    task = Task(steps=1)
    probe = _Probe(look)
    make_trainer(subject, task, callbacks=[probe]).fit(task.module())
    return probe.seen  # type: ignore[return-value]

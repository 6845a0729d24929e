"""What user code says to the other ranks: through Trainer's strategy and through the module."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed import ReduceOp

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.names.module import in_training
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, share_of
from nnx_conformance.training import world_size


@check(of_adapter=True)
def all_gather(bench: Bench) -> None:
    """`self.all_gather` stacks every rank's tensors, in tuples and dicts as well, on every rank.

    Where several ranks work on one share of the data, what each share has comes once.
    """
    for size in bench.world_sizes:
        for rank, (shares, gathered) in enumerate(bench.run(_gather, world_size=size)):
            expected = [[share, 10 * share] for share in range(shares)]
            for what, seen in gathered.items():
                expect(
                    seen == expected,
                    f"rank {rank} of {size}: all_gather of {what} gives {seen}, expected {expected}.",
                )


@check(of_adapter=True)
def all_gather_with_gradients(bench: Bench) -> None:
    """`self.all_gather(sync_grads=True)` sends each rank the gradient of its part, summed over the ranks."""
    for rank, (share, gradient) in enumerate(bench.run(_gather_with_gradients, world_size=2)):
        expected = [float(share["num_replicas"] * (share["rank"] + 1))] * 2
        expect(gradient == expected, f"rank {rank}: the gradient is {gradient}, expected {expected}.")


@check(of_adapter=True)
def broadcast(bench: Bench) -> None:
    """`trainer.strategy.broadcast` gives every rank the objects and tensors of the rank that is named."""
    for size in bench.world_sizes:
        for rank, received in enumerate(bench.run(_broadcast, world_size=size)):
            for source, seen in enumerate(received):
                expected = (f"from {source}", [float(source)] * 2)
                expect(
                    seen == expected,
                    f"rank {rank} of {size}: broadcast from rank {source} gives {seen}, expected {expected}.",
                )


@check(of_adapter=True)
def reductions(bench: Bench) -> None:
    """`trainer.strategy.reduce` gives the mean, sum, product, maximum or minimum over all ranks, on each.

    A sum or product counts each share of the data once, also where several ranks work on it.
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
                    f"rank {rank} of {size}: reduce_op={operation} gives {seen}, expected {expected}.",
                )


@check(of_adapter=True)
def boolean_decisions(bench: Bench) -> None:
    """`trainer.strategy.reduce_boolean_decision` tells every rank whether all, or any, of them agree."""
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
                f"rank {rank}: where {votes}, (all=True, all=False) give {seen}, expected {expected[votes]}.",
            )


@check(of_adapter=True)
def barrier(bench: Bench) -> None:
    """`trainer.strategy.barrier` holds every rank until the last one has come."""
    for rank, missing in enumerate(bench.run(_wait, str(bench.directory))):
        expect(not missing, f"rank {rank} passed the barrier before ranks {missing} had come to it.")


# ---- what follows runs in the workers ----------------------------------------------------------------


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
    """Number of shares, and what values that differ between them become."""
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

"""Who is who among the processes, and that each has random numbers of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.names.module import in_training
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task, dataset, share_of
from nnx_conformance.training import make_trainer, world_size


@check(of_adapter=True)
def rank_properties(bench: Bench) -> None:
    """Trainer, strategy and module know the process's rank, the world size, and which one is rank 0."""
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
def rank_zero_runs_once(bench: Bench) -> None:
    """What is decorated with `rank_zero_only` runs on rank 0 and nowhere else."""
    ran = [rank for rank, (_, it_ran) in enumerate(bench.run_once(_ranks)) if it_ran]
    expect(ran == [0], f"a `rank_zero_only` function ran on ranks {ran}.")


@check(of_adapter=True)
def data_workers_seeded(bench: Bench) -> None:
    """After `seed_everything(workers=True)` data workers draw other numbers for each share of the data."""
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


# ---- what follows runs in the workers ----------------------------------------------------------------


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
    """Remembers what its data worker drew."""

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

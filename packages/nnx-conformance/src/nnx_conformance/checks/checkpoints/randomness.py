"""Random numbers and data: a resumed run draws and reads what the whole one would have."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.checkpoints.runs import SaveAt, open_saved, path_in, trainer_for
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task, dataset, share_of
from nnx_conformance.training import outcome_of

_STEPS, _SAVED_AFTER = 5, 2


@check(of_adapter=True)
def randomness_goes_on(bench: Bench) -> None:
    """Resumed within an epoch, each rank draws its own next random numbers: dropout and losses to the bit."""
    ranks = bench.run(_interrupted, TASK, path_in(bench))
    open_saved(bench)
    for rank, (whole, resumed) in enumerate(ranks):
        where = f"rank {rank}, resumed after step {_SAVED_AFTER}"
        _expect_equal(resumed.drawn, whole.drawn[_SAVED_AFTER:], f"{where}: random numbers drawn")
        _expect_equal(resumed.losses, whole.losses[_SAVED_AFTER:], f"{where}: losses")
        for name, wanted in whole.weights.items():
            same = torch.equal(resumed.weights[name], wanted)
            expect(same, f"{where}: {name} is not that of the run that was not interrupted, to the bit.")


@check(of_adapter=True)
def ranks_draw_their_own(bench: Bench) -> None:
    """Ranks that read different data and drew differently before they were saved do so afterwards."""
    ranks = bench.run(_interrupted, TASK, path_in(bench))
    open_saved(bench)
    first: dict[int, Any] = {}
    for rank, (whole, resumed) in enumerate(ranks):
        twin = first.setdefault(whole.share, resumed)
        expect(
            twin is resumed or twin.drawn == resumed.drawn,
            f"ranks that read the same data drew {twin.drawn} and, on rank {rank}, {resumed.drawn}.",
        )
    drawn = [tuple(map(tuple, resumed.drawn)) for resumed in first.values()]
    expect(len(set(drawn)) == len(drawn), f"resumed ranks draw the same numbers: {drawn[0]}.")


@check(of_adapter=True)
def saving_changes_nothing(bench: Bench) -> None:
    """A run that saves draws the same random numbers, and has the same losses, as one that does not."""
    for rank, (silent, saving) in enumerate(bench.run(_with_and_without, TASK, path_in(bench))):
        _expect_equal(saving.drawn, silent.drawn, f"rank {rank}: random numbers drawn in a run that saves")
        _expect_equal(saving.losses, silent.losses, f"rank {rank}: losses of a run that saves")


@check(of_adapter=True)
def data_goes_on(bench: Bench) -> None:
    """Resumed within a shuffled epoch, a run reads what is left of it, once, at any world size."""
    path = path_in(bench)
    everything = set(range(TASK.batches * GLOBAL_BATCH))
    before = _read(bench.run(_read_first, TASK, path))
    open_saved(bench)
    for world_size in (2, 1) if not bench.full else (2, 1, 3):
        after = _read(bench.run(_read_rest, TASK, path, world_size=world_size))
        where = f"saved by 2, resumed by {world_size}"
        again, left = sorted(before & after), sorted(everything - before - after)
        expect(not again, f"{where}: samples {again[:5]} ({len(again)} in all) are read again.")
        expect(not left, f"{where}: samples {left[:5]} ({len(left)} in all) are never read.")


def _expect_equal(seen: list[Any], wanted: list[Any], what: str) -> None:
    expect(len(seen) == len(wanted), f"{what}: {len(seen)} instead of {len(wanted)}.")
    for step, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        expect(one == other, f"{what}: {one} in step {step}, expected {other}.")


def _read(ranks: list[list[int]]) -> set[int]:
    return {sample for rank in ranks for sample in rank}


# --- models ---------------------------------------------------------------------------------------


class Dropping(Plain):
    """Has dropout, and notes what else is drawn in each step."""

    def build(self) -> None:
        """Create the layers."""
        super().build()
        self.dropout = nn.Dropout(0.3)
        self.drawn: list[list[float]] = []
        self.share = 0

    def forward(self, x: Tensor) -> Tensor:
        """As before, with dropout in the end."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.dropout(hidden))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch."""
        self.share = share_of(self.trainer)["rank"]
        loss = super().training_step(batch, index)
        self.drawn.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
        return loss


class Shuffled(Plain):
    """Reads its data in random order, and notes what it reads."""

    def build(self) -> None:
        """Create the layers."""
        super().build()
        self.read: list[int] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch."""
        self.read += batch[2].tolist()
        return super().training_step(batch, index)

    def train_dataloader(self) -> DataLoader[Any]:
        """One epoch, which Trainer deals out to the ranks."""
        inputs, targets = dataset(self.task).tensors
        data = TensorDataset(inputs, targets, torch.arange(len(inputs)))
        size = GLOBAL_BATCH // share_of(self.trainer)["num_replicas"]
        return DataLoader(data, batch_size=size, shuffle=True)


TASK = Task(model=Dropping, optimizer="adamw", steps=_STEPS)


class SeedRanks(Callback):
    """Lets every share of the data have random numbers of its own, as `seed_everything` is called by rank."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once, in the run that is saved."""
        seed = 100 + share_of(trainer)["rank"]
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


# --- jobs -----------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What a run drew and computed.

    Attributes:
        share: The number of the share of the data that this rank reads.
        drawn: Numbers drawn in each step.
        losses: Mean loss over all ranks of every batch.
        weights: The complete state dict after the run.
    """

    share: int
    drawn: list[list[float]]
    losses: list[float]
    weights: dict[str, Tensor]


def _fit(subject: Subject, task: Task, *callbacks: Callback, ckpt_path: str | None = None) -> _Seen:
    module: Any = task.module()
    trainer = trainer_for(subject, task, callbacks=list(callbacks))
    trainer.fit(module, ckpt_path=ckpt_path)
    outcome = outcome_of(trainer, module)
    return _Seen(module.share, module.drawn, outcome.losses, outcome.weights)


def _interrupted(subject: Subject, task: Task, path: str) -> tuple[_Seen, _Seen]:
    whole = _fit(subject, task, SeedRanks(), SaveAt({_SAVED_AFTER: path}))
    return whole, _fit(subject, replace(task, seed=task.seed + 1), ckpt_path=path)


def _with_and_without(subject: Subject, task: Task, path: str) -> tuple[_Seen, _Seen]:
    silent = _fit(subject, task, SeedRanks())
    return silent, _fit(subject, task, SeedRanks(), SaveAt({1: path, 3: path}))


def _read_first(subject: Subject, task: Task, path: str) -> list[int]:
    return _read_shuffled(subject, task, SaveAt({_SAVED_AFTER: path}), max_steps=_SAVED_AFTER)


def _read_rest(subject: Subject, task: Task, path: str) -> list[int]:
    return _read_shuffled(subject, task, ckpt_path=path, max_steps=task.batches)


def _read_shuffled(
    subject: Subject, task: Task, *callbacks: Callback, ckpt_path: str | None = None, max_steps: int
) -> list[int]:
    module = Shuffled(replace(task, model=Shuffled))
    trainer = trainer_for(
        subject, task, callbacks=list(callbacks), max_steps=max_steps, use_distributed_sampler=True
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return module.read

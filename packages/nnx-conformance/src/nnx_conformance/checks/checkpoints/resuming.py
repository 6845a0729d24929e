"""Every kind of state resumes, and training, random numbers and data continue from it."""

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
from nnx_conformance.checks.checkpoints.runs import (
    SAVED_AFTER,
    TASK,
    TOLERANCE,
    Record,
    Resumable,
    SaveAt,
    Snapshot,
    expect_exactly,
    expect_resumed,
    expect_same_groups,
    expect_same_optimizers,
    expect_same_weights,
    open_saved,
    path_in,
    resume,
    run,
    save,
    saved_checkpoint,
    trainer_for,
)
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Outcome, Plain, Task, dataset, share_of
from nnx_conformance.training import outcome_of

_RESUMED = "resumed with 2 ranks"


@check()
def weights_resume(bench: Bench) -> None:
    """A resumed run begins with exactly the saved weights."""
    for rank, (uninterrupted, resumed) in enumerate(bench.run(_round_trip, TASK, path_in(bench))):
        expect_same_weights(resumed.started, uninterrupted.saved, where=f"{_RESUMED}, rank {rank}")


@check()
def optimizer_state_resumes(bench: Bench) -> None:
    """A resumed run begins with exactly the saved optimizer state of every parameter."""
    alone = bench.alone(_saved_state, TASK)
    for rank, (uninterrupted, resumed) in enumerate(bench.run(_round_trip, TASK, path_in(bench))):
        expect_same_optimizers(uninterrupted.saved, alone, tolerance=TOLERANCE, where=f"saved, rank {rank}")
        expect_same_optimizers(resumed.started, uninterrupted.saved, where=f"{_RESUMED}, rank {rank}")


@check()
def buffers_resume(bench: Bench) -> None:
    """Buffers are saved and restored."""
    for rank, (_, resumed) in enumerate(bench.run(_round_trip, TASK, path_in(bench))):
        seen = int(resumed.weights["seen"])
        expect(
            seen == TASK.steps,
            f"rank {rank}: a buffer that counts the steps is {seen} after a run that was resumed in step "
            f"{SAVED_AFTER} and ended in step {TASK.steps}.",
        )


@check(of_adapter=True)
def schedulers_and_counters_resume(bench: Bench) -> None:
    """Schedulers, step and epoch continue from their saved values."""
    for rank, (uninterrupted, resumed) in enumerate(bench.run(_round_trip, TASK, path_in(bench))):
        where = f"{_RESUMED}, rank {rank}"
        for what in ("schedulers", "counters"):
            seen, wanted = getattr(resumed.started, what), getattr(uninterrupted.saved, what)
            expect(seen == wanted, f"{where}: {what} are {seen}, the saved ones {wanted}.")
        expect(
            len(resumed.losses) == TASK.steps - SAVED_AFTER,
            f"{where}: {len(resumed.losses)} steps, expected {TASK.steps - SAVED_AFTER}.",
        )


@check()
def losses_resume(bench: Bench) -> None:
    """The losses after resuming are those of the uninterrupted run."""
    for rank, (uninterrupted, resumed) in enumerate(bench.run(_round_trip, TASK, path_in(bench))):
        where = f"{_RESUMED}, rank {rank}"
        expect_equal_losses(
            resumed.losses, uninterrupted.losses[SAVED_AFTER:], tolerance=TOLERANCE, where=where
        )
        expect_equal_weights(resumed.weights, uninterrupted.weights, tolerance=TOLERANCE, where=where)


@check("parameter_groups")
def param_groups_resume(bench: Bench) -> None:
    """Every param group resumes its hyperparameters, including those changed during training."""
    task = replace(TASK, model=TwoGroups)
    for rank, (uninterrupted, resumed) in enumerate(bench.run(_change_groups, task, path_in(bench))):
        expect_same_groups(resumed.started, uninterrupted.saved, where=f"{_RESUMED}, rank {rank}")
        groups = resumed.started.groups[0]
        for group, wanted in zip(groups, CHANGED, strict=True):
            expect(
                {key: group[key] for key in wanted} == wanted,
                f"rank {rank}: a resumed param group is {group}, expected {wanted}.",
            )


@check("multiple_optimizers", "manual_optimization")
def two_optimizers_resume(bench: Bench) -> None:
    """Two optimizers of different kinds each resume their own state."""
    task = replace(TASK, model=TwoOptimizers, steps=2 * TASK.steps)
    alone = bench.alone(_saved_state, task, 2 * SAVED_AFTER)
    for rank, (uninterrupted, resumed) in enumerate(
        bench.run(_round_trip, task, path_in(bench), 2 * SAVED_AFTER)
    ):
        expect_same_optimizers(uninterrupted.saved, alone, tolerance=TOLERANCE, where=f"saved, rank {rank}")
        where = f"{_RESUMED}, rank {rank}"
        expect_same_optimizers(resumed.started, uninterrupted.saved, where=where)
        expect_same_groups(resumed.started, uninterrupted.saved, where=where)


@check()
def resume_and_save_again(bench: Bench) -> None:
    """A resumed run can save over its own checkpoint, and that save can be resumed."""
    alone = bench.alone(run, TASK)
    for rank, (second, third) in enumerate(bench.run(_relay, TASK, path_in(bench))):
        where = f"resumed for the second time, rank {rank}"
        expect_same_weights(third.started, second.saved, where=where)
        expect_same_optimizers(third.started, second.saved, where=where)
        expect_equal_losses(third.losses, alone.losses[-1:], tolerance=TOLERANCE, where=where)
        expect_equal_weights(third.weights, alone.weights, tolerance=TOLERANCE, where=where)


@check()
def save_after_fit(bench: Bench) -> None:
    """`trainer.save_checkpoint` after `fit` saves the trained state, ready to be resumed."""
    alone = bench.alone(run, TASK)
    for rank, (ended, resumed) in enumerate(bench.run(_save_afterwards, TASK, path_in(bench))):
        where = f"saved after fit, rank {rank}"
        expect_exactly(resumed.started.weights, ended.weights, where=where)
        losses = alone.losses[SAVED_AFTER:]
        expect_equal_losses(resumed.losses, losses, tolerance=TOLERANCE, where=where)


CHANGED = ({"lr": 0.004, "weight_decay": 0.1}, {"lr": 0.003, "weight_decay": 0.2})
"""Hyperparameters of the param groups of `TwoGroups`, as `ChangeGroups` sets them."""


def _halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters into those of the blocks and the rest."""
    parameters = dict(module.named_parameters())
    blocks = [p for name, p in parameters.items() if "blocks" in name]
    return blocks, [p for name, p in parameters.items() if "blocks" not in name]


class TwoGroups(Resumable):
    """Its optimizer has two param groups."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return other hyperparameters for the blocks than for the rest."""
        blocks, rest = _halves(self)
        return self.adam([{"params": blocks}, {"params": rest, "lr": 0.003, "weight_decay": 0.0}])


class ChangeGroups(Callback):
    """Sets one hyperparameter in each group, like a hand-written schedule."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            first, second = trainer.optimizers[0].param_groups
            first["lr"], second["weight_decay"] = CHANGED[0]["lr"], CHANGED[1]["weight_decay"]


class TwoOptimizers(Resumable):
    """Steps two optimizers of different kinds in manual optimization."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        loss = self.loss(self.batch_of_step(self.trainer.global_step // 2))
        self.record(loss)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        blocks, rest = _halves(self)
        return [self.adam(blocks), torch.optim.SGD(rest, lr=0.02, momentum=0.9)]


def _saved_state(subject: Subject, task: Task, step: int = SAVED_AFTER) -> Snapshot:
    """Return the state after some steps."""
    return run(subject, replace(task, steps=step), paths={step: ""}).saved


def _round_trip(subject: Subject, task: Task, path: str, step: int = SAVED_AFTER) -> tuple[Record, Record]:
    """Train and save without interruption, and resume from other initial weights."""
    uninterrupted = run(subject, task, paths={step: path})
    return uninterrupted, run(subject, replace(task, seed=task.seed + 1), ckpt_path=path)


def _change_groups(subject: Subject, task: Task, path: str) -> tuple[Record, Record]:
    uninterrupted = run(subject, task, paths={SAVED_AFTER: path}, callbacks=[ChangeGroups()])
    return uninterrupted, run(subject, task, ckpt_path=path)


def _relay(subject: Subject, task: Task, path: str) -> tuple[Record, Record]:
    run(subject, replace(task, steps=1), paths={1: path})
    second = run(subject, replace(task, steps=3, seed=8), paths={3: path}, ckpt_path=path)
    return second, run(subject, replace(task, seed=9), ckpt_path=path)


def _save_afterwards(subject: Subject, task: Task, path: str) -> tuple[Outcome, Record]:
    module = task.module()
    trainer = trainer_for(subject, replace(task, steps=SAVED_AFTER))
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return outcome_of(trainer, module), run(subject, replace(task, seed=8), ckpt_path=path)


# Resuming at another world size, under `ddp`, and from `ddp`.


_DDP = Subject("ddp")
_WORLD_SIZES = (1, 2, 3)


@check(deadline=180)
def resume_at_world_sizes(bench: Bench) -> None:
    """A checkpoint of 1, 2 or 3 ranks resumes exactly on 1, 2 and 3 ranks."""
    for saved_by in _WORLD_SIZES:
        path = _path(bench, saved_by)
        saved = bench.run(save, TASK, path, world_size=saved_by)[0]
        for resumed_by in _WORLD_SIZES:
            ranks = bench.run(resume, TASK, path, world_size=resumed_by)
            expect_resumed(bench, ranks, saved, f"saved by {saved_by}, resumed by {resumed_by}")


@check(kinds=("backend", "strategy"))
def resume_from_ddp(bench: Bench) -> None:
    """A checkpoint that `ddp` wrote with `nnx.CheckpointIO` resumes exactly."""
    _require_shared_format(bench)
    path = _path(bench, 2)
    saved = bench.run(save, TASK, path, subject=_DDP)[0]
    for world_size in bench.world_sizes:
        ranks = bench.run(resume, TASK, path, world_size=world_size)
        expect_resumed(bench, ranks, saved, f"saved by 2 under ddp, resumed by {world_size}")


@check(kinds=("backend", "strategy"))
def resume_under_ddp(bench: Bench) -> None:
    """A checkpoint of the strategy resumes exactly under `ddp` with `nnx.CheckpointIO`."""
    _require_shared_format(bench)
    path = _path(bench, 2)
    saved = bench.run(save, TASK, path)[0]
    for world_size in bench.world_sizes:
        ranks = bench.run(resume, TASK, path, world_size=world_size, subject=_DDP)
        expect_resumed(bench, ranks, saved, f"saved by 2, resumed by {world_size} under ddp")


def _require_shared_format(bench: Bench) -> None:
    """Skip the check for a raw strategy with a checkpoint format of its own."""
    if bench.identity.kind == "strategy":
        saved_checkpoint(bench)


def _path(bench: Bench, saved_by: int) -> str:
    return str(bench.directory / f"saved-by-{saved_by}.ckpt")


# A resumed run draws the random numbers and reads the data of the uninterrupted one.


@check(of_adapter=True)
def random_state_resumes(bench: Bench) -> None:
    """A run resumed mid-epoch draws each rank's next random numbers: dropout and losses match bitwise."""
    ranks = bench.run(_interrupted, DROPPING, path_in(bench))
    open_saved(bench)
    for rank, (uninterrupted, resumed) in enumerate(ranks):
        where = f"rank {rank}, resumed after step {SAVED_AFTER}"
        _expect_equal(resumed.drawn, uninterrupted.drawn[SAVED_AFTER:], f"{where}: random numbers drawn")
        _expect_equal(resumed.losses, uninterrupted.losses[SAVED_AFTER:], f"{where}: losses")
        for name, wanted in uninterrupted.weights.items():
            same = torch.equal(resumed.weights[name], wanted)
            expect(same, f"{where}: {name} is not bitwise equal to the uninterrupted run.")


@check(of_adapter=True)
def random_state_resumes_per_rank(bench: Bench) -> None:
    """Ranks that drew different random numbers before the save continue their own sequences."""
    ranks = bench.run(_interrupted, DROPPING, path_in(bench))
    open_saved(bench)
    first: dict[int, Any] = {}
    for rank, (uninterrupted, resumed) in enumerate(ranks):
        twin = first.setdefault(uninterrupted.share, resumed)
        expect(
            twin is resumed or twin.drawn == resumed.drawn,
            f"ranks that read the same data drew {twin.drawn} and, on rank {rank}, {resumed.drawn}.",
        )
    drawn = [tuple(map(tuple, resumed.drawn)) for resumed in first.values()]
    expect(len(set(drawn)) == len(drawn), f"several resumed ranks drew the same numbers: {drawn[0]}.")


@check(of_adapter=True)
def save_keeps_training_unchanged(bench: Bench) -> None:
    """A saving run draws the same random numbers and has the same losses as a run that does not save."""
    for rank, (silent, saving) in enumerate(bench.run(_with_and_without, DROPPING, path_in(bench))):
        _expect_equal(saving.drawn, silent.drawn, f"rank {rank}: random numbers drawn in a run that saves")
        _expect_equal(saving.losses, silent.losses, f"rank {rank}: losses of a run that saves")


@check(of_adapter=True)
def data_position_resumes(bench: Bench) -> None:
    """A run resumed within a shuffled epoch reads the remaining samples, once, at any world size."""
    path = path_in(bench)
    everything = set(range(DROPPING.batches * GLOBAL_BATCH))
    before = _read(bench.run(_read_first, DROPPING, path))
    open_saved(bench)
    for world_size in (2, 1) if not bench.full else (2, 1, 3):
        after = _read(bench.run(_read_rest, DROPPING, path, world_size=world_size))
        where = f"saved by 2, resumed by {world_size}"
        again, left = sorted(before & after), sorted(everything - before - after)
        expect(not again, f"{where}: the run read samples {again[:5]} again ({len(again)} in all).")
        expect(not left, f"{where}: the run never read samples {left[:5]} ({len(left)} in all).")


def _expect_equal(seen: list[Any], wanted: list[Any], what: str) -> None:
    expect(len(seen) == len(wanted), f"{what}: {len(seen)} of them, expected {len(wanted)}.")
    for step, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        expect(one == other, f"{what}: {one} in step {step}, expected {other}.")


def _read(ranks: list[list[int]]) -> set[int]:
    return {sample for rank in ranks for sample in rank}


class Dropping(Plain):
    """Has dropout, and records the other random numbers of each step."""

    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.3)
        self.drawn: list[list[float]] = []
        self.share = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.dropout(hidden))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.share = share_of(self.trainer)["rank"]
        loss = super().training_step(batch, index)
        self.drawn.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
        return loss


class Shuffled(Plain):
    """Reads its data in random order, and records the samples."""

    def build(self) -> None:
        super().build()
        self.read: list[int] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.read += batch[2].tolist()
        return super().training_step(batch, index)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return one epoch of data, which Trainer distributes over the ranks."""
        inputs, targets = dataset(self.task).tensors
        data = TensorDataset(inputs, targets, torch.arange(len(inputs)))
        size = GLOBAL_BATCH // share_of(self.trainer)["num_replicas"]
        return DataLoader(data, batch_size=size, shuffle=True)


DROPPING = Task(model=Dropping, optimizer="adamw", steps=5)


class SeedRanks(Callback):
    """Seeds each data rank differently, as user code does with `seed_everything`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed once, in the run that is saved."""
        seed = 100 + share_of(trainer)["rank"]
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


@dataclass
class _Seen:
    """The random numbers and results of a run.

    Attributes:
        share: The number of this rank's share of the data.
        drawn: Random numbers of each step.
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
    uninterrupted = _fit(subject, task, SeedRanks(), SaveAt({SAVED_AFTER: path}))
    return uninterrupted, _fit(subject, replace(task, seed=task.seed + 1), ckpt_path=path)


def _with_and_without(subject: Subject, task: Task, path: str) -> tuple[_Seen, _Seen]:
    silent = _fit(subject, task, SeedRanks())
    return silent, _fit(subject, task, SeedRanks(), SaveAt({1: path, 3: path}))


def _read_first(subject: Subject, task: Task, path: str) -> list[int]:
    return _read_shuffled(subject, task, SaveAt({SAVED_AFTER: path}), max_steps=SAVED_AFTER)


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

"""Repetition: several runs in one process, by name and by object, and beside another strategy."""

from __future__ import annotations

import pickle
from typing import Any

from lightning.pytorch import Callback

import nnx
from nnx.testing.conformance.bench import Bench
from nnx.testing.conformance.check import check, expect
from nnx.testing.conformance.comparing import TOLERANCE, expect_same_run
from nnx.testing.conformance.subject import Subject
from nnx.testing.conformance.task import Outcome, Task
from nnx.testing.conformance.training import fit

TASK = Task()
TOLERATED = TOLERANCE[TASK.dtype]


@check()
def two_trainers(bench: Bench) -> None:
    """A second Trainer in the same process trains as the first."""
    alone = bench.train_alone(TASK)
    first, second = zip(*bench.run(train_twice), strict=True)
    expect_same_run(first, alone, tolerance=TOLERATED, what="the first Trainer")
    expect_same_run(second, alone, tolerance=TOLERATED, what="the second Trainer")


@check()
def beside_another_strategy(bench: Bench) -> None:
    """It works in a process in which another strategy was used, and that one works after it."""
    alone = bench.train_alone(TASK)
    own, other = zip(*bench.run(train_beside), strict=True)
    expect_same_run(own, alone, tolerance=TOLERATED, what="after 'ddp'")
    expect_same_run(other, alone, tolerance=TOLERATED, what="'ddp' after it")


@check()
def pickled_object(bench: Bench) -> None:
    """The object of ``nnx.strategy(NAME)`` can be pickled, as spawning needs it, and trains like the name."""
    ranks = bench.run(train_with_pickled)
    expect_same_run(ranks, bench.train_alone(TASK), tolerance=TOLERATED)


@check()
def agreed_stop(bench: Bench) -> None:
    """When one rank wants to stop, ``reduce_boolean_decision`` makes all stop after the same step."""
    alone = bench.train_alone(Task(steps=2))
    expect_same_run(bench.run(stop_early), alone, tolerance=TOLERATED)


@check()
def stop_only_together(bench: Bench) -> None:
    """``reduce_boolean_decision`` says yes to "all agree" only if all ranks do."""
    for rank, (every, some) in enumerate(bench.run(decide)):
        expect(
            (every, some) == (False, True),
            f"rank {rank}: one of two ranks said yes; all=True gave {every} and all=False gave {some}, "
            "expected False and True.",
        )


def train_twice(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train two modules with a Trainer each."""
    return fit(subject, TASK), fit(subject, TASK)


def train_beside(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train with Lightning's ``ddp``, with the strategy, and with ``ddp`` again."""
    fit(Subject("ddp"), TASK)
    return fit(subject, TASK), fit(Subject("ddp"), TASK)


def train_with_pickled(subject: Subject) -> Outcome:
    """Train with a strategy object that has been through a pickle."""
    strategy = nnx.strategy(subject.name, namespace="lightning.pytorch", **subject.options)
    return fit(subject, TASK, strategy=pickle.loads(pickle.dumps(strategy)))


class _Stopper(Callback):
    """Wants to stop after the second step, on the last rank only."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        is_last = trainer.global_rank == trainer.world_size - 1
        wish = is_last and trainer.global_step == 2
        if trainer.strategy.reduce_boolean_decision(wish, all=False):
            trainer.should_stop = True


def stop_early(subject: Subject) -> Outcome:
    """Train until one rank wants to stop."""
    return fit(subject, Task(steps=5), callbacks=[_Stopper()])


class _Voter(Callback):
    """Asks once whether all or some agree, where only rank 0 does."""

    votes: tuple[bool, bool]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        decide = trainer.strategy.reduce_boolean_decision
        wish = trainer.global_rank == 0
        self.votes = bool(decide(wish, all=True)), bool(decide(wish, all=False))


def decide(subject: Subject) -> tuple[bool, bool]:
    """What the strategy makes of one yes and one no."""
    voter = _Voter()
    fit(subject, Task(steps=1), callbacks=[voter])
    return voter.votes

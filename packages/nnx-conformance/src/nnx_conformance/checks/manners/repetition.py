"""Repetition: several runs in one process, by name and by object, and beside another strategy."""

from __future__ import annotations

import pickle
from typing import Any

from lightning.pytorch import Callback

import nnx_core
from nnx_conformance.check import TOLERANCE, Bench, check, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import fit

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


@check(of_adapter=True)
def pickled_object(bench: Bench) -> None:
    """The object of ``nnx.strategy(NAME)`` can be pickled, as spawning needs it, and trains like the name."""
    ranks = bench.run(train_with_pickled)
    expect_same_run(ranks, bench.train_alone(TASK), tolerance=TOLERATED)


@check(of_adapter=True)
def agreed_stop(bench: Bench) -> None:
    """When one rank wants to stop, ``reduce_boolean_decision`` makes all stop after the same step."""
    alone = bench.train_alone(Task(steps=2))
    expect_same_run(bench.run(stop_early), alone, tolerance=TOLERATED)


def train_twice(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train two modules with a Trainer each."""
    return fit(subject, TASK), fit(subject, TASK)


def train_beside(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train with Lightning's ``ddp``, with the strategy, and with ``ddp`` again."""
    fit(Subject("ddp"), TASK)
    return fit(subject, TASK), fit(Subject("ddp"), TASK)


def train_with_pickled(subject: Subject) -> Outcome:
    """Train with a strategy object that has been through a pickle."""
    strategy = nnx_core.strategy(subject.name, namespace="lightning.pytorch", **subject.options)
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

"""The strategy works more than once in a process, beside others, and in both copies of Lightning."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

import nnx_core
from nnx_conformance.check import Bench, check
from nnx_conformance.comparing import TOLERANCE, expect_equal_losses, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import Loop, fit, train, trainer_settings

# `lightning` on one side, `pytorch_lightning` and `lightning_fabric` on the other, are separate module
# trees. A strategy object works in one of them, so each tree gets a class of its own.


REPEATED = Task()


@check("trainer", kinds=("backend", "lightning"), of_adapter=True)
def pytorch_lightning(bench: Bench) -> None:
    """The strategy works with Trainer of `pytorch_lightning` as with that of `lightning.pytorch`."""
    alone = bench.train_alone(REPEATED)
    for rank, losses in enumerate(bench.run(fit_in_other_copy, REPEATED)):
        where = f"pytorch_lightning, rank {rank}"
        expect_equal_losses(losses, alone.losses, tolerance=TOLERANCE[REPEATED.dtype], where=where)


@check("fabric", kinds=("backend", "lightning"), of_adapter=True)
def lightning_fabric(bench: Bench) -> None:
    """The strategy works with Fabric of `lightning_fabric` as with that of `lightning.fabric`."""
    loop = Loop()
    alone = bench.alone(train, loop)
    for rank, seen in enumerate(bench.run(train, loop, "lightning_fabric")):
        where = f"lightning_fabric, rank {rank}"
        expect_equal_losses(seen.losses, alone.losses, tolerance=TOLERANCE["float32"], where=where)


def fit_in_other_copy(subject: Subject, task: Task) -> list[float]:
    """Train the plain model as a LightningModule of `pytorch_lightning`, and return the losses."""
    tree = importlib.import_module("pytorch_lightning")
    base: Any = tree.LightningModule

    class Wrapped(base):  # type: ignore[misc] # its base is known only now
        def __init__(self) -> None:
            super().__init__()
            self.plain = Plain(task)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(x)  # type: ignore[no-any-return]

        def dummy_forward_args_fn(self, batch: list[Tensor]) -> dict[str, Tensor]:
            return {"x": batch[0]}

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.plain.training_step(batch, index)

        def configure_optimizers(self) -> Any:
            return self.plain.optimizer(self.parameters())

        def train_dataloader(self) -> Any:
            from nnx_conformance.task import loader

            return loader(task, self.trainer)

    module = Wrapped()
    trainer = tree.Trainer(**trainer_settings(subject, task, namespace="pytorch_lightning"))
    trainer.fit(module)
    return list(module.plain.losses)


TOLERATED = TOLERANCE[REPEATED.dtype]


@check()
def two_trainers(bench: Bench) -> None:
    """A second Trainer in the same process trains like the first."""
    alone = bench.train_alone(REPEATED)
    first, second = zip(*bench.run(train_twice), strict=True)
    expect_same_run(first, alone, tolerance=TOLERATED, what="the first Trainer")
    expect_same_run(second, alone, tolerance=TOLERATED, what="the second Trainer")


@check()
def two_strategies_in_one_process(bench: Bench) -> None:
    """Two strategies work in one process, one after the other and back."""
    alone = bench.train_alone(REPEATED)
    own, other = zip(*bench.run(train_beside), strict=True)
    expect_same_run(own, alone, tolerance=TOLERATED, what="after 'ddp'")
    expect_same_run(other, alone, tolerance=TOLERATED, what="'ddp' after it")


@check(of_adapter=True)
def strategy_can_be_pickled(bench: Bench) -> None:
    """The object of ``nnx.strategy(NAME)`` can be pickled, for spawning, and trains like the name."""
    ranks = bench.run(train_with_pickled)
    expect_same_run(ranks, bench.train_alone(REPEATED), tolerance=TOLERATED)


@check(of_adapter=True)
def stop_by_boolean_decision(bench: Bench) -> None:
    """``reduce_boolean_decision`` stops all ranks after the same step when one rank wants to stop."""
    alone = bench.train_alone(Task(steps=2))
    expect_same_run(bench.run(stop_early), alone, tolerance=TOLERATED)


def train_twice(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train two modules with a Trainer each."""
    return fit(subject, REPEATED), fit(subject, REPEATED)


def train_beside(subject: Subject) -> tuple[Outcome, Outcome]:
    """Train with Lightning's ``ddp``, with the strategy, and with ``ddp`` again."""
    fit(Subject("ddp"), REPEATED)
    return fit(subject, REPEATED), fit(Subject("ddp"), REPEATED)


def train_with_pickled(subject: Subject) -> Outcome:
    """Train with an unpickled strategy object."""
    strategy = nnx_core.strategy(subject.name, namespace="lightning.pytorch", **subject.options)
    return fit(subject, REPEATED, strategy=pickle.loads(pickle.dumps(strategy)))


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

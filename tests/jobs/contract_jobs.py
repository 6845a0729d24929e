"""Runs on the engines of the contract's worked examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from jobs import engines
from jobs.training import Net, Outcome, Run, make_trainer, train


def train_with_engines(run: Run) -> Outcome:
    """Train under one of the engines."""
    engines.register()
    return train(run)


def save_afterwards(run: Run, path: str) -> None:
    """Train under one of the engines, evaluate, and save when both runs have ended."""
    engines.register()
    trainer = make_trainer(run)
    module = Net(run)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    trainer.save_checkpoint(path)


def sampled(run: Run) -> tuple[list[Any], bool]:
    """Shapes of the example inputs that an engine was given, and whether parameters came back whole."""
    engines.register()
    module = Net(run)
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    trainer = make_trainer(run)
    trainer.fit(module)
    back = {name: value.shape for name, value in module.state_dict().items()}
    return trainer.strategy.backend.sample_shapes, shapes == back


def reduced_over_shares() -> dict[str, Any]:
    """What Trainer reduces where all ranks read the same data: what is logged, and what a hook asks for."""
    engines.register()
    run = Run(strategy="column_parallel", steps=1)
    note = _Reduces()
    make_trainer(run, callbacks=[note]).fit(Net(run))
    return note.results


class _Reduces(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        reduce, me = trainer.strategy.reduce, trainer.global_rank
        module.log("sum", 3.0, sync_dist=True, reduce_fx="sum", on_epoch=True)
        module.log("mean", float(me), sync_dist=True, on_epoch=True, batch_size=1)
        self.results = {
            "a sum": reduce(torch.tensor(3.0 + me), reduce_op="sum").item(),
            "a sum by its operation": reduce(torch.tensor(3), reduce_op=dist.ReduceOp.SUM).item(),
            "a product": reduce(torch.tensor(3.0), reduce_op="product").item(),
            "a mean": reduce(torch.tensor(float(me)), reduce_op="mean").item(),
            "a group's sum": reduce(torch.tensor(3.0), group=dist.group.WORLD, reduce_op="sum").item(),
            "all": trainer.strategy.reduce_boolean_decision(True),
            "all but one": trainer.strategy.reduce_boolean_decision(me == 0),
            "any": trainer.strategy.reduce_boolean_decision(me == 0, all=False),
        }

    def on_train_end(self, trainer: Any, module: Any) -> None:
        logged = trainer.callback_metrics
        self.results |= {f"logged {name}": logged[name].item() for name in ("sum", "mean")}

"""Runs on the engines of the contract's worked examples."""

from __future__ import annotations

from typing import Any

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

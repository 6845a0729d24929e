"""How most checks of structure compare."""

from __future__ import annotations

from typing import Any

from nnx.testing.conformance.bench import Bench
from nnx.testing.conformance.comparing import TOLERANCE, expect_same_run
from nnx.testing.conformance.models import Plain
from nnx.testing.conformance.task import Task

__all__ = ["trains"]


def trains(bench: Bench, model: type[Plain], *, like: type[Plain] | None = None, **changes: Any) -> None:
    """Every rank trains the model as one process does, or as one process trains another model.

    Args:
        bench: Of the check.
        model: What is trained.
        like: The model that gives the same numbers in one process; by default it is the same one.
        **changes: To the task.
    """
    task = Task(model=model, **changes)
    alone = bench.train_alone(Task(model=like or model, **changes))
    for world_size in bench.world_sizes:
        ranks = bench.train(task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype])

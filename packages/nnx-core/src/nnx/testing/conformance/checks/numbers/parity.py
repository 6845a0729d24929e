"""What most of these checks come down to: training a task gives what one process gives."""

from __future__ import annotations

from nnx.testing.conformance.bench import Bench
from nnx.testing.conformance.comparing import TOLERANCE, expect_same_run
from nnx.testing.conformance.task import Task

__all__ = ["expect_parity"]


def expect_parity(bench: Bench, task: Task, *, what: str = "") -> None:
    """Train a task at every world size, and compare losses and final weights with one process.

    Args:
        bench: The check's tools.
        task: What is trained.
        what: What is tried, for the message.
    """
    alone = bench.train_alone(task)
    for world_size in bench.world_sizes:
        ranks = bench.train(task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype], what=what)

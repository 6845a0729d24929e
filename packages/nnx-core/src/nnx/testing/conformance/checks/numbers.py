"""The numbers of training: losses and updates equal those of one process on the same global batches.

Tasks descend without momentum, so that the difference of two weights is a gradient: a wrong scale shows.
"""

from __future__ import annotations

from nnx.testing.conformance.bench import Bench
from nnx.testing.conformance.check import check
from nnx.testing.conformance.comparing import TOLERANCE, expect_same_run
from nnx.testing.conformance.task import Task


def _compare(bench: Bench, task: Task) -> None:
    alone = bench.train_alone(task)
    for world_size in bench.world_sizes:
        ranks = bench.train(task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype])


@check()
def losses_float32(bench: Bench) -> None:
    """Losses and updates of every step are those of one process, in float32."""
    _compare(bench, Task())


@check()
def losses_float64(bench: Bench) -> None:
    """Losses and updates of every step are those of one process, in float64."""
    _compare(bench, Task(dtype="float64"))

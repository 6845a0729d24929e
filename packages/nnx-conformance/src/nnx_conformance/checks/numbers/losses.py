"""Losses and updates of plain training, from equal weights."""

from __future__ import annotations

import os
from dataclasses import replace

from nnx_conformance.check import Bench, check
from nnx_conformance.comparing import TOLERANCE, expect_parity, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import fit


@check()
def losses_float32(bench: Bench) -> None:
    """Losses and updates of every step are those of one process, in float32."""
    expect_parity(bench, Task())


@check("precisions:64-true")
def losses_float64(bench: Bench) -> None:
    """Losses and updates of every step are those of one process, in float64."""
    expect_parity(bench, Task(dtype="float64"))


@check()
def ranks_start_alike(bench: Bench) -> None:
    """All ranks start from rank 0's weights, whatever seed each built its model with."""
    task = Task(steps=2)
    alone = bench.train_alone(task)
    for world_size in bench.world_sizes:
        ranks = bench.run(_fit_seeded_by_rank, task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype])


def _fit_seeded_by_rank(subject: Subject, task: Task) -> Outcome:
    return fit(subject, replace(task, seed=task.seed + int(os.environ["RANK"])))

"""Losses and updates of plain training, from equal weights."""

from __future__ import annotations

import os
from dataclasses import replace

from torch.optim import Optimizer

from nnx_conformance.check import TOLERANCE, Bench, check, expect_parity, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task
from nnx_conformance.training import fit

# --- losses ---------------------------------------------------------------------------------------


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


# --- gradients ------------------------------------------------------------------------------------
# What happens to gradients between backward and step: accumulating, clipping, zeroing.


_SMALL_NORM = 0.05
"""Far below the norm of the first gradients, about 1."""
_SMALL_VALUE = 0.01
"""Below a good part of their elements."""


@check("gradient_accumulation")
def accumulation(bench: Bench) -> None:
    """Gradients accumulated over two batches give the step of one process that does the same."""
    expect_parity(bench, Task(accumulate=2))


@check("gradient_accumulation", of_adapter=True)
def accumulation_cut_short(bench: Bench) -> None:
    """The last accumulation of an epoch steps although it has fewer batches, as in one process."""
    expect_parity(bench, Task(accumulate=3, batches=5, steps=4))


@check("clip_by_norm")
def clip_by_norm(bench: Bench) -> None:
    """Gradients are clipped by their norm over all parameters and all ranks."""
    expect_parity(bench, Task(clip=_SMALL_NORM))


@check("clip_by_value")
def clip_by_value(bench: Bench) -> None:
    """Every element of the averaged gradients is clipped by value."""
    expect_parity(bench, Task(clip=_SMALL_VALUE, clip_algorithm="value"))


@check("clip_by_norm", "gradient_accumulation")
def clip_accumulated(bench: Bench) -> None:
    """What accumulates is clipped once, when it is complete."""
    expect_parity(bench, Task(accumulate=2, clip=_SMALL_NORM, steps=2))


@check()
def gradients_zeroed_in_place(bench: Bench) -> None:
    """No gradient leaks into the next step where they are zeroed in place instead of being dropped."""
    expect_parity(bench, Task(model=_ZeroedInPlace))


class _ZeroedInPlace(Plain):
    """Writes zeros into the gradients, as code did before torch dropped them by default."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """In place."""
        optimizer.zero_grad(set_to_none=False)

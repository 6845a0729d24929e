"""Resuming elsewhere: with another number of ranks, under `ddp`, and from `ddp`."""

from __future__ import annotations

from dataclasses import replace

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.checkpoints.runs import SAVED_AFTER, TASK, TOLERANCE, Record, run
from nnx_conformance.checks.checkpoints.snapshots import (
    expect_same_groups,
    expect_same_optimizers,
    expect_same_weights,
)
from nnx_conformance.checks.checkpoints.stored import save, saved_checkpoint
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task

_DDP = Subject("ddp")
_WORLD_SIZES = (1, 2, 3)


@check(deadline=180)
def resume_at_world_sizes(bench: Bench) -> None:
    """What 1, 2 or 3 ranks saved is resumed exactly by 1, 2 and 3 ranks."""
    for saved_by in _WORLD_SIZES:
        path = _path(bench, saved_by)
        saved = bench.run(save, TASK, path, world_size=saved_by)[0]
        for resumed_by in _WORLD_SIZES:
            ranks = bench.run(_resume, TASK, path, world_size=resumed_by)
            _expect_resumed(bench, ranks, saved, f"saved by {saved_by}, resumed by {resumed_by}")


@check(kinds=("backend", "strategy"))
def resume_from_ddp(bench: Bench) -> None:
    """A checkpoint that `ddp` wrote with `nnx.CheckpointIO` is resumed exactly."""
    _require_shared_format(bench)
    path = _path(bench, 2)
    saved = bench.run(save, TASK, path, subject=_DDP)[0]
    for world_size in bench.world_sizes:
        ranks = bench.run(_resume, TASK, path, world_size=world_size)
        _expect_resumed(bench, ranks, saved, f"saved by 2 under ddp, resumed by {world_size}")


@check(kinds=("backend", "strategy"))
def resume_under_ddp(bench: Bench) -> None:
    """What it wrote is resumed exactly by `ddp` with `nnx.CheckpointIO`."""
    _require_shared_format(bench)
    path = _path(bench, 2)
    saved = bench.run(save, TASK, path)[0]
    for world_size in bench.world_sizes:
        ranks = bench.run(_resume, TASK, path, world_size=world_size, subject=_DDP)
        _expect_resumed(bench, ranks, saved, f"saved by 2, resumed by {world_size} under ddp")


def _require_shared_format(bench: Bench) -> None:
    """A raw strategy may read and write in a way of its own."""
    if bench.identity.kind == "strategy":
        saved_checkpoint(bench)


def _expect_resumed(bench: Bench, ranks: list[Record], saved: Record, what: str) -> None:
    """State to the bit, and losses and final weights of one process that was never interrupted."""
    alone: Record = bench.alone(run, TASK)
    for rank, resumed in enumerate(ranks):
        where = f"{what}, rank {rank}"
        expect_same_weights(resumed.started, saved.saved, where=where)
        expect_same_optimizers(resumed.started, saved.saved, where=where)
        expect_same_groups(resumed.started, saved.saved, where=where)
        counters = resumed.started.counters
        expect(counters == saved.saved.counters, f"{where}: {counters}, saved was {saved.saved.counters}.")
        losses = alone.losses[SAVED_AFTER:]
        expect_equal_losses(resumed.losses, losses, tolerance=TOLERANCE, where=where)
        expect_equal_weights(resumed.weights, alone.weights, tolerance=TOLERANCE, where=where)


def _path(bench: Bench, saved_by: int) -> str:
    return str(bench.directory / f"saved-by-{saved_by}.ckpt")


# --- jobs -----------------------------------------------------------------------------------------


def _resume(subject: Subject, task: Task, path: str) -> Record:
    return run(subject, replace(task, seed=task.seed + 1), ckpt_path=path)

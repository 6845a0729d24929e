"""What the ranks have saved, opened where the check runs."""

from __future__ import annotations

from dataclasses import replace

import nnx_checkpoint
from nnx_checkpoint import NativeCheckpoint
from nnx_conformance.check import Bench
from nnx_conformance.checks.checkpoints.runs import SAVED_AFTER, TASK, Record, run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task


def path_in(bench: Bench) -> str:
    """Where a check lets its strategy save."""
    return str(bench.directory / "saved.ckpt")


def saved_checkpoint(bench: Bench, *, weights_only: bool = False) -> tuple[NativeCheckpoint, Record]:
    """A checkpoint of the strategy, opened, and the run that saved it.

    Args:
        bench: The bench of the check.
        weights_only: Save the weights only.
    """
    saved: Record = bench.run(save, TASK, path_in(bench), weights_only)[0]
    return open_saved(bench), saved


def open_saved(bench: Bench) -> NativeCheckpoint:
    """Open what was saved.

    Raises:
        NotApplicable: A strategy that brings its own way of saving has written its own format.
    """
    stored = nnx_checkpoint.open_checkpoint(path_in(bench))
    if isinstance(stored, NativeCheckpoint):
        return stored
    bench.not_applicable(
        f"it does not let nnx.CheckpointIO write: its checkpoints are of format {stored.format!r}"
    )


def save(subject: Subject, task: Task, path: str, weights_only: bool = False) -> Record:
    """A job that trains and saves.

    Args:
        subject: The strategy.
        task: The training to run.
        path: The path to save to; empty to look at the state only.
        weights_only: Save the weights only.
    """
    paths = {SAVED_AFTER: path}
    return run(subject, replace(task, steps=SAVED_AFTER), paths=paths, weights_only=weights_only)

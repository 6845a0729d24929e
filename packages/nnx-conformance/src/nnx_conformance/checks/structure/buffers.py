"""Buffers, and norms over the batch, which keep statistics in them."""

from __future__ import annotations

import torch
from torch import Tensor

from nnx_conformance import structure_jobs as jobs
from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_same_run
from nnx_conformance.task import Outcome, Task

_COUNTED = ("total", "unsaved", "steps")


def _expect_buffers(seen: dict[str, Tensor], expected: dict[str, Tensor], *, where: str) -> None:
    for name, wanted in expected.items():
        found = seen[name]
        expect(
            found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4),
            f"{where}: the buffer {name!r} is {found.tolist()}, rank 0's own data make it {wanted.tolist()}.",
        )


def _counts(seen: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    return {"total": seen["own"], "unsaved": seen["own"], "steps": torch.tensor(steps)}


@check()
def buffers_keep_updates(bench: Bench) -> None:
    """What training writes into buffers is there after it, and they have their names, dtypes and values."""
    rank_zero, *_ = bench.run(jobs.watch_buffers, Task(model=jobs.Counting), True)
    (after,) = rank_zero["end"]
    expected = {
        **_counts(after, 3),
        "wave": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64),
        "mask": torch.tensor([True, False, True]),
    }
    _expect_buffers(after, expected, where="rank 0, after training")


@check()
def buffers_in_validation(bench: Bench) -> None:
    """Validation within fit has rank 0's buffers on every rank."""
    ranks = bench.run(jobs.watch_buffers, Task(model=jobs.Counting), True)
    for step, first in enumerate(ranks[0]["validate"]):
        for rank, report in enumerate(ranks):
            where = f"validation after step {step}, rank {rank}"
            _expect_buffers(report["validate"][step], _counts(first, step + 1), where=where)


@check()
def buffers_in_a_later_test(bench: Bench) -> None:
    """A test after fit has rank 0's buffers on every rank."""
    ranks = bench.run(jobs.watch_buffers, Task(model=jobs.Counting), False)
    for rank, report in enumerate(ranks):
        expected = _counts(ranks[0]["test"][0], 3)
        _expect_buffers(report["test"][0], expected, where=f"test after fit, rank {rank}")


@check()
def batch_norm(bench: Bench) -> None:
    """Running statistics are those of rank 0's data; every rank's validation computes with them."""
    ranks = bench.run(jobs.watch_buffers, Task(model=jobs.Normalizing), True)
    for step, first in enumerate(ranks[0]["validate"]):
        expected = {
            "norm.running_mean": first["own_mean"],
            "norm.running_var": first["own_var"],
            "norm.num_batches_tracked": torch.tensor(step + 1),
        }
        for rank, report in enumerate(ranks):
            _expect_buffers(report["validate"][step], expected, where=f"validation {step}, rank {rank}")
    worst = max(report["wrong"] for report in ranks)
    expect(worst < 1e-4, f"outputs in validation differ by {worst:.3g} from what the statistics make them.")


@check("sync_batchnorm")
def synchronized_batch_norm(bench: Bench) -> None:
    """With `sync_batchnorm` the statistics are those of the global batch, and the layers come back."""
    alone: Outcome = bench.alone(jobs.fit_synchronized, Task())
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(jobs.fit_synchronized, Task(), world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])
        for rank, outcome in enumerate(ranks):
            changed = sorted(set(outcome.notes["layers"]) - set(alone.notes["layers"]))
            expect(not changed, f"rank {rank}: after training the module has layers of class {changed}.")

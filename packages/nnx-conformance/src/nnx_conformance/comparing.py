"""Compare losses and weights with one plain process; failures show both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nnx_conformance.check import Bench, NumbersDiffer, expect
from nnx_conformance.task import Outcome, Plain, Task

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
"""Largest absolute difference of losses and weights after a few steps that rounding can cause."""


def expect_parity(bench: Bench, task: Task, *, like: Task | None = None, what: str = "") -> None:
    """Expect the losses and final weights of one process after training at every world size.

    Args:
        bench: The check's tools.
        task: The training to run.
        like: A task that gives the same numbers in one process; `task` by default.
        what: Describes the run, for the message.
    """
    alone = bench.train_alone(like or task)
    for world_size in bench.world_sizes:
        ranks = bench.train(task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype], what=what)


def expect_same_run(ranks: Sequence[Outcome], alone: Outcome, *, tolerance: float, what: str = "") -> None:
    """Expect the losses and final weights of one process on every rank.

    Args:
        ranks: The results of the strategy, in rank order.
        alone: The result of one process.
        tolerance: Largest absolute difference.
        what: Describes the run, for the message.
    """
    for rank, outcome in enumerate(ranks):
        where = f"{what + ', ' if what else ''}rank {rank} of {len(ranks)}"
        expect_equal_losses(outcome.losses, alone.losses, tolerance=tolerance, where=where)
        expect_equal_weights(outcome.weights, alone.weights, tolerance=tolerance, where=where)


def expect_equal_losses(
    losses: Sequence[float], expected: Sequence[float], *, tolerance: float, where: str
) -> None:
    """Expect equal losses of every batch; the error names the first that differs."""
    expect(len(losses) == len(expected), f"{where}: {len(losses)} batches, expected {len(expected)}.")
    for batch, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        # This form of comparison also fails for NaN.
        if not abs(loss - wanted) <= tolerance:
            raise NumbersDiffer(
                f"{where}: the loss of batch {batch} is {loss:.10g}, one process has {wanted:.10g}; "
                f"they differ by {abs(loss - wanted):.3g}, allowed are {tolerance:g}."
            )


def expect_equal_weights(
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    tolerance: float,
    where: str,
    source: str = "one process",
) -> None:
    """Expect equal names, shapes, dtypes and values of tensors; the error names the worst tensor.

    Args:
        weights: The weights to test.
        expected: The expected weights.
        tolerance: Largest absolute difference; 0 for bitwise equality, apart from the sign of zero.
        where: Names the run and rank, for the message.
        source: The source of the expected weights, for the message.
    """
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    expect(
        not missing and not extra,
        f"{where}: {abbreviated(missing)} missing, {abbreviated(extra)} unexpected.",
    )
    for name, wanted in expected.items():
        seen = _form(weights[name])
        expect(seen == _form(wanted), f"{where}: {name} is {seen}, expected {_form(wanted)} as in {source}.")
    differences = {name: _difference(weights[name], wanted) for name, wanted in expected.items()}
    worst = max(differences, key=lambda name: differences[name], default="")
    if worst and not differences[worst] <= tolerance:
        raise NumbersDiffer(
            f"{where}: {worst} differs by {differences[worst]:.3g} from {source}; allowed are {tolerance:g}."
        )


def abbreviated(names: Sequence[str]) -> str:
    """Return the first few names, and their number.

    Example:
        >>> abbreviated(["a", "b", "c", "d"])
        'a, b, c (4 in all)'
        >>> abbreviated([])
        'nothing'
    """
    if len(names) > 3:
        return f"{', '.join(names[:3])} ({len(names)} in all)"
    return ", ".join(names) or "nothing"


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _difference(seen: Tensor, expected: Tensor) -> float:
    if not seen.numel():
        return 0.0
    exact = torch.complex128 if expected.is_complex() else torch.float64
    difference = (seen.to(exact) - expected.to(exact)).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def trains(bench: Bench, model: type[Plain], *, like: type[Plain] | None = None, **changes: Any) -> None:
    """Expect that every rank trains the model as one process trains it, or another model.

    Args:
        bench: The bench of the check.
        model: The model to train.
        like: A model that gives the same numbers in one process; `model` by default.
        **changes: Fields of the task.
    """
    expect_parity(bench, Task(model=model, **changes), like=Task(model=like or model, **changes))

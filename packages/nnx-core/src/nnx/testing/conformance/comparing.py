"""Comparisons that fail with what was seen: losses and weights against those of one plain process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nnx.testing.conformance.check import CheckFailed, expect
from nnx.testing.conformance.task import Outcome

__all__ = ["TOLERANCE", "expect_equal_losses", "expect_equal_weights", "expect_same_run"]

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
"""Largest absolute difference of losses and weights that rounding explains, after a few steps."""


def expect_same_run(ranks: Sequence[Outcome], alone: Outcome, *, tolerance: float, what: str = "") -> None:
    """Every rank's losses and final weights are those of one process.

    Args:
        ranks: What the strategy gave, in rank order.
        alone: What one process gave.
        tolerance: Largest absolute difference.
        what: What was tried, for the message.
    """
    for rank, outcome in enumerate(ranks):
        where = f"{what + ', ' if what else ''}rank {rank} of {len(ranks)}"
        expect_equal_losses(outcome.losses, alone.losses, tolerance=tolerance, where=where)
        expect_equal_weights(outcome.weights, alone.weights, tolerance=tolerance, where=where)


def expect_equal_losses(
    losses: Sequence[float], expected: Sequence[float], *, tolerance: float, where: str
) -> None:
    """Losses agree batch by batch; the first that does not is named."""
    expect(len(losses) == len(expected), f"{where}: {len(losses)} batches instead of {len(expected)}.")
    for batch, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        # Written so that a loss that is not a number fails.
        if not abs(loss - wanted) <= tolerance:
            raise CheckFailed(
                f"{where}: the loss of batch {batch} is {loss:.10g}, one process has {wanted:.10g}; "
                f"they differ by {abs(loss - wanted):.3g}, allowed are {tolerance:g}."
            )


def expect_equal_weights(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float, where: str
) -> None:
    """State dicts agree in names, shapes, dtypes and values; the worst tensor is named."""
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    expect(not missing and not extra, f"{where}: missing {missing}, unexpected {extra} in the state dict.")
    for name, wanted in expected.items():
        seen = weights[name]
        expect(
            (seen.shape, seen.dtype) == (wanted.shape, wanted.dtype),
            f"{where}: {name} is {tuple(seen.shape)} {seen.dtype}, "
            f"expected {tuple(wanted.shape)} {wanted.dtype}.",
        )
    differences = {name: _difference(weights[name], wanted) for name, wanted in expected.items()}
    worst = max(differences, key=lambda name: differences[name], default="")
    if worst and not differences[worst] <= tolerance:
        raise CheckFailed(
            f"{where}: {worst} differs by {differences[worst]:.3g} from one process; "
            f"allowed are {tolerance:g}."
        )


def _difference(seen: Tensor, expected: Tensor) -> float:
    if not seen.numel():
        return 0.0
    difference = (seen.double() - expected.double()).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())

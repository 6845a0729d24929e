"""Compare two sides that take turns step by step, in pairs, so that a busy machine affects both equally."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from nnscaler_step import Lap

__all__ = ["compare"]


def compare(ours: Sequence[Lap], theirs: Sequence[Lap], clock: str) -> float:
    """Print the results of one clock; return the median of the ratios of all pairs.

    Args:
        ours: The laps of nnx.
        theirs: The laps of the other side, each taken right before or after the lap of nnx at the same index.
        clock: The clock: ``"cpu"`` or ``"wall"``.

    Returns:
        The median.
    """
    mine, others = ([getattr(lap, clock) * 1e3 for lap in laps] for laps in (ours, theirs))
    for what, of in (("median", statistics.median), ("least", min)):
        one, other = of(mine), of(others)
        print(
            f"{clock:5}{what:7} ms per step: ours {one:8.2f}  theirs {other:8.2f}  ratio {one / other:.3f}",
            flush=True,
        )
    ratios = [one / other for one, other in zip(mine, others, strict=True)]
    middle = statistics.median(ratios)
    # Of a median, 1.25 times that of a mean; the quartiles are 1.35 standard deviations apart.
    low, _, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / 1.35 / math.sqrt(len(ratios))
    print(f"{clock:5}median of the ratios of all pairs {middle:.3f} +- {error:.3f}", flush=True)
    return middle

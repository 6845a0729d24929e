"""Count the extra work of runtime functions over the operators that they replace.

The extra work is collectives, small operators and further passes over a tensor. The counts follow the code in
`nnx_nnscaler.runtime`; a function that is not listed has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nnx_core.machine.hardware import Collective
from nnx_nnscaler.ir.graph import Op
from nnx_nnscaler.ir.placement import P, Strategy
from nnx_nnscaler.plan.work import Local, base_name


@dataclass(frozen=True, slots=True)
class Extra:
    """The extra work in one direction on one rank.

    Attributes:
        calls: The number of small operators.
        nbytes: The bytes that passes over large tensors read and write.
        special: The elements with expensive functions, such as exp.
        collectives: The kind and the full bytes of each collective.
    """

    calls: float = 0.0
    nbytes: float = 0.0
    special: float = 0.0
    collectives: tuple[tuple[Collective, float], ...] = ()


NOTHING = Extra()


_Both = tuple[Extra, Extra]


_SCALAR = 8.0


def extra_work(
    op: Op, strategy: Strategy, inputs: Sequence[Local], outputs: Sequence[Local], *, size: int
) -> _Both:
    """Return the extra work of an operator in forward and backward.

    Args:
        op: The operator.
        strategy: The strategy that splits it.
        inputs: The local operands.
        outputs: The local results.
        size: The number of ranks of the unit.
    """
    if strategy.is_replicated and not strategy.call:
        return NOTHING, NOTHING
    of_call = _OF_CALLS.get(strategy.call)
    if of_call is not None:
        return of_call(inputs, size)
    if strategy.outputs and strategy.outputs[0] == P:
        of_summand = _OF_SUMMANDS.get(base_name(op))
        if of_summand is not None:
            return of_summand([*inputs, *outputs], size)
    return NOTHING, NOTHING


def _vocabulary_cross_entropy(inputs: Sequence[Local], size: int) -> _Both:
    scores = inputs[0]
    rows = scores.nbytes / max(scores.shape[1], 1)
    exchanged: tuple[tuple[Collective, float], ...] = (("all_gather", size * rows), ("all_reduce", 2 * rows))
    # Forward: maxima, shifted scores, exponentials, their sum, and saved probabilities. Backward: two passes.
    forward = Extra(calls=20, nbytes=8 * scores.nbytes, collectives=exchanged)
    return forward, Extra(calls=6, nbytes=4 * scores.nbytes)


def _batch_norm_over_unit(inputs: Sequence[Local], size: int) -> _Both:
    x = inputs[0]
    channels = 4.0 * (x.shape[1] if len(x.shape) > 1 else 1)
    # Forward: one more pass for mean and variance. Backward: the gradient through the statistics.
    forward = Extra(
        calls=12, nbytes=x.nbytes, special=x.numel, collectives=(("all_gather", 2 * size * channels),)
    )
    return forward, Extra(calls=14, nbytes=9 * x.nbytes, collectives=(("all_reduce", 2 * channels),))


def _batch_norm_of_channels(inputs: Sequence[Local], size: int) -> _Both:
    x = inputs[0]
    channels = 4.0 * size * (x.shape[1] if len(x.shape) > 1 else 1)
    return Extra(calls=8, collectives=(("all_gather", 2 * channels),)), NOTHING


def _mean_over_samples(tensors: Sequence[Local], size: int) -> _Both:
    # The divisor is the number of samples that count on all ranks.
    return Extra(calls=6, collectives=(("all_reduce", _SCALAR),)), Extra(calls=3)


def _rows_of_a_table(tensors: Sequence[Local], size: int) -> _Both:
    # A rank looks up row 0 for rows of other ranks, and masks the result.
    found = tensors[-1]
    return Extra(calls=8, nbytes=2 * found.nbytes), Extra(calls=1, nbytes=2 * found.nbytes)


_OF_CALLS: dict[str, Callable[[Sequence[Local], int], _Both]] = {
    "vocabulary_cross_entropy": _vocabulary_cross_entropy,
    "batch_norm_over_unit": _batch_norm_over_unit,
    "batch_norm_of_channels": _batch_norm_of_channels,
}


_OF_SUMMANDS: dict[str, Callable[[Sequence[Local], int], _Both]] = {
    "cross_entropy_loss": _mean_over_samples,
    "nll_loss": _mean_over_samples,
    "nll_loss2d": _mean_over_samples,
    "nll_loss_nd": _mean_over_samples,
    "embedding": _rows_of_a_table,
}

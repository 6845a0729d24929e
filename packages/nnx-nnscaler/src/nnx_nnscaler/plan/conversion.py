"""From one placement to another: which collective it takes in the forward pass and which in the backward.

The gradient of a value has the dual placement: ``S`` of ``S``, complete of ``P`` and ``R``. A consumer that
uses a replicated value for its own part of the work only hands back a partial gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from nnx_nnscaler.placement import P, Placement, R
from nnx_nnscaler.plan.program_plan import Strategy

__all__ = ["Conversion", "Use", "conversion", "uses_of"]


class Use(NamedTuple):
    """How a consumer wants an operand.

    Attributes:
        placement: The placement it computes on.
        partial_gradient: Whether the gradient that it hands back is a summand of the whole; only of ``R``.
    """

    placement: Placement
    partial_gradient: bool = False


class Conversion(NamedTuple):
    """The collectives of one conversion; its method in `nnx_nnscaler.runtime` is ``forward__backward``.

    Attributes:
        forward: ``"keep"``, ``"split"``, ``"all_gather"``, ``"all_to_all"``, ``"all_reduce"`` or
            ``"reduce_scatter"``.
        backward: Likewise, for the gradient.
    """

    forward: str
    backward: str

    @property
    def method(self) -> str:
        """Name of the runtime's method."""
        return f"{self.forward}__{self.backward}"


def uses_of(strategy: Strategy) -> tuple[Use, ...]:
    """How a strategy uses each of its operands."""
    partial = not strategy.is_replicated
    return tuple(Use(placement, partial and placement == R) for placement in strategy.inputs)


def conversion(source: Placement, use: Use) -> Conversion | None:
    """What turns a value into what a consumer wants; None where nothing has to be done.

    Raises:
        ValueError: There is no such conversion: ``P`` is only produced by operators.

    Example:
        >>> from nnx_nnscaler.placement import P, R, S
        >>> conversion(S(1), Use(R, partial_gradient=True)).method
        'all_gather__reduce_scatter'
    """
    target, partial = use
    if target == source:
        return Conversion("keep", "all_reduce") if partial else None
    if target == P:
        raise ValueError(f"nothing converts {source} into partial sums")
    if source == P:
        if target == R:
            return Conversion("all_reduce", "all_reduce" if partial else "keep")
        return Conversion("reduce_scatter", "all_gather")
    if source == R:
        return Conversion("split", "all_gather")
    if target == R:
        return Conversion("all_gather", "reduce_scatter" if partial else "split")
    return Conversion("all_to_all", "all_to_all")

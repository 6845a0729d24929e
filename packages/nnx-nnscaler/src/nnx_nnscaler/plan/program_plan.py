"""What planning decides about one program; readable, comparable, and all that `codegen` needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnx_nnscaler.placement import Placement, R

__all__ = ["Prediction", "ProgramPlan", "Strategy"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way of running an operator on the ranks of a unit.

    Gradients follow from it: what is stored ``S`` has a gradient ``S``, what is ``P`` or ``R`` has a
    complete one, except that an ``R`` operand of an operator that is not replicated gets a partial one.

    Attributes:
        name: What it is called in explanations: ``"replicate"``, ``"batch"``, ``"column"``, ``"row"``...
        inputs: Placement of every tensor operand, in the order of `Op.operands`.
        outputs: Placement of every result.
        call: Name of the function in `nnx_nnscaler.runtime.functions` that takes the operator's place;
            empty where the operator itself is right on local tensors.
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    call: str = ""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank does all of it."""
        return all(placement == R for placement in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of one program on each rank.

    Attributes:
        compute: Seconds of computation in forward and backward.
        communication: Seconds of collectives in forward and backward, gradient reduction included.
        memory: Peak bytes: parameters, gradients, optimizer state and activations.
    """

    compute: float = 0.0
    communication: float = 0.0
    memory: int = 0

    @property
    def time(self) -> float:
        """Seconds of one step."""
        return self.compute + self.communication


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan:
    """The plan of one graph inside a unit.

    Attributes:
        size: Ranks of the unit.
        policy: Name of the policy that made it.
        choices: Strategy of every operator, by its name; a getitem's is a strategy of one input.
        stored: How every parameter is stored, by fully qualified name: ``R`` or ``S``.
        synchronized: Parameters whose gradients are partial on every rank, so that the reducer has to sum
            them over the unit.
        divisible: Sizes that must be multiples of a number at run time, as ``(expression, number)``; another
            batch is run whole by every rank.
        prediction: What the cost model says of it.
        reason: Why it and no other, where the planner had to choose.
    """

    size: int
    policy: str
    choices: Mapping[str, Strategy]
    stored: Mapping[str, Placement]
    synchronized: frozenset[str] = frozenset()
    divisible: tuple[tuple[str, int], ...] = ()
    prediction: Prediction = Prediction()
    reason: str = ""

"""The plan of one program: readable, comparable, and sufficient for `codegen`.

It contains the placements of tensors over the ranks of a unit, and the strategies of operators. This module
also writes and reads it as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nnx_nnscaler.ir.placement import Placement, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The cost model's prediction of one program on each rank.

    Attributes:
        compute: The seconds of computation in forward and backward.
        communication: The seconds of collectives in forward and backward, gradient reduction included.
        memory: The peak bytes: parameters, gradients, optimizer state and activations.
    """

    compute: float = 0.0
    communication: float = 0.0
    memory: int = 0

    @property
    def time(self) -> float:
        """The seconds of one step."""
        return self.compute + self.communication


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan:
    """The plan of one graph inside a unit.

    Attributes:
        size: The number of ranks of the unit.
        policy: The name of the policy that made it.
        choices: The strategy of every operator, by its name; a getitem has a strategy of one input.
        stored: The placement of every parameter, by fully qualified name: ``R`` or ``S``.
        synchronized: The parameters whose gradients are partial on every rank, so that the reducer has to sum
            them over the unit.
        divisible: The sizes that must be multiples of a number at run time, as ``(expression, number)``. Any
            other batch falls back to eager on every rank.
        prediction: The cost model's prediction.
        reason: The reason for this plan, if the planner had a choice.
    """

    size: int
    policy: str
    choices: Mapping[str, Strategy]
    stored: Mapping[str, Placement]
    synchronized: frozenset[str] = frozenset()
    divisible: tuple[tuple[str, int], ...] = ()
    prediction: Prediction = Prediction()
    reason: str = ""

    @property
    def homes(self) -> None:
        """The home stages of parameters: None, because there are no stages."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the user: none."""
        return ()


# A program's plan as JSON text and back.


def plan_to_text(plan: ProgramPlan) -> str:
    """Return the plan as JSON, one operator a line."""
    choices = {name: _strategy(strategy) for name, strategy in plan.choices.items()}
    head = {
        "size": plan.size,
        "policy": plan.policy,
        "prediction": asdict(plan.prediction),
        "reason": plan.reason,
        "divisible": [list(item) for item in plan.divisible],
        "synchronized": sorted(plan.synchronized),
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, items in (("stored", {k: str(v) for k, v in plan.stored.items()}), ("choices", choices)):
        body = ",\n".join(f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in items.items())
        lines.append(f'  "{name}": {{\n{body}\n  }}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_from_text(text: str) -> ProgramPlan:
    """Return the plan of a text by `plan_to_text`.

    Example:
        >>> plan = ProgramPlan(size=2, policy="tp", choices={}, stored={"w": Placement.parse("S(0)")})
        >>> plan_from_text(plan_to_text(plan)) == plan
        True
    """
    read: dict[str, Any] = json.loads(text)
    return ProgramPlan(
        size=read["size"],
        policy=read["policy"],
        choices={name: _read_strategy(item) for name, item in read["choices"].items()},
        stored={name: Placement.parse(item) for name, item in read["stored"].items()},
        synchronized=frozenset(read["synchronized"]),
        divisible=tuple((expression, number) for expression, number in read["divisible"]),
        prediction=Prediction(**read["prediction"]),
        reason=read.get("reason", ""),
    )


def _strategy(strategy: Strategy) -> list[Any]:
    return [strategy.name, list(map(str, strategy.inputs)), list(map(str, strategy.outputs)), strategy.call]


def _read_strategy(item: list[Any]) -> Strategy:
    name, inputs, outputs, call = item
    return Strategy(name, tuple(map(Placement.parse, inputs)), tuple(map(Placement.parse, outputs)), call)

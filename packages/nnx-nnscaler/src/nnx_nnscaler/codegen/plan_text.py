"""A program's plan as JSON text and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from nnx_nnscaler.placement import Placement
from nnx_nnscaler.plan.program_plan import Prediction, ProgramPlan, Strategy

__all__ = ["plan_from_text", "plan_to_text"]


def plan_to_text(plan: ProgramPlan) -> str:
    """The plan as JSON, one operator a line."""
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
    """The plan that `plan_to_text` wrote.

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

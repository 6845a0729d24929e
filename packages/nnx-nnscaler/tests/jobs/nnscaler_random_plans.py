"""Random plans: a random strategy for every operator, random placements of parameters."""

from __future__ import annotations

import random

from nnx_nnscaler.ir.graph import Graph, Op
from nnx_nnscaler.ir.placement import P, Placement, R, S, Strategy, Use, uses_of
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.rules.registry import strategies_of
from nnx_nnscaler.rules.rule import input_values, output_values


def random_plan(graph: Graph, size: int, seed: int) -> ProgramPlan:
    """A plan that is consistent and otherwise arbitrary; most operators are split."""
    rng = random.Random(seed)
    stored = {name: _stored(graph.meta(value).hints, size, rng) for value, name in graph.parameters.items()}
    made: dict[str, Placement] = {value: stored[name] for value, name in graph.parameters.items()}
    uses: dict[str, list[Use]] = {}
    choices: dict[str, Strategy] = {}
    for op in graph.ops:
        possible = [
            strategy for strategy in strategies_of(op, graph, size) if _is_possible(op, strategy, made)
        ]
        chosen = rng.choice(possible[1:] or possible) if rng.random() < 0.85 else possible[0]
        choices[op.name] = chosen
        made |= dict(zip(output_values(op), chosen.outputs, strict=True))
        for value, use in zip(input_values(op), uses_of(chosen), strict=True):
            uses.setdefault(value, []).append(use)
    synchronized = frozenset(
        name
        for value, name in graph.parameters.items()
        if stored[name] == R and uses.get(value) and all(use.partial_gradient for use in uses[value])
    )
    return ProgramPlan(size=size, policy="random", choices=choices, stored=stored, synchronized=synchronized)


def _stored(shape: tuple[int, ...], size: int, rng: random.Random) -> Placement:
    shards = [S(dim) for dim, extent in enumerate(shape) if extent % size == 0]
    return rng.choice([R, *shards]) if rng.random() < 0.6 else R


def _is_possible(op: Op, strategy: Strategy, made: dict[str, Placement]) -> bool:
    """Return True if all inputs that must be partial sums are partial sums. (No conversion makes them.)"""
    return all(
        placement != P or made.get(value, R) == P
        for value, placement in zip(input_values(op), strategy.inputs, strict=True)
    )

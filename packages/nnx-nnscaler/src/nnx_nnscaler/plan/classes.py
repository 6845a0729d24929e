"""The planning problem with repeated layers tied: one choice for all twins of an operator or a parameter.

It folds a graph of n identical layers into one, exactly: a plan that treats layers alike costs in the folded
problem what it costs in the graph, conversions that several consumers share included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nnx_nnscaler.cost.model import Stored
from nnx_nnscaler.placement import R
from nnx_nnscaler.plan.evaluation import Assignment, Flow
from nnx_nnscaler.plan.program_plan import Strategy, Use, uses_of


@dataclass(frozen=True, slots=True)
class Choices:
    """What a plan may choose from.

    Attributes:
        strategies: The strategies of every operator, by name.
        stored: The ways to store every parameter, by value name.
    """

    strategies: Mapping[str, Sequence[Strategy]]
    stored: Mapping[str, Sequence[Stored]]


@dataclass(slots=True)
class Node:
    """Operators, or parameters, that choose alike; the first stands for all.

    Attributes:
        members: Their names.
        options: The options that they choose from: strategies or `Stored`.
    """

    members: list[str]
    options: Sequence[Strategy] | Sequence[Stored]

    @property
    def first(self) -> str:
        """The one that stands for all."""
        return self.members[0]


class Edge(NamedTuple):
    """Values of one kind that flow to one operand of one kind of operator.

    Attributes:
        source: Index of the node that makes them; -1 for what is replicated anyway.
        position: The number of its result.
        target: Index of the node that uses them; -1 for the forward's result.
        operand: The number of its operand.
        storage: Class of the value itself where its source is -1, so that inputs stay apart.
    """

    source: int
    position: int
    target: int
    operand: int
    storage: str = ""


@dataclass(slots=True)
class Value:
    """Values of one kind that all flow along the same edges, and so are converted alike.

    Attributes:
        members: Their names.
        edges: The edges along which they flow.
    """

    members: list[str]
    edges: tuple[Edge, ...]


@dataclass(slots=True)
class Problem:
    """The folded problem.

    Attributes:
        nodes: Kinds of operators and parameters.
        values: Kinds of values.
        node_of: Index of the node of every operator and parameter.
    """

    flow: Flow
    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    node_of: dict[str, int] = field(default_factory=dict)

    def states(self, edge: Edge) -> list[Stored]:
        """How the values of an edge may come, one for each option of their source."""
        if edge.source < 0:
            return [Stored(R)]
        return [
            option if isinstance(option, Stored) else Stored(option.outputs[edge.position])
            for option in self.nodes[edge.source].options
        ]

    def uses(self, edge: Edge) -> list[Use]:
        """How the values of an edge may be wanted, one for each option of their consumer."""
        if edge.target < 0:
            return [Use(R)]
        options = self.nodes[edge.target].options
        return [uses_of(option)[edge.operand] for option in options if isinstance(option, Strategy)]

    def assignment(self, chosen: Sequence[int]) -> Assignment:
        """The plan that takes one option of each node."""
        choices: dict[str, Strategy] = {}
        stored: dict[str, Stored] = {}
        for node, index in zip(self.nodes, chosen, strict=True):
            option = node.options[index]
            for name in node.members:
                if isinstance(option, Stored):
                    stored[name] = option
                else:
                    choices[name] = option
        return Assignment(choices, stored)


def fold(flow: Flow, choices: Choices, *, tie: bool = True) -> Problem:
    """The problem of choosing for a graph.

    Args:
        flow: The graph.
        choices: The options that may be chosen; operators whose choices differ are not tied.
        tie: True if operators that repeat from layer to layer choose alike.
    """
    problem = Problem(flow)
    _add_nodes(problem, choices, tie=tie)
    _add_values(problem)
    return problem


def _add_nodes(problem: Problem, choices: Choices, *, tie: bool) -> None:
    flow = problem.flow
    layers = {**flow.parameter_layers(), **flow.layers()}
    options: Mapping[str, Sequence[Strategy] | Sequence[Stored]] = {**choices.stored, **choices.strategies}
    found: dict[object, int] = {}
    for name in (*choices.stored, *flow.ops):
        key = (layers[name], tuple(options[name])) if tie else name
        index = found.setdefault(key, len(problem.nodes))
        if index == len(problem.nodes):
            problem.nodes.append(Node([], options[name]))
        problem.nodes[index].members.append(name)
        problem.node_of[name] = index


def _add_values(problem: Problem) -> None:
    flow = problem.flow
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, consumers in flow.values().items():
        source = flow.source(name)
        index = problem.node_of.get(source.name, -1)
        free = _kind_of_free(flow, name) if index < 0 else ""
        edges = Counter(
            Edge(index, source.position, problem.node_of[c.op] if c.op else -1, c.position, free)
            for c in consumers
        )
        groups.setdefault((flow.graph.meta(name).hints, *sorted(edges)), []).append(name)
    problem.values = [Value(names, tuple(dict.fromkeys(key[1:]))) for key, names in groups.items()]  # type: ignore[arg-type]


def _kind_of_free(flow: Flow, name: str) -> str:
    """Inputs and constants that are shaped alike and used alike may share their conversions' variables."""
    return repr(flow.graph.meta(name))

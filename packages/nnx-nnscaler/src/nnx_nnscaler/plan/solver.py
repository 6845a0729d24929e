"""Solve the choices of a plan as a mixed-integer program, with HiGHS.

Each option of each node has a binary variable. Each edge has a flow for each pair of a producer's state and a
consumer's use, which is 1 exactly if both are chosen. Each value has a conversion for each pair, shared by
all edges that need it. Only options are integers, because flows and conversions follow from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from nnx_nnscaler.ir.placement import R, Strategy, Use, uses_of
from nnx_nnscaler.plan.cost import Price, Prices, Stored
from nnx_nnscaler.plan.evaluation import price_of_change
from nnx_nnscaler.plan.flow import Assignment, Flow

# The planning problem with repeated layers tied: one choice for all twins of an operator or a parameter.
#
# Folding n identical layers into one is exact. A plan that treats layers alike has the same cost in the
# folded problem as in the graph, including conversions that several consumers share.


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of a plan.

    Attributes:
        strategies: The strategies of every operator, by name.
        stored: The storage options of every parameter, by value name.
    """

    strategies: Mapping[str, Sequence[Strategy]]
    stored: Mapping[str, Sequence[Stored]]


@dataclass(slots=True)
class Node:
    """Operators or parameters that share one choice; the first represents all.

    Attributes:
        members: The names of the operators or parameters.
        options: The options that they choose from: strategies or `Stored`.
    """

    members: list[str]
    options: Sequence[Strategy] | Sequence[Stored]

    @property
    def first(self) -> str:
        """The member that represents all."""
        return self.members[0]


class Edge(NamedTuple):
    """The flow from one result of a node to one operand of another node.

    Attributes:
        source: The index of the producing node; -1 for replicated values.
        position: The index of its result.
        target: The index of the consuming node; -1 for the forward's result.
        operand: The index of its operand.
        storage: The kind of the value if its source is -1, so that different inputs stay apart.
    """

    source: int
    position: int
    target: int
    operand: int
    storage: str = ""


@dataclass(slots=True)
class Value:
    """Values that flow along the same edges, and therefore share their conversions.

    Attributes:
        members: The names of the values.
        edges: The edges along which they flow.
    """

    members: list[str]
    edges: tuple[Edge, ...]


@dataclass(slots=True)
class Problem:
    """The folded problem.

    Attributes:
        nodes: The kinds of operators and parameters.
        values: The kinds of values.
        node_of: The index of the node of every operator and parameter.
    """

    flow: Flow
    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    node_of: dict[str, int] = field(default_factory=dict)

    def states(self, edge: Edge) -> list[Stored]:
        """Return the states of an edge's values, one for each option of their source."""
        if edge.source < 0:
            return [Stored(R)]
        return [
            option if isinstance(option, Stored) else Stored(option.outputs[edge.position])
            for option in self.nodes[edge.source].options
        ]

    def uses(self, edge: Edge) -> list[Use]:
        """Return the uses of an edge's values, one for each option of their consumer."""
        if edge.target < 0:
            return [Use(R)]
        options = self.nodes[edge.target].options
        return [uses_of(option)[edge.operand] for option in options if isinstance(option, Strategy)]

    def assignment(self, chosen: Sequence[int]) -> Assignment:
        """Return the assignment of one option to each node."""
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
    """Make the folded problem of a graph.

    Args:
        flow: The graph.
        choices: The options; operators with different options are not tied.
        tie: True if operators that repeat from layer to layer share one choice.
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
    # Inputs and constants of one shape and dtype may share the variables of their conversions.
    return repr(flow.graph.meta(name))


_Pair = tuple[Stored, Use]


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimal choice.

    Attributes:
        chosen: The index of each node's option.
        objective: The minimised objective, in seconds or bytes.
        memory: The bytes that the program counts for it.
    """

    chosen: tuple[int, ...]
    objective: float
    memory: float


@dataclass(slots=True)
class _Rows:
    """Collects linear constraints: ``low <= sum(coefficient * variable) <= high``."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], *, low: float, high: float) -> None:
        row = len(self.low)
        self.low.append(low)
        self.high.append(high)
        self.entries += [(row, variable, coefficient) for variable, coefficient in terms]


class Program:
    """The mixed-integer program of one folded problem.

    Args:
        problem: The folded problem.
        prices: The prices of its options.
        memory: True to count memory, for a limit or as the objective.
    """

    def __init__(self, problem: Problem, prices: Prices, *, memory: bool = False) -> None:
        self._problem = problem
        self._prices = prices
        self._time: list[float] = []
        self._memory: list[float] = []
        self._rows = _Rows()
        self._options: list[list[int]] = []
        self._pairs: dict[Edge, dict[_Pair, int]] = {}
        self._add_options()
        self._add_synchronization()
        for value in problem.values:
            for edge in value.edges:
                if edge not in self._pairs:
                    self._add_edge(edge, value.members[0])
        for value in problem.values:
            self._add_conversions(value.members, value.edges)
        if memory:
            self._add_saved()

    @property
    def size(self) -> tuple[int, int]:
        """The number of variables, and of integers among them."""
        return len(self._time), sum(map(len, self._options))

    def _variable(self, time: float = 0.0, memory: float = 0.0) -> int:
        self._time.append(time)
        self._memory.append(memory)
        return len(self._time) - 1

    def _add_options(self) -> None:
        for node in self._problem.nodes:
            variables = []
            for option in node.options:
                time, memory = self._cost(node.first, option)
                times = len(node.members)
                variables.append(self._variable(times * time, times * memory))
            # Exactly one option of each node is chosen.
            self._rows.add([(v, 1.0) for v in variables], low=1, high=1)
            self._options.append(variables)

    def _cost(self, name: str, option: Strategy | Stored) -> tuple[float, float]:
        prices = self._prices
        if isinstance(option, Stored):
            meta = prices.graph.metas[name]
            return prices.parameter(meta, option).seconds, prices.kept(meta, option)
        op = self._problem.flow.ops[name]
        return prices.operator(op, option).seconds, prices.saved(op, option).more

    def _add_synchronization(self) -> None:
        """Charge the start of the reduction once, if any parameter is synchronized."""
        start = self._prices.synchronization.seconds
        if start == 0:
            return
        any_of = self._variable(start)
        for node, variables in zip(self._problem.nodes, self._options, strict=True):
            for option, variable in zip(node.options, variables, strict=True):
                if isinstance(option, Stored) and option.synchronized:
                    self._rows.add([(any_of, 1.0), (variable, -1.0)], low=0, high=np.inf)

    def _add_edge(self, edge: Edge, name: str) -> None:
        """Add the flows of an edge: the flow out of each state, and into each use, is 1 if it is chosen."""
        problem = self._problem
        states, uses = problem.states(edge), problem.uses(edge)
        pairs: dict[_Pair, int] = {}
        for state in dict.fromkeys(states):
            for use in dict.fromkeys(uses):
                # An impossible conversion has no flow, so the constraints below exclude the pair.
                if self._price(edge, name, state, use) is not None:
                    pairs[state, use] = self._variable()
        self._pairs[edge] = pairs
        ends: tuple[tuple[int, Sequence[Stored | Use], int], ...] = (
            (edge.source, states, 0),
            (edge.target, uses, 1),
        )
        for node, offered, side in ends:
            for one in dict.fromkeys(offered):
                flows = [(variable, 1.0) for pair, variable in pairs.items() if pair[side] == one]
                if node < 0:
                    self._rows.add(flows, low=1, high=1)
                    continue
                chosen = [
                    (variable, -1.0)
                    for variable, its in zip(self._options[node], offered, strict=True)
                    if its == one
                ]
                self._rows.add(flows + chosen, low=0, high=0)

    def _price(self, edge: Edge, name: str, state: Stored, use: Use) -> Price | None:
        if self._changes_in_place(edge) and state.placement != use.placement:
            return None
        stored = state if name in self._problem.flow.parameters else None
        return price_of_change(self._prices, name, stored, state.placement, use)

    def _changes_in_place(self, edge: Edge) -> bool:
        """Return True if the consumer changes the value in place; a conversion would change a copy."""
        if edge.target < 0 or edge.operand > 0:
            return False
        op = self._problem.flow.ops[self._problem.nodes[edge.target].first]
        parts = op.target.split(".")
        return len(parts) > 2 and parts[1].endswith("_") and not parts[1].endswith("__")

    def _add_conversions(self, names: Sequence[str], edges: Sequence[Edge]) -> None:
        """Charge each conversion once for all edges that need it."""
        for pair in dict.fromkeys(pair for edge in edges for pair in self._pairs[edge]):
            price = self._price(edges[0]._replace(target=-1), names[0], *pair)
            if price is None or price.seconds == 0:
                continue
            flows = [self._pairs[edge][pair] for edge in edges if pair in self._pairs[edge]]
            # A single edge needs no variable of its own for the conversion, which keeps the program small.
            if len(flows) == 1:
                self._time[flows[0]] += len(names) * price.seconds
                continue
            paid = self._variable(len(names) * price.seconds)
            for flow in flows:
                self._rows.add([(paid, 1.0), (flow, -1.0)], low=0, high=np.inf)

    def _add_saved(self) -> None:
        """Count autograd's saved tensors: each once, for any number of operators that save it."""
        groups: dict[tuple[int | str, tuple[tuple[int, int], ...]], list[str]] = {}
        for storage, where in self._savers().items():
            kept = self._problem.node_of.get(self._problem.flow.source(storage).name, storage)
            groups.setdefault((kept, tuple(sorted(where))), []).append(storage)
        # Twins of repeated layers have the same savers: one variable counts for all of them.
        for (_, savers), storages in groups.items():
            by_bytes: dict[int, list[list[tuple[int, float]]]] = {}
            for node, operand in savers:
                for nbytes, terms in self._saved_terms(node, operand):
                    by_bytes.setdefault(nbytes, []).append(terms)
            for nbytes, rows in sorted(by_bytes.items()):
                kept_once = self._variable(memory=nbytes * len(storages))
                # At least 1 if any option that saves the tensor is chosen.
                for terms in rows:
                    self._rows.add([(kept_once, 1.0), *terms], low=0, high=np.inf)

    def _savers(self) -> dict[str, set[tuple[int, int]]]:
        """Return the nodes that may save each tensor, with the operand; -1 is their result."""
        flow, problem = self._problem.flow, self._problem
        found: dict[str, set[tuple[int, int]]] = {}
        for name, op in flow.ops.items():
            node = problem.node_of[name]
            for operand, value in enumerate(op.operands()):
                found.setdefault(flow.storage(value), set()).add((node, operand))
            found.setdefault(name, set()).add((node, -1))
        return found

    def _saved_terms(self, node: int, operand: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """Yield the bytes that a node saves of an operand, and the variables of the options that do."""
        by_bytes: dict[int, list[tuple[int, float]]] = {}
        op = self._problem.flow.ops[self._problem.nodes[node].first]
        names, gathered = op.operands(), False
        for option, variable in zip(self._problem.nodes[node].options, self._options[node], strict=True):
            if not isinstance(option, Strategy):
                continue
            saved = self._prices.saved(op, option)
            inputs, outputs = self._prices.locals_of(op, option)
            if operand < 0 and saved.output:
                by_bytes.setdefault(sum(o.nbytes for o in outputs), []).append((variable, -1.0))
            if operand in saved.operands:
                name = names[operand]
                gathered = name in self._problem.flow.parameters
                if not gathered:
                    by_bytes.setdefault(inputs[operand].nbytes, []).append((variable, -1.0))
        if gathered:
            self._add_gathered(by_bytes, node, operand, names[operand])
        yield from by_bytes.items()

    def _add_gathered(
        self, by_bytes: dict[int, list[tuple[int, float]]], node: int, operand: int, name: str
    ) -> None:
        """Count a saved parameter if it is used in another placement than it is stored in."""
        problem = self._problem
        edge = Edge(problem.node_of[name], 0, node, operand)
        for (state, use), flow in self._pairs[edge].items():
            if state.placement != use.placement:
                nbytes = self._prices.local(problem.flow.graph.metas[name], use.placement).nbytes
                by_bytes.setdefault(nbytes, []).append((flow, -1.0))

    def solve(
        self, *, limit: float | None = None, least_memory: bool = False, seconds: float = 60.0
    ) -> Solution | None:
        """Return the cheapest choice; None if none is possible.

        Args:
            limit: The bytes that it may take, as the program counts them.
            least_memory: True to minimise bytes instead of time.
            seconds: The time limit; the best choice found until then is returned.
        """
        cost = np.asarray(self._memory if least_memory else self._time)
        # HiGHS has absolute tolerances, below which costs in seconds would disappear.
        scale = 1.0 / max(float(np.max(np.abs(cost), initial=0.0)), 1e-30)
        integers = np.zeros(len(cost))
        integers[[variable for variables in self._options for variable in variables]] = 1
        outcome = milp(
            cost * scale,
            integrality=integers,
            bounds=Bounds(0, 1),
            constraints=self._constraints(limit),
            options={"mip_rel_gap": 1e-4, "time_limit": seconds},
        )
        if outcome.x is None:
            return None
        # HiGHS returns binaries as floats that are only nearly 0 or 1.
        chosen = tuple(int(np.argmax(outcome.x[variables])) for variables in self._options)
        objective = float(outcome.fun) / scale
        if not least_memory:
            objective += self._prices.standing.seconds
        return Solution(chosen, objective, float(outcome.x @ np.asarray(self._memory)))

    def _constraints(self, limit: float | None) -> list[LinearConstraint]:
        rows = self._rows
        where = np.array([(row, column) for row, column, _ in rows.entries]).reshape(-1, 2)
        values = np.array([coefficient for *_, coefficient in rows.entries])
        shape = (len(rows.low), len(self._time))
        matrix = coo_array((values, (where[:, 0], where[:, 1])), shape=shape).tocsc()
        constraints = [LinearConstraint(matrix, rows.low, rows.high)]
        if limit is not None:
            scale = max(float(np.max(self._memory)), 1.0)
            constraints.append(
                LinearConstraint(np.asarray(self._memory)[None] / scale, -np.inf, limit / scale)
            )
        return constraints

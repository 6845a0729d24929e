"""The mixed-integer program behind a plan, solved by HiGHS.

One binary for each option of each node; one flow for each edge and pair of (state it comes in, use it is
wanted for), which is 1 exactly where both are chosen; one conversion for each value and pair, shared by all
edges that need it. Only options are integers: flows and conversions follow from them.
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
# It folds a graph of n identical layers into one, exactly: a plan that treats layers alike costs in the
# folded problem what it costs in the graph, conversions that several consumers share included.


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a plan.

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
        members: The names of the operators or parameters.
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
        source: Index of the node that makes them; -1 for replicated values.
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
        members: The names of the values.
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


_Pair = tuple[Stored, Use]


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimal choice.

    Attributes:
        chosen: Index of the option of each node.
        objective: The objective that was minimised, in seconds or bytes.
        memory: Bytes that it takes, as the program counts them.
    """

    chosen: tuple[int, ...]
    objective: float
    memory: float


@dataclass(slots=True)
class _Rows:
    """Linear constraints in the making: ``low <= sum(coefficient * variable) <= high``."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], *, low: float, high: float) -> None:
        row = len(self.low)
        self.low.append(low)
        self.high.append(high)
        self.entries += [(row, variable, coefficient) for variable, coefficient in terms]


class Program:
    """The program of one folded problem.

    Args:
        problem: The problem with its choices.
        prices: The costs of it.
        memory: True if memory is counted, for a limit or as the objective.
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
        """Number of variables, and how many of them are integers."""
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
        """The first synchronized parameter pays for the reduction's start."""
        start = self._prices.synchronization.seconds
        if start == 0:
            return
        any_of = self._variable(start)
        for node, variables in zip(self._problem.nodes, self._options, strict=True):
            for option, variable in zip(node.options, variables, strict=True):
                if isinstance(option, Stored) and option.synchronized:
                    self._rows.add([(any_of, 1.0), (variable, -1.0)], low=0, high=np.inf)

    def _add_edge(self, edge: Edge, name: str) -> None:
        """Flows of an edge: as much leaves each state, and reaches each use, as is chosen of it."""
        problem = self._problem
        leaving, arriving = problem.states(edge), problem.uses(edge)
        pairs: dict[_Pair, int] = {}
        for state in dict.fromkeys(leaving):
            for use in dict.fromkeys(arriving):
                if self._price(edge, name, state, use) is not None:
                    pairs[state, use] = self._variable()
        self._pairs[edge] = pairs
        ends: tuple[tuple[int, Sequence[Stored | Use], int], ...] = (
            (edge.source, leaving, 0),
            (edge.target, arriving, 1),
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
        """Return True if the consumer writes into the value, which no conversion may stand between."""
        if edge.target < 0 or edge.operand > 0:
            return False
        op = self._problem.flow.ops[self._problem.nodes[edge.target].first]
        parts = op.target.split(".")
        return len(parts) > 2 and parts[1].endswith("_") and not parts[1].endswith("__")

    def _add_conversions(self, names: Sequence[str], edges: Sequence[Edge]) -> None:
        """A conversion is paid once for all edges that need it."""
        for pair in dict.fromkeys(pair for edge in edges for pair in self._pairs[edge]):
            price = self._price(edges[0]._replace(target=-1), names[0], *pair)
            if price is None or price.seconds == 0:
                continue
            flows = [self._pairs[edge][pair] for edge in edges if pair in self._pairs[edge]]
            if len(flows) == 1:
                self._time[flows[0]] += len(names) * price.seconds
                continue
            paid = self._variable(len(names) * price.seconds)
            for flow in flows:
                self._rows.add([(paid, 1.0), (flow, -1.0)], low=0, high=np.inf)

    def _add_saved(self) -> None:
        """Return autograd's saved tensors: each once, for any number of operators that save it."""
        groups: dict[tuple[int | str, tuple[tuple[int, int], ...]], list[str]] = {}
        for storage, where in self._savers().items():
            kept = self._problem.node_of.get(self._problem.flow.source(storage).name, storage)
            groups.setdefault((kept, tuple(sorted(where))), []).append(storage)
        for (_, savers), storages in groups.items():
            by_bytes: dict[int, list[list[tuple[int, float]]]] = {}
            for node, operand in savers:
                for nbytes, terms in self._saved_terms(node, operand):
                    by_bytes.setdefault(nbytes, []).append(terms)
            for nbytes, rows in sorted(by_bytes.items()):
                kept_once = self._variable(memory=nbytes * len(storages))
                for terms in rows:
                    self._rows.add([(kept_once, 1.0), *terms], low=0, high=np.inf)

    def _savers(self) -> dict[str, set[tuple[int, int]]]:
        """For every tensor in memory, the nodes that may keep it and as which operand; -1 is their result."""
        flow, problem = self._problem.flow, self._problem
        found: dict[str, set[tuple[int, int]]] = {}
        for name, op in flow.ops.items():
            node = problem.node_of[name]
            for operand, value in enumerate(op.operands()):
                found.setdefault(flow.storage(value), set()).add((node, operand))
            found.setdefault(name, set()).add((node, -1))
        return found

    def _saved_terms(self, node: int, operand: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """Bytes that a node keeps of an operand, and the variables with which it does."""
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
        """A parameter is kept as it is stored anyway; in another placement it takes room of its own."""
        problem = self._problem
        edge = Edge(problem.node_of[name], 0, node, operand)
        for (state, use), flow in self._pairs[edge].items():
            if state.placement != use.placement:
                nbytes = self._prices.local(problem.flow.graph.metas[name], use.placement).nbytes
                by_bytes.setdefault(nbytes, []).append((flow, -1.0))

    def solve(
        self, *, limit: float | None = None, least_memory: bool = False, seconds: float = 60.0
    ) -> Solution | None:
        """The cheapest choice; None where none is possible.

        Args:
            limit: Bytes that it may take, as the program counts them.
            least_memory: Minimise bytes and not time.
            seconds: After which the best choice found so far is taken.
        """
        cost = np.asarray(self._memory if least_memory else self._time)
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

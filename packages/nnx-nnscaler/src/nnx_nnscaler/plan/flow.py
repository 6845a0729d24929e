"""Follow values through a graph: their producers, their consumers, and layers that repeat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from nnx_nnscaler.ir.graph import Code, Graph, Op, Ref, Size, TensorMeta, refs_in
from nnx_nnscaler.ir.placement import Placement, R, Strategy
from nnx_nnscaler.plan.cost import Stored
from nnx_nnscaler.plan.work import ALIASES, base_name


@dataclass(frozen=True, slots=True)
class Assignment:
    """All choices of a plan.

    Attributes:
        choices: The strategy of every operator that has a choice, by its name.
        stored: The storage of every parameter, by value name.
    """

    choices: Mapping[str, Strategy]
    stored: Mapping[str, Stored]

    def placement(self, flow: Flow, name: str) -> Placement:
        """Return the placement that a value's producer gives it."""
        if name in self.stored:
            return self.stored[name].placement
        source = flow.source(name)
        strategy = self.choices.get(source.name)
        return R if strategy is None else strategy.outputs[source.position]


# The graph as sources and consumers.
#
# A ``getitem`` is no operator here: its name stands for a result of the operator that it picks from. The
# exception are untraced submodules, whose results may be nested in any way: their picks are values of their
# own, replicated like inputs.


class Source(NamedTuple):
    """The producer of a value.

    Attributes:
        name: The operator, or the parameter, buffer, constant or input itself.
        position: The index among the operator's tensor results.
    """

    name: str
    position: int = 0


@dataclass(frozen=True, slots=True)
class Consumer:
    """One use of a value: an operator and the index of its operand; ``""`` is the forward's result."""

    op: str
    position: int = 0


class Flow:
    """The graph as sources and consumers.

    Attributes:
        ops: The operators that choose a strategy, in order.
        picks: The result that each getitem picks.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: dict[str, Op] = {}
        self.picks: dict[str, Source] = {}
        for op in graph.ops:
            if op.target != "getitem":
                self.ops[op.name] = op
            elif (producer := self.ops.get(op.args[0].name)) and producer.target != "module":
                self.picks[op.name] = _picked(op, producer)
        self.parameters = set(graph.parameters)
        self._values: dict[str, list[Consumer]] = {}

    def source(self, name: str) -> Source:
        """Return the producer of a value."""
        return self.picks.get(name) or Source(name)

    def values(self) -> dict[str, list[Consumer]]:
        """Return all used values with their uses in order; results of the forward come last."""
        if self._values:
            return self._values
        found = self._values
        for op in self.ops.values():
            for position, name in enumerate(op.operands()):
                found.setdefault(name, []).append(Consumer(op.name, position))
        for name in dict.fromkeys(refs_in(self.graph.outputs)):
            found.setdefault(name, []).append(Consumer(""))
        return found

    def storage(self, name: str) -> str:
        """Return the computed value whose memory a value shares, through views and picks."""
        while True:
            source = self.source(name)
            op = self.ops.get(source.name)
            if op is None or base_name(op) not in ALIASES:
                return name
            operands = op.operands()
            if not operands:
                return name
            name = operands[0]

    def layers(self) -> dict[str, tuple[str, ...]]:
        """Return a key for every operator that it shares with its twins in other layers of a stack."""
        starred = _Stars({op.module for op in self.ops.values()})
        # Twins are at the same position in their layers, so the count within a module is part of the key.
        count: Counter[str] = Counter()
        keys: dict[str, tuple[str, ...]] = {}
        for op in self.ops.values():
            ordinal = count[op.module]
            count[op.module] += 1
            keys[op.name] = (starred(op.module), str(ordinal), signature(op, self.graph))
        return keys

    def parameter_layers(self) -> dict[str, tuple[str, ...]]:
        """Return a key for every parameter that it shares with its twins in other layers of a stack."""
        starred = _Stars({op.module for op in self.ops.values()})
        return {
            name: (starred(fqn), repr(self.graph.metas[name])) for name, fqn in self.graph.parameters.items()
        }


def _picked(op: Op, producer: Op) -> Source:
    results, index = producer.output, op.args[1]
    if not isinstance(results, tuple):
        return Source(producer.name)
    return Source(producer.name, sum(meta is not None for meta in results[:index]))


def signature(op: Op, graph: Graph) -> str:
    """Return a text of all that an operator's strategies depend on; equal texts mean equal strategies."""
    names = op.operands()
    # Equal operands count, the names of values do not.
    same = [names.index(name) for name in names]
    metas = [repr(graph.meta(name)) for name in names]
    kinds = [_kind(name, graph) for name in names]
    return repr((op.target, _skeleton(op.args), _skeleton(op.kwargs), op.output, metas, kinds, same))


def _kind(name: str, graph: Graph) -> str:
    for kind, among in (("parameter", graph.parameters), ("buffer", graph.buffers)):
        if name in among:
            return kind
    return "value"


def _skeleton(argument: object) -> object:
    """Return an argument without the names of values."""
    if isinstance(argument, Ref):
        return "*"
    if isinstance(argument, (list, tuple)):
        return [_skeleton(item) for item in argument]
    if isinstance(argument, dict):
        return {key: _skeleton(item) for key, item in argument.items()}
    if isinstance(argument, (Size, Code, TensorMeta)):
        return repr(argument)
    return argument


class _Stars:
    """Replaces the numbers of layers in names by stars: ``layers.*.attn.q`` for ``layers.3.attn.q``.

    A number is a layer's only if that layer has submodules. The members of ``nn.Sequential(nn.Linear,
    nn.ReLU)`` have none: they are not tied, because alternating splits may be best for them.
    """

    def __init__(self, modules: set[str]) -> None:
        self._stacks = {prefix for module in modules for prefix in _numbered(module)}

    def __call__(self, path: str) -> str:
        parts = path.split(".")
        for index, part in enumerate(parts):
            if part.isdigit() and ".".join(parts[: index + 1]) in self._stacks:
                parts[index] = "*"
        return ".".join(parts)


def _numbered(module: str) -> Iterator[str]:
    """Return the prefixes of a module name that end in a number and have submodules."""
    return (module[: found.start() + len(found[0]) - 1] for found in re.finditer(r"(?<![^.])\d+\.", module))


# Parameters whose gradients the reducer can sum, instead of a collective inside of the backward.
#
# A replicated operator on a parameter, such as a position embedding, usually gets a full gradient: where its
# result is used sharded, a collective sums the partial gradients. Backward is linear, so the sum can be taken
# later, of the parameter's gradient, which the reducer sums together with others. `codegen` writes no
# collective behind operators on synchronized parameters alone. This section finds parameters that gain by it.


def synchronize_what_passes_on(graph: Graph, assignment: Assignment) -> Assignment:
    """Return the assignment with more synchronized parameters, if that saves collectives.

    Args:
        graph: The graph of a forward with gradients.
        assignment: The assignment of the graph.
    """
    # Without a synchronized parameter, the reduction over the unit would start for these alone.
    if not any(stored.synchronized for stored in assignment.stored.values()):
        return assignment
    ways = _Ways(graph, assignment)
    stored = dict(assignment.stored)
    for name in graph.parameters:
        meta = graph.meta(name)
        if stored[name] != Stored(R) or not meta.differentiable:
            continue
        ends = ways.ends(name)
        # The reducer moves the parameter once; the collectives at the ends would move each end.
        if ends is not None and prod(meta.hints) <= 2 * sum(prod(end.hints) for end in ends):
            stored[name] = Stored(R, synchronized=True)
    return replace(assignment, stored=stored)


class _Ways:
    """Follows a parameter through replicated operators that depend on no other differentiable value."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self._graph = graph
        self._choices = assignment.choices
        self._users: Mapping[str, list[Op]] = graph.users()
        self._results = set(refs_in(graph.outputs))

    def ends(self, name: str) -> list[TensorMeta] | None:
        """Return the values behind which gradients are partial; None if some use needs a full gradient."""
        if name in self._results:
            return None
        found: list[TensorMeta] = []
        for op in self._users.get(name, ()):
            ends = self._through(op, name)
            if ends is None:
                return None
            found += ends
        return found or None

    def _through(self, op: Op, name: str) -> list[TensorMeta] | None:
        strategy = self._choices.get(op.name)
        if strategy is None:
            return None
        # A sharded operator returns a partial gradient, or the gradient of its shard.
        if not strategy.is_replicated:
            return [self._graph.meta(name)]
        alone = not (set(self._differentiable(op)) - {name}) and isinstance(op.output, TensorMeta)
        return self.ends(op.name) if alone and op.target != "module" and not strategy.call else None

    def _differentiable(self, op: Op) -> Iterator[str]:
        for operand in op.operands():
            if self._graph.meta(operand).differentiable:
                yield operand

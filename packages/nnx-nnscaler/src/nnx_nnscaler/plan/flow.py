"""The flow of values through a graph."""

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
    """Every choice of a plan.

    Attributes:
        choices: The strategy of every operator that has a choice, by its name.
        stored: Says how every parameter is stored, by value name.
    """

    choices: Mapping[str, Strategy]
    stored: Mapping[str, Stored]

    def placement(self, flow: Flow, name: str) -> Placement:
        """The placement in which a value is made."""
        if name in self.stored:
            return self.stored[name].placement
        source = flow.source(name)
        strategy = self.choices.get(source.name)
        return R if strategy is None else strategy.outputs[source.position]


# How values flow through a graph: who makes a value, who uses it, and which operators repeat.
#
# Operators that only pick a result of another one (``getitem``) vanish here: what they name is a result of
# that operator. Results of submodules that are kept whole are values of their own, replicated like inputs:
# what such a submodule returns may be nested in any way.


class Source(NamedTuple):
    """Where a value comes from.

    Attributes:
        name: The operator, or the parameter, buffer, constant or input itself.
        position: The number of it among the operator's tensor results.
    """

    name: str
    position: int = 0


@dataclass(frozen=True, slots=True)
class Consumer:
    """One use of a value: the operator, and which of its operands. ``""`` is the forward's result."""

    op: str
    position: int = 0


class Flow:
    """The graph as sources and consumers.

    Attributes:
        ops: The operators that choose a strategy, in order.
        picks: The result that every getitem of an operator names.
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
        """Where a value comes from."""
        return self.picks.get(name) or Source(name)

    def values(self) -> dict[str, list[Consumer]]:
        """Every value that something uses, with its uses in order; results of the forward last."""
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
        """Return, for every operator, the key that it shares with its twins in other layers of a stack."""
        starred = _Stars({op.module for op in self.ops.values()})
        count: Counter[str] = Counter()
        keys: dict[str, tuple[str, ...]] = {}
        for op in self.ops.values():
            ordinal = count[op.module]
            count[op.module] += 1
            keys[op.name] = (starred(op.module), str(ordinal), signature(op, self.graph))
        return keys

    def parameter_layers(self) -> dict[str, tuple[str, ...]]:
        """Return, for every parameter, the key that it shares with its twins in other layers of a stack."""
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
    """All that the ways of splitting an operator can depend on: its kind, its arguments, and shapes.

    Operators of one signature have the same strategies.
    """
    names = op.operands()
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
    """An argument without names of values."""
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
    """Writes ``layers.*.attn.q`` for ``layers.3.attn.q``: numbers of layers, not those of a plain sequence.

    A number counts as a layer's where that layer has submodules of its own, which a member of
    ``nn.Sequential(nn.Linear, nn.ReLU)`` has not: its twins may well want to be split in turns.
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
    """Prefixes that end in a number and have something below."""
    return (module[: found.start() + len(found[0]) - 1] for found in re.finditer(r"(?<![^.])\d+\.", module))


# Parameters whose partial gradients operators that every rank repeats may pass on to them.
#
# A replicated operator on a parameter, such as a position embedding, usually gets its gradient complete, by
# a collective where the result is used for a part of the work. As a gradient is linear, the sum over the
# ranks can as well be taken of the parameter's gradient, where the reducer takes it along with the others.
# `codegen` writes no collective behind operators on synchronized parameters alone; this module finds the
# parameters that gain by it.


def synchronize_what_passes_on(graph: Graph, assignment: Assignment) -> Assignment:
    """The same assignment, with the reducer summing what would take a collective of its own.

    Args:
        graph: The graph; one for evaluation has no gradients and is left alone by the caller.
        assignment: The assignment of the graph.
    """
    if not any(stored.synchronized for stored in assignment.stored.values()):
        return assignment  # the reduction over the unit would be there for this alone
    ways = _Ways(graph, assignment)
    stored = dict(assignment.stored)
    for name in graph.parameters:
        meta = graph.meta(name)
        if stored[name] != Stored(R) or not meta.differentiable:
            continue
        ends = ways.ends(name)
        if ends is not None and prod(meta.hints) <= 2 * sum(prod(end.hints) for end in ends):
            stored[name] = Stored(R, synchronized=True)
    return replace(assignment, stored=stored)


class _Ways:
    """Where values go through replicated operators that depend on one parameter alone."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self._graph = graph
        self._choices = assignment.choices
        self._users: Mapping[str, list[Op]] = graph.users()
        self._results = set(refs_in(graph.outputs))

    def ends(self, name: str) -> list[TensorMeta] | None:
        """The values whose gradients are partial; None where one is needed complete."""
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
        if not strategy.is_replicated:
            return [self._graph.meta(name)]  # it hands back a partial gradient, or that of its part
        alone = not (set(self._differentiable(op)) - {name}) and isinstance(op.output, TensorMeta)
        return self.ends(op.name) if alone and op.target != "module" and not strategy.call else None

    def _differentiable(self, op: Op) -> Iterator[str]:
        for operand in op.operands():
            if self._graph.meta(operand).differentiable:
                yield operand

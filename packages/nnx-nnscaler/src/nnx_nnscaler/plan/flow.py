"""How values flow through a graph: who makes a value, who uses it, and which operators repeat.

Operators that only pick a result of another one (``getitem``) vanish here: what they name is a result of that
operator. Results of submodules that are kept whole are values of their own, replicated like inputs: what such
a submodule returns may be nested in any way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nnx_nnscaler.cost.operators import ALIASES, base_name
from nnx_nnscaler.ir import Code, Graph, Op, Ref, Size, TensorMeta, refs_in

__all__ = ["Flow", "Source", "signature"]


class Source(NamedTuple):
    """Where a value comes from.

    Attributes:
        name: The operator, or the parameter, buffer, constant or input itself.
        position: Which of the operator's tensor results it is.
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
        picks: For every getitem of an operator, the result that it names.
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
        """The value whose memory a value shares: through views and picks to what was computed."""
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
        """For every operator, what it has in common with its twins in other layers of a stack."""
        starred = _Stars({op.module for op in self.ops.values()})
        count: Counter[str] = Counter()
        keys: dict[str, tuple[str, ...]] = {}
        for op in self.ops.values():
            ordinal = count[op.module]
            count[op.module] += 1
            keys[op.name] = (starred(op.module), str(ordinal), signature(op, self.graph))
        return keys

    def parameter_layers(self) -> dict[str, tuple[str, ...]]:
        """For every parameter, what it has in common with its twins in other layers of a stack."""
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

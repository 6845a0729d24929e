"""What a whole plan costs: seconds of every operator, conversion and parameter of it, and its peak of memory.

The solver's objective is the sum of seconds. Nothing is chosen here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from nnx_nnscaler.ir.graph import Code, Graph, Op, Ref, Size, TensorMeta, refs_in
from nnx_nnscaler.ir.placement import Conversion, P, Placement, R, Strategy, Use, conversion, uses_of
from nnx_nnscaler.plan.cost import ALIASES, Price, Prices, Saved, Stored, base_name
from nnx_nnscaler.rules.rule import outputs_of

__all__ = [
    "Assignment",
    "Evaluation",
    "Flow",
    "activations",
    "evaluate",
    "kept_by_operator",
    "peak_memory",
    "price_of_change",
    "price_of_value",
    "synchronize_what_passes_on",
]


# --- seconds --------------------------------------------------------------------------------------
# Every operator, conversion and parameter of a plan, summed up.


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


class Changed(NamedTuple):
    """One conversion of a plan.

    Attributes:
        value: The value that is converted.
        source: The placement that it is made in.
        use: The placement that its consumers want.
        change: The collectives; None for a synchronized parameter, whose uses need none.
        consumers: Operators that share the conversion; ``""`` is the forward's result.
        price: The cost of it.
    """

    value: str
    source: Placement
    use: Use
    change: Conversion | None
    consumers: tuple[str, ...]
    price: Price


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a plan costs on one rank.

    Attributes:
        operators: Price of every operator.
        conversions: Every conversion, in order of values.
        parameters: Price of every parameter's reduction and update, by value name.
        total: All of it.
    """

    operators: Mapping[str, Price]
    conversions: tuple[Changed, ...]
    parameters: Mapping[str, Price]
    total: Price


def price_of_change(
    prices: Prices, name: str, stored: Stored | None, source: Placement, use: Use
) -> Price | None:
    """What a use of a value costs; None where it is impossible.

    Args:
        prices: Prices of the graph.
        name: The value.
        stored: Says how it is stored, if it is a parameter.
        source: The placement it is made in.
        use: The placement that the consumer wants.
    """
    meta = prices.graph.meta(name)
    if use.placement == P != source:
        return None  # only operators make partial sums
    if stored is not None and stored.synchronized and prices.backward and meta.differentiable:
        return Price() if use.partial_gradient else prices.synchronized(meta, use.placement)
    try:
        return prices.conversion(meta, source, use, again=name in prices.recomputed)
    except ValueError:
        return None


def conversions_of(flow: Flow, assignment: Assignment, prices: Prices) -> Iterator[Changed]:
    """Every conversion of a plan, each once for all consumers that share it.

    Raises:
        ValueError: A consumer wants what nothing converts into.
    """
    for name, consumers in flow.values().items():
        yield from _of_value(flow, assignment, prices, name, [(c.op, c.position) for c in consumers])


def _of_value(
    flow: Flow, assignment: Assignment, prices: Prices, name: str, consumers: list[tuple[str, int]]
) -> Iterator[Changed]:
    source, stored = assignment.placement(flow, name), assignment.stored.get(name)
    wanted: dict[Use, list[str]] = {}
    for op, position in consumers:
        use = uses_of(assignment.choices[op])[position] if op else Use(R)
        wanted.setdefault(use, []).append(op)
    for use, users in wanted.items():
        price = price_of_change(prices, name, stored, source, use)
        if price is None:
            raise ValueError(f"nothing converts {name} from {source} into {use.placement}")
        change = None if stored is not None and stored.synchronized else conversion(source, use)
        if change is not None or price.seconds > 0:
            yield Changed(name, source, use, change, tuple(dict.fromkeys(users)), price)


def price_of_value(flow: Flow, assignment: Assignment, prices: Prices, name: str) -> Price:
    """What all conversions of one value cost.

    Raises:
        ValueError: A consumer wants what nothing converts into.
    """
    consumers = [(consumer.op, consumer.position) for consumer in flow.values().get(name, ())]
    total = Price()
    for changed in _of_value(flow, assignment, prices, name, consumers):
        total = total.plus(changed.price)
    return total


def evaluate(flow: Flow, assignment: Assignment, prices: Prices) -> Evaluation:
    """What a plan costs."""
    operators = {name: prices.operator(op, assignment.choices[name]) for name, op in flow.ops.items()}
    conversions = tuple(conversions_of(flow, assignment, prices))
    parameters = {
        name: prices.parameter(flow.graph.metas[name], stored) for name, stored in assignment.stored.items()
    }
    total = prices.standing
    for price in (*operators.values(), *(changed.price for changed in conversions), *parameters.values()):
        total = total.plus(price)
    if any(stored.synchronized for stored in assignment.stored.values()):
        total = total.plus(prices.synchronization)
    return Evaluation(operators, conversions, parameters, total)


# --- flow ------------------------------------------------------------------------------------------------
#
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


# --- passing ---------------------------------------------------------------------------------------------
#
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


# --- the peak of memory ---------------------------------------------------------------------------
# The peak of memory of a plan on one rank: what is alive at every moment of a step.
#
# The solver counts what lasts and what autograd keeps, which is linear in its choices; this walk through
# the step, there and back, is what a limit is finally held against.


_Tensor = tuple[str, Placement]
"""A tensor in memory: the value whose storage it is, in a placement."""


def peak_memory(flow: Flow, assignment: Assignment, prices: Prices) -> int:
    """Most bytes that are alive at once on one rank."""
    graph = flow.graph
    lasting = sum(prices.lasting(graph.metas[name], stored) for name, stored in assignment.stored.items())
    others = [name for name in graph.metas if name not in assignment.stored]
    lasting += sum(prices.local(graph.metas[name], R).nbytes for name in others)
    step = _Step(flow, assignment, prices)
    if not prices.backward:
        return lasting + step.forward()
    return lasting + max(step.forward(), step.backward(), _update(flow, assignment, prices))


def activations(flow: Flow, assignment: Assignment, prices: Prices) -> tuple[int, int]:
    """Bytes that autograd keeps of a batch, and the most that is alive besides at any moment.

    Of the latter, parameters and their gradients are left out.
    """
    step = _Step(flow, assignment, prices)
    if not prices.backward:
        return 0, step.forward()
    kept = sum(step.kept_by_operator().values())
    return kept, max(step.forward(), step.backward(of_parameters=False)) - kept


def kept_by_operator(flow: Flow, assignment: Assignment, prices: Prices) -> Mapping[str, int]:
    """Bytes that autograd keeps, by the first operator that needs them in its backward."""
    return _Step(flow, assignment, prices).kept_by_operator()


def _update(flow: Flow, assignment: Assignment, prices: Prices) -> int:
    """While the optimizer steps: gradients (the reduced ones lie where they were reduced), and one result."""
    metas = flow.graph.metas
    gradients = [
        (prices.gradient(metas[name], stored), prices.is_reduced(stored))
        for name, stored in assignment.stored.items()
    ]
    own = sum(nbytes for nbytes, reduced in gradients if prices.zero or not reduced)
    return own + max((nbytes for nbytes, _ in gradients), default=0)


class _Step:
    """One step, operator by operator."""

    def __init__(self, flow: Flow, assignment: Assignment, prices: Prices) -> None:
        self._flow = flow
        self._assignment = assignment
        self._prices = prices
        self._ops = list(flow.ops.values())
        self._made: list[list[_Tensor]] = []
        self._kept: list[set[_Tensor]] = []
        self._more: list[int] = []
        self._again: dict[str, dict[_Tensor, int]] = {}
        self._bytes: dict[_Tensor, int] = {}
        last: dict[_Tensor, int] = {}
        for index in range(len(self._ops)):
            used, made, kept, more = self._tensors(index)
            self._made.append(made)
            self._kept.append(kept)
            self._more.append(more)
            for tensor in (*used, *made):
                last[tensor] = index
        for name in flow.values():
            if any(not consumer.op for consumer in flow.values()[name]):
                last[flow.storage(name), R] = len(self._ops)
        self._last = last

    def _tensors(self, index: int) -> tuple[list[_Tensor], list[_Tensor], set[_Tensor], int]:
        """What an operator uses and makes (conversions included), what is kept of it, and further bytes."""
        op, flow = self._ops[index], self._flow
        strategy = self._assignment.choices[op.name]
        saved = self._prices.saved(op, strategy)
        self._count_recomputed(op, strategy, saved)
        inputs, outputs = self._prices.locals_of(op, strategy)
        used, made, kept = [], [], set()
        for position, (name, use) in enumerate(zip(op.operands(), uses_of(strategy), strict=True)):
            if name in flow.graph.metas and use.placement == self._assignment.placement(flow, name):
                continue  # lasts anyway
            tensor = (flow.storage(name), use.placement)
            used.append(tensor)
            if tensor not in self._bytes:
                self._bytes[tensor] = inputs[position].nbytes
                made.append(tensor)
            if position in saved.operands:
                kept.add(tensor)
        if base_name(op) not in ALIASES and not (op.target == "module" and isinstance(op.output, tuple)):
            for name, local, placement in zip(
                self._results(op.name), outputs, strategy.outputs, strict=False
            ):
                tensor = (name, placement)
                self._bytes[tensor] = local.nbytes
                made.append(tensor)
                if saved.output:
                    kept.add(tensor)
        return used, made, kept, saved.more

    def _count_recomputed(self, op: Op, strategy: Strategy, saved: Saved) -> None:
        """What is alive besides while the backward pass of a recomputed submodule runs."""
        owner = self._prices.recomputed.get(op.name)
        if owner is None:
            return
        inside = self._prices.saved_in_backward(op, strategy)
        inputs, outputs = self._prices.locals_of(op, strategy)
        names, uses = op.operands(), uses_of(strategy)
        again = self._again.setdefault(owner, {})
        again[f"{op.name}: more", R] = inside.more  # masks and statistics
        for at in set(inside.operands) - set(saved.operands):
            again[self._flow.storage(names[at]), uses[at].placement] = inputs[at].nbytes
        if inside.output:
            for name, local, placement in zip(
                self._results(op.name), outputs, strategy.outputs, strict=False
            ):
                again[name, placement] = local.nbytes

    def _results(self, name: str) -> list[str]:
        """Names of an operator's results."""
        picks = sorted(
            (source.position, pick) for pick, source in self._flow.picks.items() if source.name == name
        )
        count = len(outputs_of(self._flow.ops[name]))
        named = dict(picks)
        return [named.get(position, name) for position in range(count)]

    def kept_by_operator(self) -> dict[str, int]:
        """Bytes that are kept for the backward pass, by the first operator that keeps them."""
        keepers = self._keepers()
        return {
            op.name: self._more[index] + sum(self._bytes[t] for t in self._kept[index] if keepers[t] == index)
            for index, op in enumerate(self._ops)
        }

    def _keepers(self) -> dict[_Tensor, int]:
        """The first operator that keeps a tensor, when whose backward is done it is freed."""
        keepers: dict[_Tensor, int] = {}
        for index, kept in enumerate(self._kept):
            for tensor in kept:
                keepers.setdefault(tensor, index)
        return keepers

    def forward(self) -> int:
        """Peak of the forward pass."""
        ends: dict[int, list[_Tensor]] = {}
        for tensor, index in self._last.items():
            ends.setdefault(index, []).append(tensor)
        lasting = set().union(*self._kept) if self._kept and self._prices.backward else set()
        alive = peak = 0
        for index in range(len(self._ops)):
            alive += sum(self._bytes[tensor] for tensor in self._made[index]) + self._more[index]
            peak = max(peak, alive)
            gone = [tensor for tensor in ends.get(index, []) if tensor not in lasting]
            alive -= sum(self._bytes.get(tensor, 0) for tensor in gone)
        return peak

    def backward(self, *, of_parameters: bool = True) -> int:
        """Peak of the backward pass: what is still kept, and the gradients that are alive.

        Args:
            of_parameters: False to leave out gradients of parameters.
        """
        keepers = self._keepers()
        alive = sum(self._bytes[tensor] for tensor in keepers) + sum(self._more)
        gradients: dict[str, int] = {}
        made: dict[str, int] = {}
        peak = alive
        for index in reversed(range(len(self._ops))):
            passing = self._add_gradients(index, gradients, made)
            owner = self._prices.recomputed.get(self._ops[index].name, "")
            again = sum(self._again.get(owner, {}).values())
            stay = sum(made.values()) if of_parameters else 0
            peak = max(peak, alive + again + passing + sum(gradients.values()) + stay)
            for tensor in self._made[index]:
                gradients.pop(tensor[0], None)
            alive -= self._more[index]
            alive -= sum(self._bytes[tensor] for tensor in self._kept[index] if keepers[tensor] == index)
        return peak

    def _add_gradients(self, index: int, gradients: dict[str, int], made: dict[str, int]) -> int:
        """Gradients that an operator's backward makes; the bytes of those that are gone after it.

        Args:
            index: The operator.
            gradients: The gradients of activations that are alive.
            made: The gradients of parameters, which stay.
        """
        op, passing = self._ops[index], 0
        strategy = self._assignment.choices[op.name]
        inputs, _ = self._prices.locals_of(op, strategy)
        for name, local in zip(op.operands(), inputs, strict=True):
            if not local.differentiable:
                continue
            stored = self._assignment.stored.get(name)
            if stored is None:
                storage = self._flow.storage(name)
                gradients[storage] = max(gradients.get(storage, 0), local.nbytes)
                continue
            made[name] = self._prices.gradient(self._flow.graph.metas[name], stored)
            passing += 0 if made[name] == local.nbytes else local.nbytes
        return passing

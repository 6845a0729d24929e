"""The cut of a graph into stages: where it is made, what crosses it, and which rank has which stage.

A cut lies between two operators of the traced order. What follows from inputs, buffers and constants alone,
such as masks, is cheap, and computed by every stage that needs it; all else crosses the cuts. The search is
exact: among all cuts that fit into the memory and whose longest stage is as short as can be, up to 2 %, it
finds the one that sends the fewest bytes. Where a rank has one stage, a chain of choices is searched; where
it has several, whose bytes add up, HiGHS solves a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

from nnx_core.errors import PlanError, UnsupportedError
from nnx_nnscaler.ir.graph import Graph, Input, Op, Ref, TensorMeta, hint_of
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.pipeline.microbatches import (
    Draw,
    Microbatches,
    cut_batch,
    draw_masks_first,
    output_refs,
    values_of_inputs,
    writes_in_place,
)
from nnx_nnscaler.plan.cost import CostModel, Stored, base_name, bytes_of
from nnx_nnscaler.plan.evaluation import Assignment, Flow, kept_by_operator
from nnx_nnscaler.plan.schedules import Arrangement
from nnx_nnscaler.rules.rule import argument_of, replicate

_HEAVY = frozenset(
    [
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
        *("conv1d", "conv2d", "conv3d", "convolution"),
    ]
)
_SLACK = 1.02
"""How much longer than need be the longest stage may become to send fewer bytes."""
_POWERS = (1, 2, 4, 8, 16, 48, 400)
"""Multiples of that slack, tried one after the other, by which the longest stage may grow to save memory."""
_GAP, _SECONDS = 0.05, 2.0
"""How near HiGHS comes to the fewest bytes, and the time after which it takes the best that it has found;
eight times as much where only memory counts."""
_MOST_PLACES = 600
"""Places of cuts above which only those between submodules are looked at."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        number: Its place in the pipeline.
        graph: The graph that it computes, whose outputs are a tuple of values.
        arguments: Names of what it is called with: inputs of the model, and values that other stages give.
        gives: Names of the values that it returns.
        writes: Fully qualified names of the buffers that it writes.
    """

    number: int
    graph: Graph
    arguments: tuple[str, ...]
    gives: tuple[str, ...]
    writes: tuple[str, ...]


# --- where stages begin ---------------------------------------------------------------------------


class StageCosts(NamedTuple):
    """What a cut costs, by the place of the operator that a stage begins with.

    Attributes:
        seconds: Time of all operators before a place.
        sent: Bytes that cross a place.
        may: True where a stage may begin.
        calls: The part of the time that every further microbatch adds, which is calling operators.
        lasting: Bytes of parameters, gradients and optimizer state that are first used before a place.
        kept: Bytes that autograd keeps of all operators before a place.
    """

    seconds: NDArray[np.float64]
    sent: NDArray[np.float64]
    may: NDArray[np.bool_]
    calls: NDArray[np.float64]
    lasting: NDArray[np.float64]
    kept: NDArray[np.float64]

    def of_microbatches(self, count: int) -> StageCosts:
        """The same for a batch that is cut into so many."""
        return self._replace(seconds=self.seconds + (count - 1) * self.calls)


class Room(NamedTuple):
    """What a rank may hold at some moment.

    Attributes:
        shares: The share of the batch whose activations it holds, for each of its stages.
        limit: Bytes that it may take.
    """

    shares: Mapping[int, float]
    limit: float


class Outline:
    """The operators of a graph in the order in which stages take them.

    Args:
        graph: The graph for one microbatch.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.free = _light(graph, values_of_inputs(graph))
        self.ops = [op for op in graph.ops if op.name not in self.free]
        self.place = {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def _last_use(self) -> dict[str, int]:
        """The place of the last operator that uses a value; beyond all for what is returned."""
        found = {name: index for index, op in enumerate(self.ops) for name in op.operands()}
        return found | dict.fromkeys(output_refs(self.graph), len(self.ops))

    def costs(self, model: CostModel, *, units: int = 1, zero: bool = False) -> StageCosts:
        """What each cut costs, time in a single unit, and memory with as many as there are."""
        prices = model.prices(self.graph, size=1)
        mesh = model.prices(self.graph, size=1, units=units, zero=zero)
        free = without_calls(model).prices(self.graph, size=1)
        flow, whole = Flow(self.graph), Stored(R)
        choices = {name: replicate(op) for name, op in flow.ops.items()}
        everything = Assignment(choices, dict.fromkeys(self.graph.parameters, whole))
        kept_by = kept_by_operator(flow, everything, mesh)
        found = np.zeros((4, len(self.ops)))
        seconds, calls, lasting, kept = found
        seen: set[str] = set()
        for index, op in enumerate(self.ops):
            if op.target != "getitem":
                seconds[index] = prices.operator(op, replicate(op)).seconds
                calls[index] = seconds[index] - free.operator(op, replicate(op)).seconds
                kept[index] = kept_by.get(op.name, 0)
            for name in op.operands():
                if name in self.graph.parameters and name not in seen:
                    seen.add(name)
                    seconds[index] += prices.parameter(self.graph.metas[name], whole).seconds
                    lasting[index] += mesh.kept(self.graph.metas[name], whole)
        seconds, calls, lasting, kept = np.pad(np.cumsum(found, axis=1), ((0, 0), (1, 0)))
        return StageCosts(seconds, self._sent(), self.may_begin(), calls, lasting, kept)

    def _sent(self) -> NDArray[np.float64]:
        change = np.zeros(len(self.ops) + 2)
        for index, op in enumerate(self.ops):
            last = self._last_use.get(op.name, index)
            if isinstance(op.output, TensorMeta) and last > index:
                nbytes = bytes_in(self.graph, op.name)
                change[index + 1] += nbytes
                change[min(last, len(self.ops)) + 1] -= nbytes
        return np.asarray(np.cumsum(change)[: len(self.ops) + 1])

    def may_begin(self) -> NDArray[np.bool_]:
        """Whether a stage may begin at each place."""
        may = np.ones(len(self.ops) + 1, dtype=bool)
        if len(self.ops) > _MOST_PLACES:
            for index, (before, op) in enumerate(pairwise(self.ops), start=1):
                may[index] = before.module != op.module
        for index, op in enumerate(self.ops):
            if op.target == "getitem":
                may[self.place[op.args[0].name] + 1 : index + 1] = False
        for buffer in self.graph.buffers:
            touching = [i for i, op in enumerate(self.ops) if buffer in op.operands()]
            if any(writes_in_place(self.ops[index]) for index in touching):
                may[touching[0] + 1 : touching[-1] + 1] = False
        may[0] = may[-1] = False
        return may

    def place_of_module(self, name: str) -> int:
        """The place of the first operator of a submodule.

        Raises:
            PlanError: It has none.
        """
        for index, op in enumerate(self.ops):
            if op.module == name or op.module.startswith(f"{name}."):
                return index
        modules = list(dict.fromkeys(op.module for op in self.ops if op.module))
        raise PlanError(
            f"stage_cuts names {name!r}, which computes nothing.",
            remedy=f"Use names of submodules, such as {', '.join(modules[:4])}.",
        )


def _light(graph: Graph, free: set[str]) -> set[str]:
    """Of what needs no parameter, the operators that every stage may repeat: all before a heavy one."""
    light = free - {op.name for op in graph.ops}
    for op in graph.ops:
        if op.name in free and base_name(op) not in _HEAVY and light.issuperset(op.operands()):
            light.add(op.name)
    return light & {op.name for op in graph.ops}


def without_calls(model: CostModel) -> CostModel:
    """The same where calling an operator takes no time."""
    return replace(model, hardware=replace(model.hardware, overhead=0.0))


# --- from a graph to its outline ------------------------------------------------------------------


class Prepared(NamedTuple):
    """A graph on its way to stages.

    Attributes:
        graph: The graph of the whole batch, with inputs for masks.
        draws: The masks that are drawn for these inputs.
        cut: The graph of a microbatch.
        outline: Its operators in order.
    """

    graph: Graph
    draws: tuple[Draw, ...]
    cut: Microbatches
    outline: Outline


def prepare(graph: Graph) -> Prepared:
    """A graph on its way to stages, which follows from it alone.

    Raises:
        UnsupportedError: The forward does what stages cannot do.
    """
    if graph.kept:
        name, reason = next(iter(graph.kept.items()))
        raise UnsupportedError(
            f"{name} has to run whole, and a stage has only its own parameters: {reason}",
            remedy="Remove the hook, or use strategy 'nnscaler_zero'.",
        )
    sparse = next(
        (op for op in graph.ops if op.target == "aten.embedding.default" and argument_of(op, "sparse")), None
    )
    if sparse is not None:
        raise UnsupportedError(
            f"{sparse.module} has sparse gradients, which stages do not exchange.",
            remedy="Leave `sparse=True` out, or use strategy 'nnscaler_zero'.",
        )
    if any(leaf.meta is not None and leaf.meta.differentiable for leaf in graph.inputs):
        raise UnsupportedError(
            "an input of the forward requires a gradient, which only the first stage would have.",
            remedy="Detach it, or use strategy 'nnscaler_zero'.",
        )
    whole, draws = draw_masks_first(graph)
    cut = cut_batch(whole)
    return Prepared(whole, draws, cut, Outline(cut.graph))


def traced_sizes(graph: Graph) -> dict[str, int]:
    """The size of the traced batch, by its symbol."""
    return {symbol: hint_of(graph.metas[leaf].shape[dim]) for symbol, (leaf, dim) in graph.symbols.items()}


# --- the search for cuts --------------------------------------------------------------------------


def choose_cuts(
    costs: StageCosts,
    stages: int,
    *,
    foreign: NDArray[np.float64] | None = None,
    rooms: Sequence[Room] = (),
) -> list[int] | None:
    """Where stages begin, so that the longest is as short as can be, and then the fewest bytes cross.

    Args:
        costs: The costs of cuts.
        stages: The number of stages.
        foreign: The bytes, up to each place, of parameters that each stage's rank does not store, where
            they are stored already; the fewest count first. Shape (stages, places).
        rooms: The memory that ranks have; empty if it does not limit the cut.

    Returns:
        The places at which the second and later stages begin; None if no cut fits into the memory.

    Raises:
        PlanError: There are too few places.
    """
    places = [0, *np.flatnonzero(costs.may).tolist(), len(costs.may) - 1]
    if len(places) < stages + 1:
        raise PlanError(
            f"the model can be cut into {len(places) - 1} stages, and {stages} are asked for.",
            remedy=f"Set pipeline_nstages to {len(places) - 1} or less.",
        )
    costs = costs._replace(**{name: values[places] for name, values in costs._asdict().items()})
    taken = costs.seconds[None, :] - costs.seconds[:, None]  # from a place to a later one
    if foreign is not None:
        spans = [row[places][None, :] - row[places][:, None] for row in foreign]
        return [places[index] for index in _search(spans, taken, costs.sent)]
    if any(len(room.shares) > 1 for room in rooms):
        found = _Cuts(costs, stages, rooms).search(_shortest_longest([taken] * stages))
    else:
        bytes_of_stage = [np.zeros_like(taken)] * stages
        for room in rooms:
            ((stage, share),) = room.shares.items()
            bytes_of_stage[stage] = np.where(_bytes(costs, share) <= room.limit, 0.0, np.inf)
        longest = _shortest_longest([taken + fits for fits in bytes_of_stage])
        bounds = [np.where(taken <= longest * _SLACK, fits, np.inf) for fits in bytes_of_stage]
        found = _search(bounds, taken, costs.sent) if np.isfinite(longest) else None
    return None if found is None else [places[index] for index in found]


def _bytes(costs: StageCosts, share: float) -> NDArray[np.float64]:
    """Bytes of a stage from a place to a later one, with activations of a share of the batch."""
    up_to = costs.lasting + share * costs.kept
    crossing = share * costs.sent
    return (up_to + crossing)[None, :] - (up_to - crossing)[:, None]


def _shortest_longest(taken: Sequence[NDArray[np.float64]]) -> float:
    """The length of the longest stage of the best cut, by what each stage takes."""
    best = taken[0][0].copy()
    best[0] = np.inf
    upper = np.triu(np.ones_like(taken[0], dtype=bool), k=1)
    for one in taken[1:]:
        best = np.where(upper, np.maximum(best[:, None], one), np.inf).min(axis=0)
    return float(best[-1])


class _Cuts:
    """The choice of cuts as a program for HiGHS, with one binary for each cut and place.

    Args:
        costs: The costs of cuts, at places where stages may begin.
        stages: The number of stages.
        rooms: The memory that ranks have.
    """

    def __init__(self, costs: StageCosts, stages: int, rooms: Sequence[Room]) -> None:
        self._costs = costs
        self._cuts, self._places = stages - 1, len(costs.seconds) - 2
        ones = np.kron(np.eye(self._cuts), np.ones(self._places))
        order, _ = self._of_stages(np.arange(len(costs.seconds), dtype=float))
        self._rows = [LinearConstraint(ones, 1, 1), LinearConstraint(order[1:-1], 1, np.inf)]
        for room in rooms:
            row, constant = np.zeros(self._cuts * self._places), 0.0
            for stage, share in room.shares.items():
                up_to, end = self._of_stages(costs.lasting + share * costs.kept)
                row, constant = row + up_to[stage], constant + end[stage]
                for cut in (stage - 1, stage):
                    if 0 <= cut < self._cuts:
                        row[cut * self._places : (cut + 1) * self._places] += share * costs.sent[1:-1]
                    else:
                        constant += share * costs.sent[0 if cut < 0 else -1]
            most = max(room.limit, 1.0)
            self._rows.append(LinearConstraint(row[None] / most, -np.inf, 1 - constant / most))

    def _of_stages(self, prefix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What each stage has of a running sum: coefficients of the binaries, and a constant."""
        at = np.kron(np.eye(self._cuts), prefix[1:-1])
        none = np.zeros((1, at.shape[1]))
        constant = np.zeros(self._cuts + 1)
        constant[0], constant[-1] = -prefix[0], prefix[-1]
        return np.vstack([at, none]) - np.vstack([none, at]), constant

    def search(self, shortest: float) -> list[int] | None:
        """The best cut as numbers of places; None if none fits.

        Args:
            shortest: The time of the longest stage of the best cut if memory does not count.
        """
        for power in _POWERS:
            seconds = _SECONDS if power < _POWERS[-1] else 8 * _SECONDS
            if (found := self._within(shortest * _SLACK**power, seconds)) is not None:
                return found
        return None

    def _within(self, longest: float, most: float) -> list[int] | None:
        """The cut that sends the fewest bytes, whose longest stage is no longer than this."""
        seconds = self._costs.seconds / longest
        number = np.arange(1, self._cuts + 1)[:, None]
        early = seconds[-1] - seconds[1:-1] > self._cuts + 1 - number
        late = seconds[1:-1] - seconds[0] > number  # others are too far from the end or the start
        each, last = self._of_stages(seconds)
        outcome = milp(
            np.tile(self._costs.sent[1:-1], self._cuts) / max(float(self._costs.sent.max()), 1.0),
            integrality=np.ones(self._cuts * self._places),
            bounds=Bounds(0, np.where(early | late, 0.0, 1.0).ravel()),
            constraints=[*self._rows, LinearConstraint(each, -np.inf, 1 - last)],
            options={"mip_rel_gap": _GAP, "time_limit": most},
        )
        if outcome.x is None:
            return None
        chosen = outcome.x.reshape(self._cuts, self._places).argmax(axis=1)
        return [int(place) + 1 for place in chosen]


def _search(
    spans: Sequence[NDArray[np.float64]], taken: NDArray[np.float64], sent: NDArray[np.float64]
) -> list[int]:
    """The cuts with the least sum of what each stage spans, then of what is sent, then of squared times."""
    scale = 1.0 / max(float(sent.max()), 1.0)
    even = 1e-6 / max(float(taken.max()) ** 2, 1e-30)
    upper = np.triu(np.ones_like(taken, dtype=bool), k=1)
    total: NDArray[np.float64] | None = None
    steps: list[NDArray[np.int64]] = []
    for span in spans:
        cost = np.where(upper, span * 1e3 + even * taken**2, np.inf)
        if total is None:
            total = cost[0]
            continue
        combined = (total + sent * scale)[:, None] + cost
        steps.append(np.asarray(combined.argmin(axis=0)))
        total = combined.min(axis=0)
    cuts = []
    place = len(sent) - 1
    for step in reversed(steps):
        place = int(step[place])
        cuts.append(place)
    return cuts[::-1]


def bytes_in(graph: Graph, name: str) -> int:
    """Bytes of a value for the traced batch."""
    meta = graph.meta(name)
    return prod(meta.hints) * bytes_of(meta.dtype)


def foreign_bytes(
    outline: Outline, homes: Mapping[str, int], arrangement: Arrangement
) -> NDArray[np.float64]:
    """Bytes of parameters that each stage would have to fetch from another rank, up to each place.

    A parameter counts where it is used first: those that several stages use are fetched under any cut.

    Args:
        outline: The operators.
        homes: The rank along the pipe that stores each parameter, by fully qualified name.
        arrangement: The stages of each rank along the pipe.
    """
    graph = outline.graph
    found = np.zeros((arrangement.stages, len(outline.ops) + 1))
    seen: set[str] = set()
    for index, op in enumerate(outline.ops):
        found[:, index + 1] = found[:, index]
        for name in op.operands():
            if name in graph.parameters and name not in seen:
                seen.add(name)
                home = homes.get(graph.parameters[name], 0)
                nbytes = bytes_in(graph, name)
                for stage in range(arrangement.stages):
                    found[stage, index + 1] += nbytes * (arrangement.rank_of(stage) != home)
    return found


# --- the stages -----------------------------------------------------------------------------------


def make_stages(outline: Outline, cuts: Sequence[int]) -> list[Stage]:
    """The stages that begin at these places.

    Args:
        outline: The operators.
        cuts: The places at which the second and later stages begin.

    Raises:
        UnsupportedError: The model returns a parameter as it is.
    """
    graph = outline.graph
    bounds = [0, *cuts, len(outline.ops)]
    stage_of = {
        op.name: number
        for number, (start, stop) in enumerate(pairwise(bounds))
        for op in outline.ops[start:stop]
    }
    last = len(bounds) - 2
    returned: dict[int, list[str]] = {}
    for name in output_refs(graph):
        if name in graph.parameters:
            raise UnsupportedError(
                f"the forward returns the parameter {graph.parameters[name]!r} as it is.",
                remedy="Read it from the module where it is needed.",
            )
        if name in stage_of or name in outline.free:
            returned.setdefault(stage_of.get(name, last), []).append(name)
    needs = [
        _needed(outline, outline.ops[start:stop], returned.get(number, ()))
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]
    crossing = [
        [name for name in names if stage_of.get(name, number) != number] for number, names in enumerate(needs)
    ]
    sent = {name for names in crossing for name in names}
    stages = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        own = outline.ops[start:stop]
        gives = [op.name for op in own if op.name in sent and op.name not in returned.get(number, ())]
        stages.append(
            _stage(outline, number, own, needs[number], crossing[number], [*returned.get(number, ()), *gives])
        )
    return stages


def _needed(outline: Outline, ops: Sequence[Op], returned: Sequence[str]) -> list[str]:
    """All values that operators use, and those that free operators need to make them."""
    graph = outline.graph
    wanted = {name: None for op in ops for name in op.operands()} | dict.fromkeys(returned)
    for op in reversed(graph.ops):
        if op.name in wanted and op.name in outline.free:
            wanted |= dict.fromkeys(op.operands())
    return list(wanted)


def _stage(
    outline: Outline,
    number: int,
    own: Sequence[Op],
    needed: Sequence[str],
    crossing: Sequence[str],
    gives: Sequence[str],
) -> Stage:
    graph, wanted = outline.graph, set(needed)
    repeated = {name for name in wanted if name in outline.free}
    mine = {op.name for op in own}
    ops = [op for op in graph.ops if op.name in mine or op.name in repeated]
    of_symbols = {name for name, _ in graph.symbols.values()}
    given = [
        leaf.name
        for leaf in graph.inputs
        if leaf.meta is not None and (leaf.name in wanted or leaf.name in of_symbols)
    ]
    arguments = (*given, *crossing)
    inputs = [Input(name, graph.meta(name)) for name in arguments]
    parameters = {name: fqn for name, fqn in graph.parameters.items() if name in wanted}
    buffers = {name: fqn for name, fqn in graph.buffers.items() if name in wanted}
    constants = {name: tensor for name, tensor in graph.constants.items() if name in wanted}
    named = (*parameters, *buffers, *constants)
    metas = {leaf.name: leaf.meta for leaf in inputs if leaf.meta is not None}
    written = {name for op in ops if writes_in_place(op) for name in op.operands() if name in buffers}
    return Stage(
        number,
        replace(
            graph,
            inputs=inputs,
            parameters=parameters,
            buffers=buffers,
            constants=constants,
            metas={**metas, **{name: graph.metas[name] for name in named}},
            ops=ops,
            outputs=tuple(Ref(name) for name in gives),
            guards=(),
        ),
        arguments,
        tuple(gives),
        tuple(sorted(buffers[name] for name in written)),
    )


def homes_of(stages: Sequence[Stage], arrangement: Arrangement) -> dict[str, int]:
    """The rank along the pipe that stores each parameter: that of the first stage that uses it."""
    found: dict[str, int] = {}
    for stage in stages:
        for fqn in stage.graph.parameters.values():
            found.setdefault(fqn, arrangement.rank_of(stage.number))
    return found

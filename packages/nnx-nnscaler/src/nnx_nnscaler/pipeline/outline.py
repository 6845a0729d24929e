"""Find the places where stages of a graph may begin, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nnx_core.errors import PlanError, UnsupportedError
from nnx_nnscaler.ir.graph import Graph, TensorMeta, hint_of
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.pipeline.microbatches import (
    Microbatches,
    cut_batch,
    output_refs,
    values_of_inputs,
    writes_in_place,
)
from nnx_nnscaler.pipeline.random_masks import Draw, draw_masks_first
from nnx_nnscaler.plan.cost import CostModel, Stored
from nnx_nnscaler.plan.flow import Assignment, Flow
from nnx_nnscaler.plan.peak_memory import kept_by_operator
from nnx_nnscaler.plan.work import base_name, bytes_of
from nnx_nnscaler.rules.rule import argument_of, replicate

_HEAVY = frozenset(
    [
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
        *("conv1d", "conv2d", "conv3d", "convolution"),
    ]
)


_MOST_PLACES = 600
"""The number of places above which only those between submodules are considered."""


class StageCosts(NamedTuple):
    """The costs of cuts, by the place of the operator that a stage begins with.

    Attributes:
        seconds: The time of all operators before a place.
        sent: The bytes that cross a place.
        may: True if a stage may begin there.
        calls: The overhead of operator calls within that time, which every further microbatch adds.
        lasting: The bytes of parameters, gradients and optimizer state with a first use before a place.
        kept: The bytes that autograd keeps of all operators before a place.
    """

    seconds: NDArray[np.float64]
    sent: NDArray[np.float64]
    may: NDArray[np.bool_]
    calls: NDArray[np.float64]
    lasting: NDArray[np.float64]
    kept: NDArray[np.float64]

    def of_microbatches(self, count: int) -> StageCosts:
        """Return the costs for a batch in this number of microbatches."""
        return self._replace(seconds=self.seconds + (count - 1) * self.calls)


class Room(NamedTuple):
    """The memory of a rank at one moment.

    Attributes:
        shares: The share of the batch whose activations each of its stages holds.
        limit: The bytes that the rank may use.
    """

    shares: Mapping[int, float]
    limit: float


class Outline:
    """The operators of a graph in the order of the stages.

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
        """Return the place of the last operator that uses each value; after the end for returned values."""
        found = {name: index for index, op in enumerate(self.ops) for name in op.operands()}
        return found | dict.fromkeys(output_refs(self.graph), len(self.ops))

    def costs(self, model: CostModel, *, units: int = 1, zero: bool = False) -> StageCosts:
        """Return the cost of each cut: time in a single unit, and memory with all units."""
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
        """Return True if a stage may begin at each place."""
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
        """Return the place of the first operator of a submodule.

        Raises:
            PlanError: The submodule has no operator.
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
    """Return the operators without parameters that every stage may repeat: all before a heavy one."""
    light = free - {op.name for op in graph.ops}
    for op in graph.ops:
        if op.name in free and base_name(op) not in _HEAVY and light.issuperset(op.operands()):
            light.add(op.name)
    return light & {op.name for op in graph.ops}


def without_calls(model: CostModel) -> CostModel:
    """Return a copy of the cost model without the overhead of operator calls."""
    return replace(model, hardware=replace(model.hardware, overhead=0.0))


class Prepared(NamedTuple):
    """A graph that is prepared for stages.

    Attributes:
        graph: The graph of the complete batch, with inputs for masks.
        draws: The masks to draw for these inputs.
        cut: The graph of a microbatch.
        outline: The operators of `cut` in order.
    """

    graph: Graph
    draws: tuple[Draw, ...]
    cut: Microbatches
    outline: Outline


def prepare(graph: Graph) -> Prepared:
    """Prepare a graph for stages; the result depends on the graph alone.

    Raises:
        UnsupportedError: The forward does something that stages cannot do.
    """
    if graph.kept:
        name, reason = next(iter(graph.kept.items()))
        raise UnsupportedError(
            f"{name} must run in eager mode, but a stage has only its own parameters: {reason}",
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


def bytes_in(graph: Graph, name: str) -> int:
    """Return the bytes of a value for the traced batch."""
    meta = graph.meta(name)
    return prod(meta.hints) * bytes_of(meta.dtype)

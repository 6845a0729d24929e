"""Cut a graph into stages: their operators, the values between them, and the rank of each parameter.

A cut lies between two operators of the traced order. Values that depend on inputs, buffers and constants
alone, such as masks, are cheap, and every stage that needs one computes it. All other values cross the cuts.
The search is exact. Among all cuts that fit into the memory and whose longest stage is within 2 % of the
shortest possible, it finds the one that sends the fewest bytes. With one stage per rank, it searches a chain
of choices. With several, whose bytes add up, HiGHS solves an integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nnx_core.errors import UnsupportedError
from nnx_nnscaler.ir.graph import Graph, Input, Op, Ref
from nnx_nnscaler.pipeline.microbatches import (
    output_refs,
    writes_in_place,
)
from nnx_nnscaler.pipeline.outline import Outline
from nnx_nnscaler.plan.schedules import Arrangement


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        number: The index of the stage in the pipeline.
        graph: The graph of the stage, whose outputs are a tuple of values.
        arguments: The names of its inputs: inputs of the model, and values of other stages.
        gives: The names of the values that it returns.
        writes: The fully qualified names of the buffers that it writes.
    """

    number: int
    graph: Graph
    arguments: tuple[str, ...]
    gives: tuple[str, ...]
    writes: tuple[str, ...]


def make_stages(outline: Outline, cuts: Sequence[int]) -> list[Stage]:
    """Return the stages that begin at these places.

    Args:
        outline: The operators.
        cuts: The places at which the second and later stages begin.

    Raises:
        UnsupportedError: The model returns a parameter unchanged.
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
                f"the forward returns the parameter {graph.parameters[name]!r} unchanged.",
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
    """Return all values that operators use, and those that free operators need to compute them."""
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
    """Return the rank along the pipe of the first stage that uses each parameter; it stores the parameter."""
    found: dict[str, int] = {}
    for stage in stages:
        for fqn in stage.graph.parameters.values():
            found.setdefault(fqn, arrangement.rank_of(stage.number))
    return found

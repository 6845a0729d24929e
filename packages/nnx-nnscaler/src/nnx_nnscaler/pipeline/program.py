"""Run a forward, or a training step, as the stages of a pipeline: plan it, store it as text, and run it.

`PipelineForm` replaces `ProgramForm` in the compiler. Its program takes the complete batch, as the module's
forward does. It sends microbatches through the stages, in GPipe's order or interleaved, and returns the
forward's result on every rank.

A `TrainingStep` runs forward, loss and logged values for each microbatch of a step, traced as one graph. So
schedules can run the first microbatches backward before the last ones ran forward, even if the step computes
the loss. A program refuses code that it could not repeat: the step then runs in eager mode, around the stages
of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nnx_core.communicator import Communicator, GroupCommunicator
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.codegen.emit import Program, emit, inputs_of, load_program
from nnx_nnscaler.compile.compiler import ProgramForm
from nnx_nnscaler.compile.store import Entry
from nnx_nnscaler.ir.graph import Graph, Input, Ref
from nnx_nnscaler.ir.placement import P, R
from nnx_nnscaler.pipeline.call import Call, Lineup, StageRuntime, look_of
from nnx_nnscaler.pipeline.microbatches import Microbatches, output_refs, possible_counts
from nnx_nnscaler.pipeline.outline import prepare
from nnx_nnscaler.pipeline.picture import Timeline
from nnx_nnscaler.pipeline.stages import make_stages
from nnx_nnscaler.pipeline.turns import Turns
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan, any_plan_from_text
from nnx_nnscaler.plan.planning import replicated_plan
from nnx_nnscaler.plan.schedules import Action, Arrangement, actions
from nnx_nnscaler.runtime.functions import Runtime, join_parts, sample_weights

_SECTION = "# === {} ===\n"


@dataclass(frozen=True)
class PipelineForm(ProgramForm):
    """Makes pipelines of graphs, and their programs.

    Attributes:
        axes: A function that returns this rank's groups for a plan's pipeline. Collective.
        timeline: The recorder of this rank's actions; None for no measurement.
    """

    axes: Callable[[PipelinePlan], Axes]
    timeline: Timeline | None = None

    def source(self, graph: Graph, plan: Any, *, title: str, recompute: Sequence[str]) -> str:
        """Return the source of all stages, one after the other."""
        if not isinstance(plan, PipelinePlan):
            return super().source(graph, plan, title=title, recompute=recompute)
        return source_of(graph, plan, title=title, recompute=recompute)

    def load(self, entry: Entry, graph: Graph, path: Path | None) -> tuple[Any, Program]:  # noqa: D102
        plan = any_plan_from_text(entry.plan)
        if not isinstance(plan, PipelinePlan):
            return super().load(entry, graph, path)
        axes = self.axes(plan)
        assert axes.pipe is not None
        stage = GroupCommunicator(axes.within_stage.unit)
        return plan, PipelineProgram(graph, plan, entry.source, path, axes.pipe, stage, self.timeline)


def source_of(graph: Graph, plan: PipelinePlan, *, title: str = "", recompute: Sequence[str] = ()) -> str:
    """Return the source of all stages, one after the other."""
    prepared = prepare(graph)
    texts = []
    for stage, own in zip(make_stages(prepared.outline, plan.cuts), plan.stages, strict=True):
        name = f"stage {stage.number} on rank {plan.arrangement.rank_of(stage.number)} of the pipe"
        text = emit(stage.graph, own, title=f"{title}, {name}", recompute=recompute)
        texts.append(_SECTION.format(name) + text)
    return "\n\n".join(texts)


def in_a_row(graph: Graph, plan: PipelinePlan, source: str) -> tuple[PipelinePlan, Program]:
    """Return the plan by which the ranks of one stage run all stages, and its program, for checks."""
    row = replace(
        plan,
        size=plan.stages[0].size,
        arrangement=Arrangement(1, plan.arrangement.stages),
        homes=dict.fromkeys(plan.homes, 0),
        schedule="gpipe",
    )
    return row, PipelineProgram(graph, row, source, None, None, None)


def _sections(source: str) -> list[str]:
    """Return the source of each stage, with empty lines before it to keep the file's line numbers."""
    mark = _SECTION.partition("{}")[0]
    texts: list[str] = []
    lines = 0
    for part in source.split(mark)[1:]:
        texts.append("\n" * lines + mark + part)
        lines += part.count("\n")
    return texts


class PipelineProgram:
    """A pipeline with the interface of a program.

    Args:
        graph: The traced forward.
        plan: The plan of the forward.
        source: The source of the stages.
        path: The file with the sources; None if there is none.
        pipe: The ranks along the pipe; None if one rank has all stages.
        stage: The collectives of the ranks of a stage; None for those of the runtime.
        timeline: The recorder of this rank's actions; None for no measurement.
    """

    def __init__(
        self,
        graph: Graph,
        plan: PipelinePlan,
        source: str,
        path: Path | None,
        pipe: dist.ProcessGroup | None,
        stage: Communicator | None,
        timeline: Timeline | None = None,
    ) -> None:
        prepared = prepare(graph)
        self.plan = plan
        self.cut = prepared.cut
        self.graph = prepared.cut.graph
        self._stage = stage
        self._draws = prepared.draws
        self._inputs = inputs_of(graph)
        self._more = {n: tensor for n, tensor in self.graph.constants.items() if n not in graph.constants}
        sections = _sections(source)
        own = plan.arrangement.stages_of(0 if pipe is None else dist.get_rank(pipe))
        programs = {number: load_program(sections[number], path=path) for number in own}
        stages = make_stages(prepared.outline, plan.cuts)
        self.lineup = Lineup(self.graph, plan, stages, programs, pipe, timeline)
        self._ahead = _program_ahead(prepared.graph, prepared.cut, self._inputs)
        self._returned = [name for name in output_refs(self.graph) if name not in self._inputs]
        self._output = _output_program(self.graph, self._inputs, self._returned)

    def __call__(
        self,
        rt: Runtime,
        root: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        *tensors: Tensor,
    ) -> Any:
        """Return the forward's result for these inputs, on every rank of the unit."""
        inputs = dict(zip(self._inputs, tensors, strict=True))
        symbols = {name: inputs[leaf].shape[dim] for name, (leaf, dim) in self.graph.symbols.items()}
        scale = _loss_scale(rt)
        count, order = self.order_for(symbols, scales=scale is not None)
        inputs |= self._drawn(symbols, rt.device)
        self._more = {name: tensor.to(rt.device) for name, tensor in self._more.items()}
        constants = {**constants, **self._more}
        runtime = StageRuntime(self._stage or rt.communicator, rt.device, rt.loss_scale)
        runtime.microbatches = count
        runtime.counts, ahead = self._computed_ahead(rt, root, weights, constants, inputs)
        inputs |= ahead
        call = Call(self.lineup, runtime, root, weights, constants, symbols, in_turns=order is not None)
        local = self._microbatches(inputs, count)
        if order is None:
            call.run(local)
            return self._result(call, local, inputs, None)
        assert scale is not None
        turns = Turns(
            call, local, self.plan.loss, self.plan.schedule, keeps=frozenset(self._returned), scale=scale
        )
        turns.run(order)
        return self._result(call, local, inputs, turns)

    def order_for(
        self, symbols: Mapping[str, int], *, scales: bool = True
    ) -> tuple[int, tuple[Action, ...] | None]:
        """Return the number of microbatches, and this rank's actions by the schedule; None for GPipe's order.

        Args:
            symbols: The size of the batch, by its symbol.
            scales: True if the factor of a loss is known.
        """
        plan = self.plan
        counts = list(possible_counts(self.cut, symbols, plan.microbatches, plan.divisible))
        in_turns = plan.schedule != "gpipe" and plan.loss and not self.cut.hindrance
        if in_turns and scales and torch.is_grad_enabled():
            for count in counts:
                found = actions(plan.schedule, plan.arrangement.ranks, plan.arrangement.stages, count)
                if found is not None:
                    return count, found[self.lineup.rank]
        return counts[0], None

    def _drawn(self, symbols: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Draw masks for the complete batch on every rank, as one process would; each keeps its own."""
        needed = {name for number in self.lineup.own for name in self.lineup.stages[number].arguments}
        found = {}
        for draw in self._draws:
            look = look_of(draw.meta, symbols, flows=False)
            mask = F.dropout(torch.ones(look.shape, dtype=look.dtype, device=device), draw.p, training=True)
            if draw.name in needed:
                found[draw.name] = mask
        return found

    def _computed_ahead(
        self,
        rt: Runtime,
        root: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Count the samples for each mean, and compute other values of the complete batch."""
        if self._ahead is None:
            return {}, {}
        program, names = self._ahead
        with torch.no_grad():
            targets, values = program(rt, root, weights, constants, *[inputs[name] for name in names])
            counts = {
                count.name: sample_weights(target, weight, count.ignore_index).to(torch.float32)
                for count, (target, weight) in zip(self.cut.counts, targets, strict=True)
            }
        return counts, dict(zip(self.cut.ahead, values, strict=True))

    def _microbatches(self, inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        """Return the inputs of each microbatch."""
        found: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for name, tensor in inputs.items():
            placement = self.cut.placements.get(name, R)
            parts = [tensor] * count
            if count > 1 and placement.is_shard:
                parts = list(tensor.chunk(count, placement.dim))
            for one, part in zip(found, parts, strict=True):
                one[name] = part
        return found

    def _result(
        self, call: Call, local: list[dict[str, Tensor]], inputs: Mapping[str, Tensor], turns: Turns | None
    ) -> Any:
        owners = {
            name: self.plan.arrangement.rank_of(stage.number)
            for stage in self.lineup.stages
            for name in stage.gives
        }
        shared = [name for name in self._returned if name in owners]
        own = [
            self._joined(name, [one[name] for one in local]) if owners[name] == self.lineup.rank else None
            for name in shared
        ]
        looks = [call.look(name, call.symbols) for name in shared]
        found = call.between.share(own, looks, [owners[name] for name in shared])
        values = dict(zip(shared, found, strict=True))
        if turns is not None:
            values |= turns.results({name: values[name] for name in shared if name in call.flows})
        self._share_written(call)
        values |= {
            name: call.weights[fqn] for name, fqn in self.graph.buffers.items() if name in self._returned
        }
        call.passage.end_forward()
        values |= {name: call.constants[name] for name in self._returned if name in self.graph.constants}
        named = {**inputs, **values}
        arguments = [named[name] for name in (*self._inputs, *self._returned)]
        return self._output(call.runtime, call.root, {}, {}, *arguments)

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        """Join the shards or summands of the microbatches to the complete value."""
        placement = self.cut.placements.get(name, R)
        if len(parts) == 1:
            return parts[0]
        if placement == R:
            first: Tensor = _First.apply(*parts)  # type: ignore[no-untyped-call]
            return first
        if placement == P:
            return torch.stack(parts).sum(0)
        return join_parts(parts, placement)

    def _share_written(self, call: Call) -> None:
        """Broadcast the buffers that stages have written to all ranks."""
        with torch.no_grad():
            for stage in self.lineup.stages:
                for fqn in stage.writes if self.lineup.pipe is not None else ():
                    home = self.plan.arrangement.rank_of(stage.number)
                    dist.broadcast(call.weights[fqn], group=self.lineup.pipe, group_src=home)


class _First(torch.autograd.Function):
    """The first of equal values; its backward reaches all of them, because every rank waits for each."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return parts[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        nothing = [torch.zeros_like(gradient)] * (len(ctx.needs_input_grad) - 1)
        return gradient, *nothing


def _loss_scale(rt: Runtime) -> float | None:
    """Return the scale of a loss in float16; None if unknown."""
    in_float16 = any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        for device in ("cpu", "cuda")
    )
    return rt.loss_scale() if in_float16 else 1.0


def _program_ahead(
    graph: Graph, cut: Microbatches, inputs: Sequence[str]
) -> tuple[Program, list[str]] | None:
    """Return the operators of targets, class weights and values computed ahead, of means over samples."""
    if not (cut.counts or cut.ahead):
        return None
    counted = [name for count in cut.counts for name in (count.target, count.weight) if name is not None]
    wanted = {*counted, *cut.ahead}
    for op in reversed(graph.ops):
        if op.name in wanted:
            wanted |= set(op.operands())
    ops = [op for op in graph.ops if op.name in wanted]
    targets = [(Ref(c.target), None if c.weight is None else Ref(c.weight)) for c in cut.counts]
    outputs = (targets, [Ref(name) for name in cut.ahead])
    own = [leaf for leaf in graph.inputs if leaf.name in inputs]
    made = replace(graph, inputs=own, ops=ops, outputs=outputs, parameters={}, guards=())
    return load_program(emit(made, replicated_plan(made, 1))), inputs_of(made)


def _output_program(graph: Graph, inputs: Sequence[str], returned: Sequence[str]) -> Program:
    """Return the function that builds the forward's result from its values."""
    own = [leaf for leaf in graph.inputs if leaf.name in inputs]
    values = [Input(name, graph.meta(name)) for name in returned]
    arguments = [*own, *values]
    made = replace(
        graph,
        inputs=arguments,
        metas={leaf.name: leaf.meta for leaf in arguments if leaf.meta is not None},
        ops=[],
        parameters={},
        buffers={},
        constants={},
        guards=(),
    )
    return load_program(emit(made, replicated_plan(made, 1)))

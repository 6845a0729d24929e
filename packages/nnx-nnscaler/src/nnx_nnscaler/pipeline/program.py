"""A forward that runs as the stages of a pipeline: how it is planned, kept as text, and run.

`PipelineForm` takes the place of `ProgramForm` in the compiler. The program that it makes takes the whole
batch, as the module's forward does, sends microbatches through the stages in GPipe's order, and returns what
the forward would, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nnx_nnscaler.codegen.emit import emit, inputs_of
from nnx_nnscaler.codegen.store import Entry, Program, load_program
from nnx_nnscaler.compiler import ProgramForm
from nnx_nnscaler.cost.model import CostModel
from nnx_nnscaler.ir import Graph, Input, Ref, TensorMeta
from nnx_nnscaler.pipeline.execution import Line, Look, Passage
from nnx_nnscaler.pipeline.microbatches import (
    Count,
    output_refs,
)
from nnx_nnscaler.pipeline.plan import PipelinePlan, pipeline_plan_from_text, pipeline_plan_to_text
from nnx_nnscaler.pipeline.planning import prepare
from nnx_nnscaler.pipeline.stages import (
    Stage,
    make_stages,
)
from nnx_nnscaler.placement import P, Placement, R
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.program_plan import ProgramPlan
from nnx_nnscaler.runtime.functions import Runtime, sample_weights

_SECTION = "# === {} ===\n"


# --- texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineForm(ProgramForm):
    """Makes pipelines of graphs.

    Attributes:
        pipe: This rank's group along the pipe.
    """

    pipe: dist.ProcessGroup

    def source(self, graph: Graph, plan: Any, *, title: str, recompute: Sequence[str]) -> str:
        """The source of every stage, one behind the other."""
        prepared = prepare(graph)
        texts = []
        for stage, own in zip(make_stages(prepared.outline, plan.cuts), plan.stages, strict=True):
            name = f"stage {stage.number} on rank {plan.arrangement.rank_of(stage.number)} of the pipe"
            text = emit(stage.graph, own, title=f"{title}, {name}", recompute=recompute)
            texts.append(_SECTION.format(name) + text)
        return "\n\n".join(texts)

    def text(self, plan: Any) -> str:  # noqa: D102 # as the base class says
        return pipeline_plan_to_text(plan)

    def load(self, entry: Entry, graph: Graph, path: Path | None) -> tuple[Any, Program]:  # noqa: D102
        plan = pipeline_plan_from_text(entry.plan)
        return plan, PipelineProgram(graph, plan, entry.source, path, self.pipe)


def _sections(source: str) -> list[str]:
    """The source of each stage, with empty lines before it so that line numbers are those of the file."""
    mark = _SECTION.partition("{}")[0]
    texts: list[str] = []
    lines = 0
    for part in source.split(mark)[1:]:
        texts.append("\n" * lines + mark + part)
        lines += part.count("\n")
    return texts


# --- running --------------------------------------------------------------------------------------


class StageRuntime(Runtime):
    """The runtime of one call.

    Attributes:
        microbatches: Into how many the batch is cut.
        counts: By the name of an operator, the number of samples that count in the whole batch.
    """

    microbatches: int = 1
    counts: Mapping[str, Tensor]


class Bundle(NamedTuple):
    """What one stage gives a rank.

    Attributes:
        stage: The stage that gives it.
        rank: The rank that gets it.
        consumer: The first stage of that rank that needs some of it.
        names: The values.
    """

    stage: int
    rank: int
    consumer: int
    names: tuple[str, ...]


class PipelineProgram:
    """A program that is called as any other one.

    Args:
        graph: The traced forward.
        plan: Its plan.
        source: The sources of the stages.
        path: The file that has them; None if there is none.
        pipe: The ranks along the pipe.
    """

    def __init__(
        self, graph: Graph, plan: PipelinePlan, source: str, path: Path | None, pipe: dist.ProcessGroup
    ) -> None:
        prepared = prepare(graph)
        self.plan = plan
        self.cut = prepared.cut
        self.graph = prepared.cut.graph
        self.stages = make_stages(prepared.outline, plan.cuts)
        self._draws = prepared.draws
        self._inputs = inputs_of(graph)
        self._pipe = pipe
        self._rank = dist.get_rank(pipe)
        self._own = plan.arrangement.stages_of(self._rank)
        sections = _sections(source)
        self._programs = {number: load_program(sections[number], path=path) for number in self._own}
        self._bundles = self._all_bundles()
        self._lent = self._all_lent()
        self._counter = _counting_program(prepared.graph, prepared.cut.counts, self._inputs)
        self._returned = [name for name in output_refs(self.graph) if name not in self._inputs]
        self._output = _output_program(self.graph, self._inputs, self._returned)
        self._flowing_for: tuple[tuple[bool, ...], list[bool]] = ((), [])
        self._parameters: list[nn.Parameter] | None = None

    # --- what passes --------------------------------------------------------------------------

    def _all_bundles(self) -> list[Bundle]:
        """What passes between ranks, by the stage that gives it."""
        rank_of = self.plan.arrangement.rank_of
        found = []
        for stage in self.stages:
            for rank in range(self.plan.arrangement.ranks):
                needing = [
                    other
                    for other in self.stages[stage.number + 1 :]
                    if rank_of(other.number) == rank and set(stage.gives) & set(other.arguments)
                ]
                if needing and rank != rank_of(stage.number):
                    wanted = {name for other in needing for name in other.arguments}
                    names = tuple(name for name in stage.gives if name in wanted)
                    found.append(Bundle(stage.number, rank, needing[0].number, names))
        return found

    def _all_lent(self) -> list[tuple[str, int, int]]:
        """Parameters that a rank uses and another stores: name, who stores it and who uses it."""
        rank_of = self.plan.arrangement.rank_of
        users = {
            (fqn, self.plan.homes.get(fqn, 0), rank_of(stage.number)): None
            for stage in self.stages
            for fqn in stage.graph.parameters.values()
        }
        return [lent for lent in users if lent[1] != lent[2]]

    def _flowing(self, root: nn.Module) -> list[bool]:
        """Whether a gradient flows into what each stage gives, for the parameters that are trained now."""
        if self._parameters is None:
            named = dict(root.named_parameters(remove_duplicate=False))
            names = [fqn for stage in self.stages for fqn in stage.graph.parameters.values()]
            self._parameters = [named[fqn] for fqn in names]
        trained = tuple([parameter.requires_grad for parameter in self._parameters])
        if self._flowing_for[0] != trained:
            of_name = iter(trained)
            found: list[bool] = []
            for stage in self.stages:
                own = [next(of_name) for _ in stage.graph.parameters]
                before = [
                    flows
                    for other, flows in zip(self.stages, found, strict=False)
                    if set(other.gives) & set(stage.arguments)
                ]
                found.append(any(own) or any(before))
            self._flowing_for = trained, found
        return self._flowing_for[1]

    def _look(self, meta: TensorMeta, symbols: Mapping[str, int], flows: bool) -> Look:
        shape = tuple(
            dim if isinstance(dim, int) else eval(dim.expr, {}, dict(symbols)) for dim in meta.shape
        )
        dtype = getattr(torch, meta.dtype)
        return Look(shape, dtype, flows and (dtype.is_floating_point or dtype.is_complex))

    # --- one call -----------------------------------------------------------------------------

    def __call__(
        self,
        rt: Runtime,
        root: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        *tensors: Tensor,
    ) -> Any:
        """What the forward returns for these inputs, on every rank of the unit."""
        inputs = dict(zip(self._inputs, tensors, strict=True))
        symbols = {name: inputs[leaf].shape[dim] for name, (leaf, dim) in self.graph.symbols.items()}
        count = self.microbatches_of(symbols)
        inputs |= self._drawn(symbols, rt.device)
        runtime = StageRuntime(rt.communicator, rt.device)
        runtime.microbatches = count
        runtime.counts = self._counted(rt, root, weights, constants, inputs)
        call = _Call(self, runtime, root, weights, constants, symbols)
        local = call.run(self._microbatches(inputs, count))
        return self._result(call, local, inputs)

    def microbatches_of(self, symbols: Mapping[str, int]) -> int:
        """Into how many microbatches a batch of that size is cut."""
        if self.cut.hindrance:
            return 1
        ((symbol, batch),) = symbols.items()
        for count in range(min(self.plan.microbatches, batch), 1, -1):
            if batch % count or batch // count < self.cut.at_least:
                continue
            part = {symbol: batch // count}
            if all(eval(size, {}, part) % number == 0 for size, number in self.plan.divisible):
                return count
        return 1

    def _drawn(self, symbols: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Masks for the whole batch: every rank draws all, as one process would, and keeps its own."""
        needed = {name for number in self._own for name in self.stages[number].arguments}
        found = {}
        for draw in self._draws:
            look = self._look(draw.meta, symbols, False)
            mask = F.dropout(torch.ones(look.shape, dtype=look.dtype, device=device), draw.p, training=True)
            if draw.name in needed:
                found[draw.name] = mask
        return found

    def _counted(
        self,
        rt: Runtime,
        root: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """How many samples of the whole batch count, for each mean over those."""
        if self._counter is None:
            return {}
        program, names = self._counter
        with torch.no_grad():
            values = program(rt, root, weights, constants, *[inputs[name] for name in names])
            return {
                count.name: sample_weights(target, weight, count.ignore_index).to(torch.float32)
                for count, (target, weight) in zip(self.cut.counts, values, strict=True)
            }

    def _microbatches(self, inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
        """The inputs of each microbatch."""
        found: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for name, tensor in inputs.items():
            placement = self.cut.placements.get(name, R)
            parts = [tensor] * count
            if count > 1 and placement.is_shard:
                parts = list(tensor.chunk(count, placement.dim))
            for one, part in zip(found, parts, strict=True):
                one[name] = part
        return found

    # --- results ------------------------------------------------------------------------------

    def _result(self, call: _Call, local: list[dict[str, Tensor]], inputs: Mapping[str, Tensor]) -> Any:
        owners = {
            name: self.plan.arrangement.rank_of(stage.number) for stage in self.stages for name in stage.gives
        }
        flowing = {name: call.flows[stage.number] for stage in self.stages for name in stage.gives}
        shared = [name for name in self._returned if name in owners]
        own = [
            self._joined(name, [one[name] for one in local]) if owners[name] == self._rank else None
            for name in shared
        ]
        looks = [
            self._look(
                self.graph.meta(name), call.symbols, flowing[name] and self.graph.meta(name).differentiable
            )
            for name in shared
        ]
        values = dict(
            zip(shared, call.passage.share(own, looks, [owners[name] for name in shared]), strict=True)
        )
        self._share_written(call)
        values |= {
            name: call.weights[fqn] for name, fqn in self.graph.buffers.items() if name in self._returned
        }
        values |= {name: call.constants[name] for name in self._returned if name in self.graph.constants}
        return self._output(
            call.runtime, call.root, {}, {}, *[{**inputs, **values}[name] for name in self._output_names]
        )

    @property
    def _output_names(self) -> list[str]:
        return [*self._inputs, *self._returned]

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        """The whole of a value that the microbatches have parts or summands of."""
        placement = self.cut.placements.get(name, R)
        if len(parts) == 1 or placement == R:
            return parts[0]
        if placement == P:
            return torch.stack(parts).sum(0)
        return _put_together(parts, placement)

    def _share_written(self, call: _Call) -> None:
        """Give all ranks the buffers that stages have written."""
        with torch.no_grad():
            for stage in self.stages:
                for fqn in stage.writes:
                    home = self.plan.arrangement.rank_of(stage.number)
                    dist.broadcast(call.weights[fqn], group=self._pipe, group_src=home)


def _put_together(parts: list[Tensor], placement: Placement) -> Tensor:
    if placement.groups == 1:
        return torch.cat(parts, placement.dim)
    grouped = [torch.unflatten(part, placement.dim, (placement.groups, -1)) for part in parts]
    return torch.cat(grouped, placement.dim + 1).flatten(placement.dim, placement.dim + 1)


class _Call:
    """One call of a pipeline on one rank.

    Attributes:
        passage: What it sends and receives.
        flows: Whether a gradient flows into what each stage gives.
        symbols: Sizes of the whole batch.
    """

    def __init__(
        self,
        program: PipelineProgram,
        runtime: StageRuntime,
        root: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        symbols: Mapping[str, int],
    ) -> None:
        self.program = program
        self.runtime = runtime
        self.root = root
        self.weights = weights
        self.constants = constants
        self.symbols = symbols
        self.flows = program._flowing(root)
        self.passage = Passage(Line(program._pipe, runtime.device))
        self._part = {name: size // runtime.microbatches for name, size in symbols.items()}

    def run(self, microbatches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """All stages of this rank on all microbatches, in GPipe's order; the values that they have then."""
        weights = _Borrowed(self.weights, self._borrow())
        for number in self.program._own:
            stage = self.program.stages[number]
            for index, values in enumerate(microbatches):
                self._receive(stage, index, values)
                arguments = [values[name] for name in stage.arguments]
                given = self.program._programs[number](
                    self.runtime, self.root, weights, self.constants, *arguments
                )
                values |= dict(zip(stage.gives, given, strict=True))
                self._send(stage, index, values)
        return microbatches

    def _tag(self, stage: int, microbatch: int) -> int:
        program = self.program
        most = 1 + max((len(other.gives) for other in program.stages), default=0)
        return len(program._lent) + (stage * self.runtime.microbatches + microbatch) * most

    def _looks(self, bundle: Bundle) -> list[Look]:
        graph, flows = self.program.graph, self.flows[bundle.stage]
        metas = [graph.meta(name) for name in bundle.names]
        return [self.program._look(meta, self._part, flows and meta.differentiable) for meta in metas]

    def _receive(self, stage: Stage, index: int, values: dict[str, Tensor]) -> None:
        for bundle in self.program._bundles:
            if bundle.rank == self.program._rank and bundle.consumer == stage.number:
                source = self.program.plan.arrangement.rank_of(bundle.stage)
                tag = self._tag(bundle.stage, index)
                found = self.passage.receive(self._looks(bundle), source, tag)
                values |= dict(zip(bundle.names, found, strict=True))

    def _send(self, stage: Stage, index: int, values: Mapping[str, Tensor]) -> None:
        for bundle in self.program._bundles:
            if bundle.stage == stage.number:
                tensors = [values[name] for name in bundle.names]
                self.passage.send(tensors, self._looks(bundle), bundle.rank, self._tag(stage.number, index))

    def _borrow(self) -> dict[str, Tensor]:
        """Parameters that other ranks store; their gradients go back there."""
        program = self.program
        named = dict(self.root.named_parameters(remove_duplicate=False)) if program._lent else {}
        found = {}
        for number, (fqn, home, user) in enumerate(program._lent):
            if program._rank not in (home, user):
                continue
            description = _logical(named[fqn])
            placement = program.plan.stored.get(fqn, R)
            shape = placement.local_shape(description.shape, self.runtime.size)
            look = Look(tuple(shape), description.dtype, named[fqn].requires_grad)
            if program._rank == home:
                self.passage.send([self.weights[fqn]], [look], user, number)
            else:
                (found[fqn],) = self.passage.receive([look], home, number)
        return found


def _logical(parameter: nn.Parameter) -> Tensor:
    """A tensor without storage that looks as a parameter does in one process."""
    part = getattr(parameter, "_part", None)
    return parameter if part is None else part.description


class _Borrowed(Mapping[str, Tensor]):
    """Weights of this rank, and those that it got from others."""

    def __init__(self, weights: Mapping[str, Tensor], borrowed: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._borrowed = borrowed

    def __getitem__(self, name: str) -> Tensor:
        found = self._borrowed.get(name)
        return self._weights[name] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


# --- programs beside the stages -------------------------------------------------------------------


def _whole_plan(graph: Graph) -> ProgramPlan:
    return plan_program(graph, size=1, policy="dp", costs=CostModel())


def _counting_program(
    graph: Graph, counts: Sequence[Count], inputs: Sequence[str]
) -> tuple[Program, list[str]] | None:
    """What makes the targets, and weights of classes, of means over samples that count."""
    if not counts:
        return None
    names = [name for count in counts for name in (count.target, count.weight) if name is not None]
    wanted = set(names)
    for op in reversed(graph.ops):
        if op.name in wanted:
            wanted |= set(op.operands())
    ops = [op for op in graph.ops if op.name in wanted]
    outputs = [(Ref(c.target), None if c.weight is None else Ref(c.weight)) for c in counts]
    own = [leaf for leaf in graph.inputs if leaf.name in inputs]
    made = replace(graph, inputs=own, ops=ops, outputs=outputs, parameters={}, guards=())
    return load_program(emit(made, _whole_plan(made))), inputs_of(made)


def _output_program(graph: Graph, inputs: Sequence[str], returned: Sequence[str]) -> Program:
    """What puts the forward's result together from its values."""
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
    return load_program(emit(made, _whole_plan(made)))

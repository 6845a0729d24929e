"""Run one call of a pipeline on one rank: compute its stages, and exchange values with other ranks.

`Call` runs microbatches in GPipe's order: all forward, and the user's backward later. `Turns` interleaves
forward and backward by torch's pipeline schedules, which keeps fewer microbatches in memory. The stages
determine the values that a rank sends and receives, so values may skip stages.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_nnscaler.codegen.emit import Program
from nnx_nnscaler.ir.graph import Graph, TensorMeta
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.pipeline.messages import RETURNING, Line, Look, Passage
from nnx_nnscaler.pipeline.picture import Timeline
from nnx_nnscaler.pipeline.stages import Stage
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan
from nnx_nnscaler.plan.schedules import BACKWARD, FORWARD
from nnx_nnscaler.rules.rule import outputs_of
from nnx_nnscaler.runtime.functions import Runtime


class StageRuntime(Runtime):
    """The runtime of one call.

    Attributes:
        microbatches: The number of microbatches of the batch.
        counts: The numbers of samples that count in the batch, by the names of operators that divide by them.
    """

    microbatches: int = 1
    counts: Mapping[str, Tensor]


class Bundle(NamedTuple):
    """The values that one stage sends to one rank.

    Attributes:
        stage: The stage that computes the values.
        rank: The rank that receives them.
        consumer: The first stage of that rank that needs one of them.
        names: The values.
    """

    stage: int
    rank: int
    consumer: int
    names: tuple[str, ...]


class Lineup:
    """The data that all calls of a pipeline share on one rank.

    Args:
        graph: The graph of a microbatch.
        plan: The plan.
        stages: The stages.
        programs: The programs of this rank's stages, by number.
        pipe: The ranks along the pipe; None if one rank has all stages.
        timeline: The recorder of this rank's actions; None for no measurement.

    Attributes:
        rank: The index of this rank along the pipe.
        own: The numbers of its stages.
        bundles: The values that pass between ranks.
        lent: The parameters that one rank uses and another stores: name, storing rank and using rank.
        most_given: A number above the outputs of any stage.
    """

    def __init__(
        self,
        graph: Graph,
        plan: PipelinePlan,
        stages: Sequence[Stage],
        programs: Mapping[int, Program],
        pipe: dist.ProcessGroup | None,
        timeline: Timeline | None = None,
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.stages = stages
        self.programs = programs
        self.pipe = pipe
        self.timeline = timeline
        self.rank = 0 if pipe is None else dist.get_rank(pipe)
        self.own = plan.arrangement.stages_of(self.rank)
        self.bundles = self._all_bundles()
        self.lent = self._all_lent()
        self.most_given = 1 + max((len(stage.gives) for stage in stages), default=0)
        self._flowing_for: tuple[tuple[bool, ...], list[bool]] = ((), [])
        self._parameters: list[nn.Parameter] | None = None
        self._reached: dict[frozenset[str], frozenset[str]] = {}

    def _all_bundles(self) -> list[Bundle]:
        """Return the values that pass between ranks, by the stage that computes them."""
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
        """Return the parameters that one rank uses and another stores: name, storing rank and using rank."""
        rank_of = self.plan.arrangement.rank_of
        users = {
            (fqn, self.plan.homes.get(fqn, 0), rank_of(stage.number)): None
            for stage in self.stages
            for fqn in stage.graph.parameters.values()
        }
        return [lent for lent in users if lent[1] != lent[2]]

    def reached(self, results: frozenset[str]) -> frozenset[str]:
        """Return the values and parameters with gradients, if these results of the forward have gradients."""
        if results not in self._reached:
            found = set(results)
            for op in reversed(self.graph.ops):
                passes = not isinstance(op.output, TensorMeta) or op.output.differentiable
                if passes and op.name in found:
                    found.update(op.operands())
            tied = {self.graph.parameters[name] for name in found & self.graph.parameters.keys()}
            found.update(name for name, fqn in self.graph.parameters.items() if fqn in tied)
            self._reached[results] = frozenset(found)
        return self._reached[results]

    def flowing(self, root: nn.Module) -> list[bool]:
        """Return True for each stage whose outputs carry gradients, with the present trained parameters."""
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


class Call:
    """One call of a pipeline on one rank.

    Attributes:
        lineup: The pipeline.
        runtime: The runtime of the programs.
        root: The user's module.
        weights: This rank's weights, and those that it borrows from other ranks.
        constants: The graph's constants.
        symbols: The sizes of the complete batch.
        own: This rank's stages.
        flows: The names of the values that carry gradients.
        passage: The messages with gradients.
        between: The messages between stages: `passage`, or one without gradients if these are sent
            separately.
        timeline: The recorder of actions; None unless this call is measured.
    """

    def __init__(
        self,
        lineup: Lineup,
        runtime: StageRuntime,
        root: nn.Module,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        symbols: Mapping[str, int],
        *,
        in_turns: bool,
    ) -> None:
        self.lineup = lineup
        self.runtime = runtime
        self.root = root
        self.constants = constants
        self.symbols = symbols
        self.own = [lineup.stages[number] for number in lineup.own]
        flowing = lineup.flowing(root)
        self.flows = {
            name
            for stage in lineup.stages
            for name in stage.gives
            if flowing[stage.number] and lineup.graph.meta(name).differentiable
        }
        self._line = Line(lineup.pipe, runtime.device)
        self.passage = Passage(self._line, lineup.reached, records=torch.is_grad_enabled())
        self.between = Passage(self._line, lineup.reached, records=False) if in_turns else self.passage
        timeline = lineup.timeline
        is_measured = timeline is not None and timeline.measures and torch.is_grad_enabled()
        self.timeline = timeline if is_measured else None
        self._part = {name: size // runtime.microbatches for name, size in symbols.items()}
        borrowed: Any = self._borrow(weights)
        self.weights: Mapping[str, Tensor] = ChainMap(borrowed, weights)  # type: ignore[arg-type] # only read

    def run(self, microbatches: list[dict[str, Tensor]]) -> None:
        """Run all stages of this rank on all microbatches, in GPipe's order; add their outputs."""
        for stage in self.own:
            for index, values in enumerate(microbatches):
                self.receive(stage, index, values)
                arguments = [values[name] for name in stage.arguments]
                with self.measured(FORWARD, stage.number, index):
                    given = self.compute(stage, self.weights, arguments)
                values |= dict(zip(stage.gives, given, strict=True))
                self.send(stage, index, values)
                if self.timeline is not None:
                    self.timeline.during_backward(BACKWARD, stage.number, index, given)
                    received = [values[name] for one in self._incoming(stage) for name in one.names]
                    self.timeline.ends_before([*received, self.passage.token])

    def measured(self, kind: str, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return a context that measures an action, if this call is measured."""
        if self.timeline is None:
            return nullcontext()
        return self.timeline.during(kind, stage, microbatch)

    def compute(
        self, stage: Stage, weights: Mapping[str, Tensor], arguments: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run one stage on one microbatch."""
        program = self.lineup.programs[stage.number]
        return list(program(self.runtime, self.root, weights, self.constants, *arguments))

    def receive(self, stage: Stage, index: int, values: dict[str, Tensor]) -> None:
        """Receive a stage's inputs from other ranks, unless an earlier stage of this rank received them."""
        for bundle in self._incoming(stage):
            found = self.between.receive(self._looks(bundle), self._giver(bundle), self._tag(bundle, index))
            values |= dict(zip(bundle.names, found, strict=True))

    def send(self, stage: Stage, index: int, values: Mapping[str, Tensor]) -> None:
        """Send a stage's outputs to other ranks."""
        for bundle in self._outgoing(stage):
            tensors = [values[name] for name in bundle.names]
            self.between.send(tensors, self._looks(bundle), bundle.rank, self._tag(bundle, index))

    def receive_gradients(self, stage: Stage, index: int) -> dict[str, list[Tensor]]:
        """Receive other ranks' gradients of a stage's outputs."""
        found: dict[str, list[Tensor]] = {}
        for bundle in self._outgoing(stage):
            looks = [look for look in self._looks(bundle) if self.between.returns(look)]
            tensors = self._line.receive(looks, bundle.rank, self._tag(bundle, index) + RETURNING)
            for look, tensor in zip(looks, tensors, strict=True):
                found.setdefault(look.name, []).append(tensor)
        return found

    def send_gradients(self, stage: Stage, index: int, gradients: dict[tuple[int, str], Tensor]) -> None:
        """Return the gradients of received values; the first stage of this rank that uses them calls it."""
        for bundle in self._incoming(stage):
            sent = []
            for look in self._looks(bundle):
                if self.between.returns(look):
                    gradient = gradients.pop((index, look.name), None)
                    if gradient is None:
                        gradient = torch.zeros(look.shape, dtype=look.dtype, device=self.runtime.device)
                    sent.append(gradient)
            self._line.send(sent, self._giver(bundle), self._tag(bundle, index) + RETURNING)

    def _incoming(self, stage: Stage) -> list[Bundle]:
        own = self.lineup.rank
        return [b for b in self.lineup.bundles if b.rank == own and b.consumer == stage.number]

    def _outgoing(self, stage: Stage) -> list[Bundle]:
        return [bundle for bundle in self.lineup.bundles if bundle.stage == stage.number]

    def _giver(self, bundle: Bundle) -> int:
        return self.lineup.plan.arrangement.rank_of(bundle.stage)

    def _tag(self, bundle: Bundle, microbatch: int) -> int:
        number = bundle.stage * self.runtime.microbatches + microbatch
        return len(self.lineup.lent) + number * self.lineup.most_given

    def _looks(self, bundle: Bundle) -> list[Look]:
        return [self.look(name, self._part) for name in bundle.names]

    def look(self, name: str, symbols: Mapping[str, int]) -> Look:
        """Return the description of a value for these sizes of the batch."""
        look = look_of(self.lineup.graph.meta(name), symbols, flows=name in self.flows)
        return look._replace(name=name)

    def _borrow(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Receive parameters that other ranks store; their gradients go back there."""
        lineup = self.lineup
        named = dict(self.root.named_parameters(remove_duplicate=False)) if lineup.lent else {}
        found = {}
        names = {fqn: name for name, fqn in lineup.graph.parameters.items()}
        for number, (fqn, home, user) in enumerate(lineup.lent):
            if lineup.rank not in (home, user):
                continue
            part = getattr(named[fqn], "_part", None)
            description = named[fqn] if part is None else part.description  # the logical shape
            placement = lineup.plan.stored.get(fqn, R)
            shape = placement.local_shape(description.shape, self.runtime.size)
            look = Look(tuple(shape), description.dtype, named[fqn].requires_grad, names[fqn])
            if lineup.rank == home:
                self.passage.send([weights[fqn]], [look], user, number)
            else:
                (found[fqn],) = self.passage.receive([look], home, number)
        return found


def look_of(meta: TensorMeta, symbols: Mapping[str, int], *, flows: bool) -> Look:
    """Return the description of a tensor for these sizes of the batch."""
    shape = tuple(dim if isinstance(dim, int) else eval(dim.expr, {}, dict(symbols)) for dim in meta.shape)
    dtype = getattr(torch, meta.dtype)
    return Look(shape, dtype, flows and (dtype.is_floating_point or dtype.is_complex))


def can_split(stage: Stage, flows: Set[str]) -> bool:
    """Return True if torch's split backward finds all gradients of a stage's weights.

    Its second half begins at the nodes that join weights with values from the stage's inputs. A value that
    depends on weights alone must reach one such node only. torch 2.13 counts a bias that two layers share
    twice, and loses a value that goes to another stage.

    Args:
        stage: The stage.
        flows: The names of the values that carry gradients.
    """
    graph = stage.graph
    depends = set(stage.arguments) & flows
    of_weights = set(graph.parameters)
    uses = Counter(name for name in stage.gives if name in flows)
    for op in graph.ops:
        operands = set(op.operands())
        uses.update(operands)
        if operands & depends and any(meta and meta.differentiable for meta in outputs_of(op)):
            depends.add(op.name)
        elif operands & of_weights:
            of_weights.add(op.name)
    given = of_weights & set(stage.gives)
    return not given and all(uses[name] <= 1 for name in of_weights)

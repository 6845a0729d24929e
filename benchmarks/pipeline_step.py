"""Pipelines: stages against the same cut by hand, the bubble against a replay, the cut against all others.

    python benchmarks/pipeline_step.py step      two processes: a step against torch.distributed.pipelining
    python benchmarks/pipeline_step.py step --schedule zbv      the same in another order; also 1f1b, ...
    python benchmarks/pipeline_step.py bubble    one process: the predicted bubble against a replay
    python benchmarks/pipeline_step.py cut       one process: the longest stage against an exhaustive search
    python benchmarks/pipeline_step.py draw      the pictures of docs/backends/pipelines.md
    python benchmarks/pipeline_step.py timeline  two processes: a picture of measured and predicted times

``step``: both sides have the same stages, order, microbatches and batches, and take turns step by step in
the same processes. Processor time is the sum over both ranks. The handwritten side uses `PipelineStage` and
torch's class of that schedule, with one module for each stage.

``bubble``: each stage of the plan runs alone, forward and backward for one microbatch; GPipe's order is
replayed with these times. ``cut``: an exhaustive search over all cuts between blocks finds the best one, by
predicted and by measured times of the blocks. It is measured beside the planner's cut, which may also lie
within a block.

Exit code 1 if a bar is missed: 1.02 of processor time, 10 % of the bubble, 5 % of the longest stage; 2 if the
sides do not compute the same result.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nnscaler_step import GPT, Lap
from pairs import compare
from processes import start_again
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

RANKS = 2
ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
BARS = {"step": 1.02, "bubble": 0.10, "cut": 1.05}
Step = Callable[[Tensor, Tensor], "Tensor | None"]
"""Trains on one batch and returns its loss, on ranks that have it."""


# --- a step ---------------------------------------------------------------------------------------


def ours(model: GPT, batch: tuple[Tensor, Tensor], arguments: argparse.Namespace) -> Step:
    """The engine, driven without Lightning."""
    from nnx_core.backend import ParallelContext
    from nnx_nnscaler.backend import NnScalerBackend
    from nnx_nnscaler.options import NnScalerOptions

    options = NnScalerOptions(
        policy="pp",
        pipeline_nmicros=arguments.microbatches,
        pipeline_scheduler=arguments.schedule,
        stage_cuts=[f"blocks.{first}" for first in starts(arguments)[1:]],
        gen_savedir=arguments.folder,
        timeline_file=arguments.timeline,
    )
    backend = NnScalerBackend(options)
    rank = dist.get_rank()
    backend.setup(
        ParallelContext(
            device=torch.device("cpu"), rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS
        )
    )
    backend.parallelize(model, lambda: (batch, {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backend.setup_optimizers(model, [optimizer])

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = backend.run_step(model, model, ids, labels)
        backend.backward(model, loss)
        backend.optimizer_step(optimizer, optimizer.step)
        optimizer.zero_grad()
        return loss.detach()

    return step


class Part(nn.Module):
    """A stage, as one writes it by hand."""

    def __init__(self, model: GPT, number: int, begins: Sequence[int]) -> None:
        super().__init__()
        bounds = [*begins, len(model.blocks)]
        self.first, self.last = number == 0, number == len(begins) - 1
        self.blocks = model.blocks[bounds[number] : bounds[number + 1]]
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids to activations, or those to logits."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def theirs(model: GPT, batch: tuple[Tensor, Tensor], arguments: argparse.Namespace) -> Step:
    """Return the step as a PyTorch user writes it."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    from nnx_nnscaler.options import SCHEDULES

    begins = starts(arguments)
    own = arrangement_of(arguments).stages_of(dist.get_rank())
    parts = nn.ModuleList(Part(model, number, begins) for number in own)
    stages: Any = [
        PipelineStage(part, number, len(begins), torch.device("cpu"))
        for number, part in zip(own, parts, strict=True)
    ]
    made: Any = get_schedule_class(SCHEDULES[arguments.schedule])
    schedule = made(
        stages[0] if issubclass(made, PipelineScheduleSingle) else stages,
        n_microbatches=arguments.microbatches,
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = [ids] if 0 in own else []
        target = {"target": labels, "losses": losses} if len(begins) - 1 in own else {}
        schedule.step(*inputs, **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def arrangement_of(arguments: argparse.Namespace) -> Any:
    """Return the ranks of the stages: the minimum number of stages for the schedule."""
    from nnx_nnscaler.options import V_SHAPED
    from nnx_nnscaler.plan.schedules import Arrangement

    each = 1 if arguments.schedule in ("gpipe", "1f1b", "zero_bubble") else 2
    return Arrangement(RANKS, each * RANKS, arguments.schedule in V_SHAPED)


def starts(arguments: argparse.Namespace) -> list[int]:
    """The first block of each stage."""
    stages = arrangement_of(arguments).stages
    return [arguments.layers * number // stages for number in range(stages)]


def measure_step(arguments: argparse.Namespace) -> int:
    """Let both sides take turns, in this process and the other one at once."""
    dist.init_process_group("gloo")
    ids, labels = batch = batch_of(arguments)
    steps = {}
    for side, build in (("ours", ours), ("theirs", theirs)):
        steps[side] = build(model_of(arguments), batch, arguments)
    rounds: list[dict[str, list[Lap]]] = []
    losses: dict[str, Tensor | None] = {}
    for _ in range(arguments.rounds):
        laps: dict[str, list[Lap]] = {side: [] for side in steps}
        for index in range(-arguments.warmup, arguments.steps):
            for side in list(steps)[:: 1 if index % 2 == 0 else -1]:
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                losses[side] = steps[side](ids, labels)
                times = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
                dist.all_reduce(times)
                if index >= 0:
                    laps[side].append(Lap(float(times[0]) / RANKS, float(times[1])))
        rounds.append(laps)
    has_loss = arrangement_of(arguments).rank_of(len(starts(arguments)) - 1) == dist.get_rank()
    code = report_step(rounds, losses, arguments) if has_loss else 0
    dist.barrier()
    dist.destroy_process_group()
    return code


def report_step(
    rounds: Sequence[dict[str, list[Lap]]], losses: dict[str, Tensor | None], arguments: argparse.Namespace
) -> int:
    """Print medians, the ratio of each round and of all pairs, and judge."""
    mine, other = losses["ours"], losses["theirs"]
    assert mine is not None
    assert other is not None
    if abs(float(mine) - float(other)) > 1e-4:
        print(f"The two sides do not compute the same: {losses}", file=sys.stderr)
        return 2
    print(
        f"{arguments.schedule}: GPT of {arguments.layers} layers, width {arguments.width}, "
        f"batch {arguments.batch} x {arguments.context} in {arguments.microbatches} microbatches, "
        f"{RANKS} ranks, {arguments.rounds} rounds of {arguments.steps} pairs of steps; "
        f"last losses {float(mine):.6f} and {float(other):.6f}"
    )
    for clock in ("cpu", "wall"):
        ratios = [
            statistics.median(getattr(lap, clock) for lap in laps["ours"])
            / statistics.median(getattr(lap, clock) for lap in laps["theirs"])
            for laps in rounds
        ]
        print(f"{clock:5}ratio of the medians of each round: {' '.join(f'{one:.3f}' for one in ratios)}")
    both = [[lap for laps in rounds for lap in laps[side]] for side in ("ours", "theirs")]
    ratio = compare(both[0], both[1], "cpu")
    compare(both[0], both[1], "wall")
    return judge("ratio of processor time", ratio, BARS["step"])


# --- the plan -------------------------------------------------------------------------------------


class Stages:
    """The stages of a pipeline, each of which runs alone in this process.

    Args:
        prepared: The graph of a microbatch.
        cuts: The first operators of the second and later stages.
        model: The model with the parameters.
        arguments: The command line.
    """

    def __init__(self, prepared: Any, cuts: Sequence[int], model: GPT, arguments: argparse.Namespace) -> None:
        from nnx_core.communicator import GroupCommunicator
        from nnx_nnscaler.codegen.emit import emit, load_program
        from nnx_nnscaler.pipeline.call import StageRuntime
        from nnx_nnscaler.pipeline.stages import make_stages
        from nnx_nnscaler.plan.planning import plan_program

        self.stages = make_stages(prepared.outline, cuts)
        self._programs = []
        for stage in self.stages:
            plan = plan_program(stage.graph, size=1, policy="dp")
            self._programs.append(load_program(emit(stage.graph, plan)))
        self._runtime = StageRuntime(GroupCommunicator(None))
        self._runtime.microbatches = arguments.microbatches
        tokens = torch.tensor(float(arguments.batch * arguments.context))
        self._runtime.counts = {count.name: tokens for count in prepared.cut.counts}
        self._model, self._weights = model, dict(model.named_parameters())
        self._inputs = [leaf.name for leaf in prepared.graph.inputs]
        self.forward: list[list[float]] = [[] for _ in self.stages]
        self.backward: list[list[float]] = [[] for _ in self.stages]

    def run(self, *batch: Tensor) -> None:
        """Run one microbatch through all stages and back, and note the time of each."""
        values = dict(zip(self._inputs, batch, strict=True))
        taken: list[dict[str, Tensor]] = []
        given: list[dict[str, Tensor]] = []
        for stage, program, times in zip(self.stages, self._programs, self.forward, strict=True):
            leaves = {name: _leaf(values[name]) for name in stage.arguments}
            start = time.process_time()
            made = program(self._runtime, self._model, self._weights, stage.graph.constants, *leaves.values())
            times.append(time.process_time() - start)
            taken.append(leaves)
            given.append(dict(zip(stage.gives, made, strict=True)))
            values |= given[-1]
        gradients: dict[str, Tensor] = {}
        for leaves, made, times in zip(taken[::-1], given[::-1], self.backward[::-1], strict=True):
            start = time.process_time()
            torch.autograd.backward(list(made.values()), [gradients.get(name) for name in made])
            times.append(time.process_time() - start)
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad

    def seconds(self) -> list[tuple[float, float]]:
        """The medians of each stage: forward and backward."""
        both = zip(self.forward, self.backward, strict=True)
        return [(statistics.median(there), statistics.median(back)) for there, back in both]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


class Planned:
    """A traced model and the predicted cost of its cuts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from nnx_core.communicator import GroupCommunicator
        from nnx_core.machine.calibration import calibrated
        from nnx_nnscaler.pipeline.outline import prepare
        from nnx_nnscaler.plan.cost import CostModel
        from nnx_nnscaler.trace import trace_forward

        self.arguments = arguments
        self.model, self.batch = model_of(arguments), batch_of(arguments)
        self.graph = trace_forward(self.model, self.batch, {})
        self.costs = CostModel(hardware=calibrated(GroupCommunicator(None), torch.device("cpu"), group=None))
        self.prepared = prepare(self.graph)
        self.prices = self.prepared.outline.costs(self.costs)

    def stages(self, cuts: Sequence[int]) -> Stages:
        """The stages of a cut."""
        return Stages(self.prepared, cuts, self.model, self.arguments)

    def measure(self, *several: Stages) -> None:
        """Run cuts in turn, in another order each time."""
        part = [tensor[: len(tensor) // self.arguments.microbatches] for tensor in self.batch]
        for index in range(-self.arguments.warmup, self.arguments.rounds * self.arguments.steps):
            if index == 0:
                for stages in several:
                    stages.forward = [[] for _ in stages.stages]
                    stages.backward = [[] for _ in stages.stages]
            for stages in several[:: 1 if index % 2 == 0 else -1]:
                stages.run(*part)


def measure_bubble(arguments: argparse.Namespace) -> int:
    """The bubble that the plan predicts, and that of a replay."""
    from nnx_nnscaler.pipeline.search import PipelineOptions, plan_pipeline
    from nnx_nnscaler.plan.schedules import Arrangement, order, simulate, waiting_share

    planned = Planned(arguments)
    worst = 0.0
    for ranks in (2, 4):
        options = PipelineOptions(Arrangement(ranks, ranks), arguments.microbatches)
        plan = plan_pipeline(planned.graph, options, costs=planned.costs)
        stages = planned.stages(plan.cuts)
        planned.measure(stages)
        forward, backward = zip(*stages.seconds(), strict=True)
        steps = simulate(order("gpipe", plan.arrangement, plan.microbatches), forward, backward)
        off = plan.bubble / waiting_share(steps) - 1
        worst = max(worst, abs(off))
        shown = ", ".join(f"{(there + back) * 1e3:.2f}" for there, back in stages.seconds())
        share = sum(forward) / (sum(forward) + sum(backward))
        print(
            f"{ranks} stages, {plan.microbatches} microbatches: predicted bubble {plan.bubble:.4f}, replayed "
            f"{waiting_share(steps):.4f}, off by {off:+.1%}; stages take {shown} ms a microbatch, of which "
            f"{share:.2f} forward"
        )
    return judge("the bubble is off by", worst, BARS["bubble"])


def measure_cut(arguments: argparse.Namespace) -> int:
    """The longest stage of the chosen cut, and of the best of all cuts between blocks."""
    from nnx_nnscaler.pipeline.cuts import choose_cuts

    planned = Planned(arguments)
    outline, predicted = planned.prepared.outline, planned.prices.seconds
    between = [outline.place_of_module(f"blocks.{number}") for number in range(arguments.layers)]
    between.append(outline.place_of_module("norm"))
    places = [0, *between, len(outline.ops)]
    pieces = planned.stages(between)
    planned.measure(pieces)
    by_model = [float(predicted[stop] - predicted[start]) for start, stop in pairwise(places)]
    by_clock = [there + back for there, back in pieces.seconds()]
    worst = 0.0
    for count in (2, 4, 8):
        chosen = choose_cuts(planned.prices, count)
        bounds = [0, *chosen, len(outline.ops)]
        model = max(float(predicted[stop] - predicted[start]) for start, stop in pairwise(bounds))
        best = [places[index] for index in best_cut(by_clock, count)[1]]
        ours, theirs = planned.stages(chosen), planned.stages(best)
        planned.measure(ours, theirs)
        clocks = [max(there + back for there, back in stages.seconds()) for stages in (ours, theirs)]
        ratios = [model / best_cut(by_model, count)[0], clocks[0] / clocks[1]]
        worst = max(worst, *ratios)
        begin, other = (", ".join(outline.ops[place].module for place in cuts) for cuts in (chosen, best))
        print(
            f"{count} stages, which begin with {begin} (best by blocks' times: {other}): the longest takes "
            f"{ratios[0]:.3f} of the best cut's by predicted times, {ratios[1]:.3f} by measured times "
            f"({clocks[0] * 1e3:.2f} and {clocks[1] * 1e3:.2f} ms a microbatch)"
        )
    return judge("the longest stage takes", worst, BARS["cut"])


def best_cut(pieces: Sequence[float], stages: int) -> tuple[float, tuple[int, ...]]:
    """Return the cuts with the shortest longest stage, after that stage's length."""
    return min(
        (max(sum(pieces[start:stop]) for start, stop in pairwise([0, *cuts, len(pieces)])), cuts)
        for cuts in combinations(range(1, len(pieces)), stages - 1)
    )


def draw_pictures(arguments: argparse.Namespace) -> int:
    """Four ranks under three schedules, as the published figures of a plain CPU have it."""
    from nnx_nnscaler.pipeline.picture import draw
    from nnx_nnscaler.pipeline.search import PipelineOptions, plan_pipeline
    from nnx_nnscaler.plan.cost import CostModel
    from nnx_nnscaler.plan.schedules import Arrangement
    from nnx_nnscaler.trace import trace_forward

    graph = trace_forward(model_of(arguments), batch_of(arguments), {})
    for schedule, stages in (("gpipe", 4), ("1f1b", 4), ("zbv", 8)):
        arrangement = Arrangement(4, stages, v_shaped=schedule == "zbv")
        options = PipelineOptions(arrangement, arguments.microbatches, schedule=schedule)
        plan = plan_pipeline(graph, options, costs=CostModel())
        path = ASSETS / f"pipeline_{schedule}.svg"
        path.write_text(draw(plan), encoding="utf-8")
        print(f"{path}: {plan.reason}")
    return 0


def draw_timeline(arguments: argparse.Namespace) -> int:
    """Draw two ranks under one schedule: the prediction, and below it the measurement."""
    from nnx_nnscaler.pipeline.picture import MEASURED, WARMUP, draw
    from nnx_nnscaler.plan.pipeline_plan import pipeline_plan_from_text

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder, arguments.timeline = folder, f"{folder}/timeline.json"
        batch = batch_of(arguments)
        step = ours(model_of(arguments), batch, arguments)
        for _ in range(WARMUP + MEASURED + 1):
            step(*batch)
        if dist.get_rank() == 0:
            text = next(Path(folder).rglob("plan.json")).read_text(encoding="utf-8")
            path = ASSETS / "pipeline_measured.svg"
            picture = draw(pipeline_plan_from_text(text), timeline=arguments.timeline)
            path.write_text(picture, encoding="utf-8")
            print(path)
        dist.barrier()
    dist.destroy_process_group()
    return 0


# --- both -----------------------------------------------------------------------------------------


def model_of(arguments: argparse.Namespace) -> GPT:
    """The same model for everyone."""
    torch.manual_seed(0)
    return GPT(
        layers=arguments.layers,
        width=arguments.width,
        vocabulary=arguments.vocabulary,
        context=arguments.context,
    )


def batch_of(arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The same batch for everyone."""
    torch.manual_seed(1)
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def judge(what: str, found: float, bar: float) -> int:
    """Print a result beside its bar; the exit code."""
    print(f"{what} {found:.3f}, bar {bar}", flush=True)
    return 0 if found <= bar else 1


WHAT = {
    "step": measure_step,
    "bubble": measure_bubble,
    "cut": measure_cut,
    "draw": draw_pictures,
    "timeline": draw_timeline,
}


def main() -> int:
    """Start the processes, or be one of them."""
    arguments = parse_arguments()
    if arguments.what in ("step", "timeline") and "LOCAL_RANK" not in os.environ:
        return start_again(RANKS)
    torch.set_num_threads(1)
    return WHAT[arguments.what](arguments)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=tuple(WHAT))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps in a round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="gpipe", help="of pipeline_scheduler, for step and timeline")
    parser.set_defaults(folder=tempfile.gettempdir(), timeline=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Compare the cost of plans with the cost model's predictions, and autodist with plans written by hand.

    python benchmarks/nnscaler_plans.py                 all models, two processes over gloo
    python benchmarks/nnscaler_plans.py gpt-256 mlp     some of them

Every plan trains the same model on the same global batch through the real backend, all of them in the same
processes of one run; they take turns over several rounds. The output has, for each plan, the processor time
of a step of rank 0 with all its threads (least and median), the prediction, and the peak of memory. autodist
is compared with the best plan written by hand for the same unit, by time; exit code 1 if it is above the
bar. The output also has the time of units of one rank, which share one global batch.

Memory is the memory of torch's allocator: all tensors that are alive before a step, and the highest sum of
the profiler's allocations and frees within the step. Buffers of kernels that do not come from the allocator,
and the interpreter, do not count; the model does not predict them either.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from nnscaler_step import GPT
from processes import start_again
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

if TYPE_CHECKING:
    from nnx_nnscaler.plan.policies import PolicyContext

RANKS = 2
SEED = 0

# --- the models -----------------------------------------------------------------------------------


class MLP(nn.Module):
    """Wide layers and few samples: most of the memory is parameters."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.back = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean square error of (batch, width)."""
        for up, down in zip(self.layers, self.back, strict=True):
            x = x + down(F.relu(up(x)))
        return F.mse_loss(self.norm(x), y)


class CNN(nn.Module):
    """Convolutions with batch norm, whose statistics span the global batch."""

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        widths = [3, channels, channels, 2 * channels, 2 * channels]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, stride=1 + (before != after and before > 3), bias=False)
            for before, after in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of images."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def gpt(width: int) -> nn.Module:
    """A GPT of four layers."""
    return GPT(layers=4, width=width, vocabulary=512, context=64)


def tokens(batch: int) -> tuple[Tensor, Tensor]:
    """Ids and the ids that follow."""
    ids = torch.randint(512, (batch, 65))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Model(NamedTuple):
    """A model and its global batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


MODELS = {
    "gpt-256": Model(lambda: gpt(256), lambda: tokens(8)),
    "gpt-32": Model(lambda: gpt(32), lambda: tokens(8)),
    "mlp": Model(lambda: MLP(width=512, layers=3), lambda: (torch.randn(32, 512), torch.randn(32, 512))),
    "cnn": Model(lambda: CNN(channels=32), lambda: (torch.randn(16, 3, 24, 24), torch.randint(10, (16,)))),
}

# --- the plans ------------------------------------------------------------------------------------


def replicate(context: PolicyContext) -> dict[str, str]:
    """Every rank does everything."""
    return dict.fromkeys(context.strategies, "replicate")


def megatron(context: PolicyContext) -> None:
    """Pairs of layers split as Megatron does: the first by columns, the second by rows; the rest is whole."""
    columns, rows = ("*.q", "*.k", "*.v", "*.up", "layers.*"), ("*.o", "*.down", "back.*")
    for op in context.flow.ops.values():
        context.only(op, lambda op, one: not context.splits_batch(op, one))
    for patterns, names in ((columns, ("column",)), (rows, ("row",))):
        for pattern in patterns:
            for op in context.matching(pattern):
                context.only(op, lambda _, one, names=names: one.name in names)  # type: ignore[misc]


class Written(NamedTuple):
    """A plan as a user requests it.

    Attributes:
        policy: The policy.
        ranks: Ranks of a unit. Units of one rank share the global batch.
        zero: Use ZeRO within a unit.
    """

    policy: Any
    ranks: int = RANKS
    zero: bool = False


PLANS = {
    "dp": Written("dp", ranks=1),
    "zero": Written("zero", ranks=1, zero=True),
    "data": Written("data"),
    "tp": Written("tp"),
    "zero-unit": Written("zero"),
    "replicate": Written(replicate),
    "megatron": Written(megatron),
    "autodist": Written("autodist"),
}

# --- one side -------------------------------------------------------------------------------------


@dataclass
class Side:
    """One plan in training.

    Attributes:
        step: Trains once.
        finish: Gives everything back.
        seconds: Predicted processor time of a step.
        memory: Predicted peak of a rank.
        laps: Measured processor time of each step.
        peak: Measured peak.
        loss: The first one, over all ranks.
    """

    step: Callable[[], Tensor]
    finish: Callable[[], None]
    seconds: float
    memory: int
    laps: list[float] = field(default_factory=list)
    peak: int = 0
    loss: float | None = None

    def is_like(self, other: Side) -> bool:
        """Return True if the losses are equal. Batch norm over a rank's share of the batch changes them."""
        return abs((self.loss or 0.0) - (other.loss or 0.0)) < 1e-4


def side(model: Model, written: Written) -> Side:
    """Set a plan up through the backend."""
    from nnx_core.backend import ParallelContext
    from nnx_nnscaler.backend import NnScalerBackend
    from nnx_nnscaler.options import NnScalerOptions

    torch.manual_seed(SEED)
    module = model.build()
    torch.manual_seed(SEED + 1)
    batch = model.batch()
    rank = dist.get_rank()
    if written.ranks == 1:
        batch = tuple(part.chunk(RANKS)[rank] for part in batch)  # type: ignore[assignment]
    backend = NnScalerBackend(
        NnScalerOptions(
            policy=written.policy, plan_ngpus=written.ranks, use_zero=written.zero or None, reuse="override"
        )
    )
    backend.setup(
        ParallelContext(
            device=torch.device("cpu"), rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS
        )
    )
    prediction = predicted_alone(module, batch, written) if written.ranks == 1 else None
    backend.parallelize(module, lambda: (batch, {}))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    backend.setup_optimizers(module, [optimizer])
    if prediction is None:
        prediction = backend._laid_out[module].programs.variants[0].plan.prediction  # type: ignore[union-attr]

    def step() -> Tensor:
        loss: Tensor = backend.run_step(module, module, *batch)
        backend.backward(module, loss)
        backend.optimizer_step(optimizer, optimizer.step)
        optimizer.zero_grad()
        return loss.detach()

    def finish() -> None:
        backend.unparallelize(module)
        backend.teardown()

    return Side(step, finish, prediction.time, prediction.memory)


def predicted_alone(module: nn.Module, batch: Any, written: Written) -> Any:
    """Return the prediction for units of one rank, which the backend does not plan."""
    from nnx_nnscaler.plan.cost import CostModel
    from nnx_nnscaler.plan.planning import plan_program
    from nnx_nnscaler.trace.forward import trace_forward

    graph = trace_forward(module, batch, {})
    costs = CostModel(hardware=measure_machine(fresh=False))
    return plan_program(graph, size=1, policy="dp", costs=costs, units=RANKS, zero=written.zero).prediction


# --- the measurement ------------------------------------------------------------------------------


def measure_machine(*, fresh: bool) -> Any:
    """The figures that predictions rest on: those that the backend takes."""
    from nnx_core.communicator import GroupCommunicator
    from nnx_core.machine.calibration import calibrated

    unit, device = GroupCommunicator(dist.group.WORLD), torch.device("cpu")
    return calibrated(unit, device, group=dist.group.WORLD, fresh=fresh)


def measure(arguments: argparse.Namespace) -> int:
    """All models, one after the other, in this process and the others at once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure_machine(fresh=True)  # as busy as it is now
    failures = 0
    for name in arguments.models or MODELS:
        failures += measure_model(name, arguments)
    dist.destroy_process_group()
    return 1 if failures else 0


def measure_model(name: str, arguments: argparse.Namespace) -> bool:
    """All plans of one model; whether autodist is above the bar."""
    sides = {plan: side_with_peak(MODELS[name], written) for plan, written in PLANS.items()}
    for turn in range(arguments.rounds + 1):
        for plan in list(sides)[:: 1 if turn % 2 else -1]:
            laps = [lap(sides[plan]) for _ in range(arguments.steps)]
            sides[plan].laps += laps if turn else []
    for one in sides.values():
        one.finish()
    return report(name, sides, arguments) if dist.get_rank() == 0 else False


def lap(one: Side) -> float:
    """Processor time of one step."""
    dist.barrier()
    start = time.process_time()
    loss = one.step()
    taken = time.process_time() - start
    if one.loss is None:
        dist.all_reduce(loss)
        one.loss = float(loss) / RANKS
    return taken


def side_with_peak(model: Model, written: Written) -> Side:
    """A plan in training, after a few steps, with the most bytes that are alive at once in one of them."""
    gc.collect()
    before = alive()
    one = side(model, written)
    for _ in range(3):
        lap(one)
    gc.collect()
    lasting = alive() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        one.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    one.peak = lasting + most
    return one


def alive() -> int:
    """Bytes of all tensors that Python knows, those aside that a trace left without storage."""
    from nnx_core.view.guard import local_mode

    storages = {}
    with local_mode():  # of parameters in parts, the parts
        for thing in gc.get_objects():
            kind = type(thing)  # `isinstance` would ask proxies
            if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def report(name: str, sides: dict[str, Side], arguments: argparse.Namespace) -> bool:
    """Print measurements and predictions, and judge."""
    print(f"\n{name}: {RANKS} processes, {arguments.rounds} rounds of {arguments.steps} steps of each plan")
    print("plan        least ms  median  predicted  error | peak MiB predicted  error")
    for plan, one in sides.items():
        note = "" if one.is_like(sides["replicate"]) else "  computes something else"
        least, median = min(one.laps) * 1e3, statistics.median(one.laps) * 1e3
        seconds, memory, peak = one.seconds * 1e3, one.memory / 2**20, one.peak / 2**20
        print(
            f"{plan:11} {least:8.2f} {median:7.2f} {seconds:10.2f} {seconds / least - 1:+6.0%} |"
            f" {peak:8.2f} {memory:9.2f} {memory / peak - 1:+6.0%}{note}"
        )
    like = {plan: one for plan, one in sides.items() if one.is_like(sides["replicate"])}
    alone = [plan for plan in like if PLANS[plan].ranks == 1]
    together = [plan for plan in like if plan not in ("autodist", *alone)]
    ratio = compare(sides, together, f"plan by hand of the same unit; bar {arguments.bar}")
    # Not judged: the unit decides how large the global batch is, so no plan may change it.
    compare(sides, alone, "that splits nothing, with units of one rank")
    return ratio > float(arguments.bar)


def compare(sides: dict[str, Side], plans: list[str], what: str) -> float:
    """Print and return autodist's least time over that of the best of some plans; 0.0 if there are none."""
    if not plans:
        return 0.0
    best = min(plans, key=lambda plan: min(sides[plan].laps))
    ratio = min(sides["autodist"].laps) / min(sides[best].laps)
    medians = [statistics.median(sides[plan].laps) for plan in ("autodist", best)]
    print(
        f"autodist takes {ratio:.3f}x the least time of {best} ({medians[0] / medians[1]:.3f}x by medians), "
        f"the best {what}",
        flush=True,
    )
    return ratio


def main() -> int:
    """Start the processes, or be one of them."""
    arguments = parse_arguments()
    if "LOCAL_RANK" in os.environ:
        return measure(arguments)
    return start_again(RANKS, KINETO_LOG_LEVEL="5")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each plan")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    parser.add_argument("--bar", type=float, default=1.10, help="the largest ratio that passes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Step time of the nnScaler engine against PyTorch's own equivalents.

    python benchmarks/nnscaler_step.py eager        one process:   nnscaler_dp         against plain PyTorch
    python benchmarks/nnscaler_step.py ddp          two processes: nnscaler_dp         against torch DDP
    python benchmarks/nnscaler_step.py zero         two processes: nnscaler_zero       against FSDP2's
                                                    fully_shard of each block
    python benchmarks/nnscaler_step.py tensor       two processes: tensor parallelism  against DTensor's
                                                    parallelize_module with the same shards

Both sides train the same GPT on the same batches, in the same processes of one run; they take turns over
several rounds, each side first in every other round. The output is medians and minima over all steps of the
processor time of rank 0 with all its threads, of the wall time, and their ratios; exit code 1 if the
ratio of the medians of processor time is above the bar of the issue, 2 if the two sides do not compute the
same result.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import start_again
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

PROCESSES = {"eager": 1, "ddp": 2, "zero": 2, "tensor": 2}
THEIRS = {
    "eager": "plain PyTorch",
    "ddp": "torch DDP",
    "zero": "fully_shard",
    "tensor": "parallelize_module",
}


class Lap(NamedTuple):
    """Seconds on the clock, and of processor time of this process with all its threads."""

    wall: float
    cpu: float


# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block whose query, key and value projections are apart, as DTensor needs them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, width) to the same shape."""
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """Predicts the next token; its forward returns the loss."""

    def __init__(self, *, layers: int, width: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of (batch, sequence) token ids."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# --- the sides ------------------------------------------------------------------------------------

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on one batch and returns its loss."""


def ours(
    model: GPT, batch: tuple[Tensor, Tensor], arguments: argparse.Namespace
) -> tuple[Step, Callable[[], object]]:
    """The engine, driven without Lightning."""
    from nnx_core.backend import ParallelContext
    from nnx_nnscaler.backend import NnScalerBackend
    from nnx_nnscaler.options import NnScalerOptions

    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    options = NnScalerOptions(policy="zero" if arguments.against == "zero" else "dp")
    if arguments.against == "tensor":
        options = NnScalerOptions(policy=same_shards, gen_savedir=tempfile.gettempdir())
    backend = NnScalerBackend(options)
    backend.setup(
        ParallelContext(
            device=torch.device("cpu"), rank=rank, world_size=world, local_rank=rank, local_world_size=world
        )
    )
    backend.parallelize(model, lambda: (batch, {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backend.setup_optimizers(model, [optimizer])

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = backend.run_step(model, model, ids, labels)
        backend.backward(model, loss)
        backend.optimizer_step(optimizer, optimizer.step)
        optimizer.zero_grad()
        return loss.detach()

    def finish() -> None:
        backend.unparallelize(model)
        backend.teardown()

    return step, finish


def same_shards(context: Any) -> None:
    """The shards of `tensor_parallel`, as a policy."""
    for name in ("q", "k", "v", "up"):
        context.pin(f"blocks.*.{name}", "column")
    for name in ("o", "down"):
        context.pin(f"blocks.*.{name}", "row")
    for name in ("tokens", "positions", "norm", "blocks.*.norm1", "blocks.*.norm2", "head"):
        context.pin(name, "replicate")


def theirs(
    model: GPT, batch: tuple[Tensor, Tensor], arguments: argparse.Namespace
) -> tuple[Step, Callable[[], object]]:
    """Return PyTorch's own equivalent."""
    if arguments.against == "ddp":
        forward: Callable[..., Any] = nn.parallel.DistributedDataParallel(model)
    elif arguments.against == "tensor":
        forward = tensor_parallel(model)
    elif arguments.against == "zero":
        for block in model.blocks:
            fully_shard(block)
        forward = fully_shard(model)
    else:
        forward = model
    # Lightning's strategies and torchtitan use the default, which on CPU is the loop over parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = forward(ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: None


def tensor_parallel(model: GPT) -> nn.Module:
    """Every projection of a block split as Megatron does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, columns = RowwiseParallel(), ColwiseParallel()
    for block in model.blocks:
        plan = {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows}
        parallelize_module(block, mesh, plan)
    return model


# --- the measurement ------------------------------------------------------------------------------


def main() -> int:
    """Start the processes, or be one of them."""
    arguments = parse_arguments()
    if "LOCAL_RANK" in os.environ:
        return measure(arguments)
    return start_again(PROCESSES[arguments.against])


def measure(arguments: argparse.Namespace) -> int:
    """Let both sides take turns, in this process and the others at once."""
    torch.set_num_threads(1)
    if PROCESSES[arguments.against] > 1:
        dist.init_process_group("gloo")
    laps: dict[str, list[list[Lap]]] = {"ours": [], "theirs": []}
    losses: dict[str, float] = {}
    for turn in range(arguments.rounds):
        for side in ("ours", "theirs")[:: 1 if turn % 2 == 0 else -1]:
            taken, losses[side] = train(ours if side == "ours" else theirs, arguments)
            laps[side].append(taken)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank != 0:
        return 0
    if abs(losses["ours"] - losses["theirs"]) > 1e-4:
        print(f"The two sides do not compute the same: {losses}", file=sys.stderr)
        return 2
    return report(laps, arguments)


def train(build: Callable[..., Any], arguments: argparse.Namespace) -> tuple[list[Lap], float]:
    """One short training by one side: the time of each step after warming up, and the last loss."""
    torch.manual_seed(0)
    model = GPT(
        layers=arguments.layers,
        width=arguments.width,
        vocabulary=arguments.vocabulary,
        context=arguments.context,
    )
    torch.manual_seed(dist.get_rank() if arguments.against in ("ddp", "zero") else 0)
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.context + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step, finish = build(model, (ids, labels), arguments)
    laps = []
    loss = torch.zeros(())
    for index in range(arguments.warmup + arguments.steps):
        if dist.is_initialized():
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(ids, labels)
        if index >= arguments.warmup:
            laps.append(Lap(time.perf_counter() - wall, time.process_time() - cpu))
    finish()
    return laps, float(loss)


def report(laps: dict[str, list[list[Lap]]], arguments: argparse.Namespace) -> int:
    """Print the medians, the ratio of each round and of all, and judge."""
    print(
        f"GPT of {arguments.layers} layers, width {arguments.width}, batch {arguments.batch} x "
        f"{arguments.context}, {PROCESSES[arguments.against]} processes, {arguments.rounds} rounds of "
        f"{arguments.steps} steps a side; against {THEIRS[arguments.against]}"
    )
    ratios = {}
    for clock in ("cpu", "wall"):
        times = {
            side: [[getattr(lap, clock) for lap in turn] for turn in turns] for side, turns in laps.items()
        }
        medians = {side: statistics.median(chain(*turns)) * 1e3 for side, turns in times.items()}
        rounds = [
            statistics.median(mine) / statistics.median(other)
            for mine, other in zip(times["ours"], times["theirs"], strict=True)
        ]
        least = {side: min(chain(*turns)) * 1e3 for side, turns in times.items()}
        ratios[clock] = medians["ours"] / medians["theirs"]
        print(
            f"{clock:5} median ms per step: ours {medians['ours']:8.2f}  theirs {medians['theirs']:8.2f}  "
            f"ratio {ratios[clock]:.3f}   rounds: {' '.join(f'{one:.3f}' for one in rounds)}\n"
            f"{clock:5} least  ms per step: ours {least['ours']:8.2f}  theirs {least['theirs']:8.2f}  "
            f"ratio {least['ours'] / least['theirs']:.3f}"
        )
    bar = arguments.bar or _bar(arguments)
    print(f"ratio of processor time {ratios['cpu']:.3f}, bar {bar}")
    return 0 if ratios["cpu"] <= bar else 1


def _bar(arguments: argparse.Namespace) -> float:
    if arguments.against == "tensor":
        return 0.4 if arguments.width <= 32 else 0.8
    return 1.02 if arguments.against == "eager" else 1.0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("against", choices=tuple(PROCESSES))
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    parser.add_argument("--steps", type=int, default=25, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument(
        "--bar", type=float, default=0.0, help="the largest ratio that passes; 0: the issue's"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Step time of fairscale_sharded on two processes against torch's DDP with ZeroRedundancyOptimizer.

    python benchmarks/fairscale_step.py            bar 1.1
    python benchmarks/fairscale_step.py --width 512 --rounds 2

Both do the same: whole parameters everywhere, gradients averaged, and each rank steps the parameters that it
owns and sends them to the other. Both sides train the same GPT on the same batches in the same two processes,
in turn, step by step. Printed are medians and minima over all steps of rank 0's processor time, of all its
threads, and of the time on the clock, and the median of the ratios of all pairs with its standard error.
Exit code 1 if that of processor time is above the bar, 2 if the weights of the two sides differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nnscaler_step import GPT, Lap
from pairs import compare
from torch import Tensor

from nnx_conformance.pool import free_port

RANKS = 2

Step = Callable[[Tensor, Tensor], None]
"""Trains on one batch."""


# --- the sides ------------------------------------------------------------------------------------


def ours(model: GPT) -> Step:
    """The engine, driven without Lightning."""
    from nnx_core.backend import ParallelContext
    from nnx_fairscale.options import ShardedOptions
    from nnx_fairscale.sharded import ShardedBackend

    backend = ShardedBackend(ShardedOptions())
    backend.setup(ParallelContext(device=torch.device("cpu"), rank=dist.get_rank(), world_size=RANKS))
    backend.parallelize(model, lambda: ((), {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backend.setup_optimizers(model, [optimizer])

    def step(ids: Tensor, labels: Tensor) -> None:
        loss: Tensor = backend.run_step(model, model, ids, labels)
        optimizer.zero_grad()
        backend.backward(model, loss)
        backend.optimizer_step(optimizer, optimizer.step)

    return step


def theirs(model: GPT) -> Step:
    """Return torch's own equivalent."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3
    )

    def step(ids: Tensor, labels: Tensor) -> None:
        loss: Tensor = parallel(ids, labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


SIDES: Mapping[str, Callable[[GPT], Step]] = {"ours": ours, "theirs": theirs}


# --- the measurement ------------------------------------------------------------------------------


def main() -> int:
    """Let both sides take turns on two processes."""
    arguments = parse_arguments()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    verdict = mp.get_context("spawn").Value("i", 0)
    mp.spawn(run, args=(arguments, verdict), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return int(verdict.value)


def run(rank: int, arguments: argparse.Namespace, verdict: object) -> None:
    """Run one process of the benchmark."""
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    pairs: list[dict[str, Lap]] = []
    same = True
    for _ in range(arguments.rounds):
        taken, is_same = train(arguments)
        pairs += taken
        same = same and is_same
    if rank == 0:
        verdict.value = report(pairs, arguments) if same else 2  # type: ignore[attr-defined]
        if not same:
            print("The two sides do not compute the same.", file=sys.stderr)
    dist.destroy_process_group()


def train(arguments: argparse.Namespace) -> tuple[list[dict[str, Lap]], bool]:
    """One short training by both sides: the times of each pair of steps, and whether weights are equal."""
    models = {side: make_model(arguments) for side in SIDES}
    steps = {side: build(models[side]) for side, build in SIDES.items()}
    source = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.context + 1), generator=source)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    pairs = []
    for index in range(arguments.warmup + arguments.steps):
        order = list(SIDES)[:: 1 if index % 2 == 0 else -1]
        pair = {side: timed(steps[side], ids, labels) for side in order}
        if index >= arguments.warmup:
            pairs.append(pair)
    one, other = (models[side].state_dict() for side in SIDES)
    return pairs, all(torch.equal(one[name], other[name]) for name in one)


def make_model(arguments: argparse.Namespace) -> GPT:
    """The model with which both sides begin."""
    torch.manual_seed(0)
    sizes = {name: getattr(arguments, name) for name in ("layers", "width", "vocabulary", "context")}
    return GPT(**sizes)


def timed(step: Step, ids: Tensor, labels: Tensor) -> Lap:
    """One step that both processes begin together, by the clock and in processor time of all threads."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step(ids, labels)
    return Lap(time.perf_counter() - wall, time.process_time() - cpu)


def report(pairs: Sequence[Mapping[str, Lap]], arguments: argparse.Namespace) -> int:
    """Print the ratios by both clocks, and judge the processor time."""
    print(
        f"fairscale_sharded, {RANKS} processes: GPT of {arguments.layers} layers, width {arguments.width}, "
        f"batch {arguments.batch} x {arguments.context}, {arguments.threads} threads, "
        f"{len(pairs)} pairs of steps; weights equal to the bit"
    )
    ours, theirs = ([pair[side] for pair in pairs] for side in ("ours", "theirs"))
    ratios = {clock: compare(ours, theirs, clock) for clock in ("cpu", "wall")}
    print(f"ratio of processor time {ratios['cpu']:.3f}, bar {arguments.bar}")
    return 0 if ratios["cpu"] <= arguments.bar else 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="models trained")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each side in a round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each process")
    parser.add_argument("--bar", type=float, default=1.1, help="the largest ratio that passes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

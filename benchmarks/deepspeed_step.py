"""A step of nnx-deepspeed against DeepSpeed's own loop, on the same model and config.

Both engines run in the same processes and take turns, step by step, so that a busy machine slows both. "ours"
is the engine as nnx_core drives it, without Trainer; "theirs" is ``engine(x)``, ``engine.backward``,
``engine.step``. The wall time of a step is that of the slowest rank, its processor time that of all ranks
together. The result is the median of the ratios of pairs of steps in processor time, which is the most stable
on a busy machine; wall time is printed too. Exits with 1 if a stage is over the bar, with 2 if
the losses of the two sides are not equal.

    python benchmarks/deepspeed_step.py --stages 1 2 3 --world-size 2 --width 512 --layers 8 --steps 40
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nnscaler_step import Lap
from pairs import compare
from torch import Tensor, nn

from nnx_conformance.pool import free_port

BAR = 1.03
WARMUP = 20
"""Steps that do not count; the ranks compare more in the first 16 (see `nnx_deepspeed.agreement`)."""
Step = Callable[[Tensor], float]
Pair = tuple[Lap, Lap]
"""One step of nnx and one of DeepSpeed."""


def main() -> int:
    """Measure every stage, print and judge."""
    arguments = parse_arguments()
    over = 0
    for stage in arguments.stages:
        pairs: list[Pair] = []
        for _ in range(arguments.rounds):
            taken, apart = measure(arguments, stage)
            if apart:
                print(f"stage {stage}: the losses of the two sides differ by {apart:.1e}", file=sys.stderr)
                return 2
            pairs += taken
        print(f"stage {stage}, {arguments.precision}: {len(pairs)} pairs of steps, losses equal to the bit")
        ours, theirs = zip(*pairs, strict=True)
        ratios = {clock: compare(ours, theirs, clock) for clock in Lap._fields}
        over += ratios["cpu"] > BAR
    print(f"{over} of {len(arguments.stages)} stages are over {BAR}x in processor time")
    return int(over > 0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40, help="timed pairs of steps in a round")
    parser.add_argument("--rounds", type=int, default=2, help="new processes for each")
    parser.add_argument("--precision", default="32-true", choices=("32-true", "bf16-mixed"))
    parser.add_argument("--profile", choices=("ours", "theirs"), help="also print one side's costs on rank 0")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, stage: int) -> tuple[list[Pair], float]:
    """Train by both sides in new processes: the times of each pair of steps; how far losses are apart."""
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (arguments, stage, free_port(), results), nprocs=arguments.world_size)
    pairs: list[Pair]
    pairs, apart = results.get()
    return pairs, apart


# --- in each rank ---------------------------------------------------------------------------------


def _rank(
    rank: int, arguments: argparse.Namespace, stage: int, port: int, results: mp.SimpleQueue[object]
) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(arguments.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.world_size)
    sides = {"ours": _ours(arguments, stage, rank), "theirs": _theirs(arguments, stage)}
    if arguments.profile and rank == 0:
        sides[arguments.profile] = _profiled(sides[arguments.profile])
    generator = torch.Generator().manual_seed(rank)
    laps: dict[str, list[Lap]] = {side: [] for side in sides}
    apart = 0.0
    for number in range(arguments.steps + WARMUP):
        x = torch.randn(arguments.batch, arguments.width, generator=generator)
        losses = {}
        for side in list(sides)[:: 1 if number % 2 else -1]:
            losses[side], lap = _timed(sides[side], x)
            laps[side].append(lap)
        apart = max(apart, abs(losses["ours"] - losses["theirs"]))
    ours, theirs = (_of_all_ranks(laps[side][WARMUP:]) for side in ("ours", "theirs"))
    if rank == 0:
        results.put((list(zip(ours, theirs, strict=True)), apart))
    dist.barrier()
    if arguments.profile is None:  # which is printed at exit
        os._exit(0)  # DeepSpeed's engines hold groups, whose threads abort an interpreter that is taken down


def _timed(step: Step, x: Tensor) -> tuple[float, Lap]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(x)
    return loss, Lap(time.perf_counter() - wall, time.process_time() - cpu)


def _of_all_ranks(laps: Sequence[Lap]) -> list[Lap]:
    everyones: list[list[Lap]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, list(laps))
    return [
        Lap(max(lap.wall for lap in of), sum(lap.cpu for lap in of)) for of in zip(*everyones, strict=True)
    ]


def _profiled(step: Step) -> Step:
    """The step; after the last one, where its time went."""
    import atexit
    import cProfile
    import pstats

    profile = cProfile.Profile()
    atexit.register(lambda: pstats.Stats(profile).sort_stats("tottime").print_stats(30))
    return lambda x: profile.runcall(step, x)


def _model(arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    width = arguments.width
    layers = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        for _ in range(arguments.layers)
    ]
    return nn.Sequential(*layers, nn.Linear(width, width))


def _loss(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def _ours(arguments: argparse.Namespace, stage: int, rank: int) -> Step:
    from nnx_core.backend import ParallelContext
    from nnx_deepspeed.backend import DeepSpeedBackend
    from nnx_deepspeed.options import DeepSpeedOptions

    backend = DeepSpeedBackend(DeepSpeedOptions(stage=stage))
    backend.setup(
        ParallelContext(
            device=torch.device("cpu"),
            rank=rank,
            world_size=arguments.world_size,
            precision=arguments.precision,
        )
    )
    module = _model(arguments)
    backend.parallelize(module, lambda: ((), {}))
    optimizer = _optimizer(module)
    backend.setup_optimizers(module, [optimizer])
    dtype = torch.bfloat16 if arguments.precision == "bf16-mixed" else torch.float32

    def step(x: Tensor) -> float:
        loss = _loss(backend.run_step(module, module, x.to(dtype)))
        backend.backward(module, loss)
        backend.optimizer_step(optimizer, optimizer.step)
        optimizer.zero_grad()
        return loss.item()

    return step


def _theirs(arguments: argparse.Namespace, stage: int) -> Step:
    import deepspeed

    from nnx_deepspeed.config import make_config
    from nnx_deepspeed.options import DeepSpeedOptions

    module = _model(arguments)
    half = arguments.precision == "bf16-mixed"
    config = make_config(DeepSpeedOptions(stage=stage), bf16=half)
    engine = deepspeed.initialize(
        model=module, optimizer=_optimizer(module), config=config, dist_init_required=False
    )[0]
    dtype = torch.bfloat16 if half else torch.float32

    def step(x: Tensor) -> float:
        loss = _loss(engine(x.to(dtype)))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


if __name__ == "__main__":
    raise SystemExit(main())

"""A step of nnx-deepspeed against DeepSpeed's own loop, on the same model and config.

Both engines live in the same processes and take turns, step by step, so that a busy machine slows both. Ours
is the engine as the core drives it, without Trainer; theirs is ``engine(x)``, ``engine.backward``,
``engine.step``. Prints each stage's median times, their ratio, and how far the losses are apart.

    python benchmarks/deepspeed_step.py --stages 1 2 3 --world-size 2 --width 512 --layers 8 --steps 40
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

BAR = 1.03


def main() -> int:
    """Measure every stage; 1 if one is over the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precision", default="32-true", choices=("32-true", "bf16-mixed"))
    arguments = parser.parse_args()
    over = 0
    for stage in arguments.stages:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (arguments, stage, _free_port(), results), nprocs=arguments.world_size)
        ours, theirs, ratio, apart = results.get()
        over += ratio > BAR
        print(
            f"stage {stage}: nnx {ours * 1e3:.2f} ms, DeepSpeed {theirs * 1e3:.2f} ms, ratio {ratio:.3f}, "
            f"losses differ by {apart:.1e}",
            flush=True,
        )
    print(f"{over} of {len(arguments.stages)} stages are over {BAR}x")
    return int(over > 0)


def _rank(
    rank: int, arguments: argparse.Namespace, stage: int, port: int, results: mp.SimpleQueue[object]
) -> None:
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(arguments.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.world_size)
    ours = _ours(arguments, stage, rank)
    theirs = _theirs(arguments, stage)
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    apart = 0.0
    for number in range(arguments.steps + 5):
        x = torch.randn(arguments.batch, arguments.width, generator=generator)
        pair = [("ours", ours), ("theirs", theirs)]
        losses = [_timed(step, x, times[name]) for name, step in (pair if number % 2 else pair[::-1])]
        apart = max(apart, abs(losses[0] - losses[1]))
    medians = [statistics.median(values[5:]) for values in times.values()]
    ratios = [a / b for a, b in zip(times["ours"][5:], times["theirs"][5:], strict=True)]
    if rank == 0:
        results.put((*medians, statistics.median(ratios), apart))
    dist.destroy_process_group()


def _timed(step: Callable[[Tensor], float], x: Tensor, times: list[float]) -> float:
    dist.barrier()
    began = time.perf_counter()
    loss = step(x)
    times.append(time.perf_counter() - began)
    return loss


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


def _ours(arguments: argparse.Namespace, stage: int, rank: int) -> Callable[[Tensor], float]:
    from nnx.backend import ParallelContext
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


def _theirs(arguments: argparse.Namespace, stage: int) -> Callable[[Tensor], float]:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure an optimizer's step over sharded parameters, and the bytes that owner ranks send for it.

    python benchmarks/optimizers.py                                    Muon and AdamW under four strategies
    python benchmarks/optimizers.py --strategies fsdp_auto --width 512

Every rank steps twice in turn: its shard of the model through the strategy's engine, and, on rank 0 only, an
unsharded copy as in a single process, with the same gradients. The output is the median, over all pairs, of
the ratio of all ranks' processor time to that of the copy. Beside it stand the bytes sent in a step and the
bytes of the formula: the other ranks' shards of each weight and each gradient go to its owner, and their
shards of each new weight come back. Muon steps the matrices; AdamW steps everything.

Exit code 1 if the bytes are not those of the formula.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_conformance.pool import WorkerPool

STRATEGIES = ("fsdp_auto", "colossalai", "nnscaler_zero", "nnscaler_tp")


class Layers(nn.Module):
    """Matrices with vectors between them."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Run one after the other."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def measure(strategy: str, name: str, arguments: argparse.Namespace) -> tuple[list[float], int, int]:
    """Step the parts and the whole in turns; the ratios, the bytes sent in a step, and the formula's."""
    import nnx
    from nnx_core.backend import ParallelContext

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made: Any = nnx.strategy(strategy)
    backend = made.backend
    rank, size = dist.get_rank(), dist.get_world_size()
    backend.setup(ParallelContext(device=torch.device("cpu"), rank=rank, world_size=size))
    module = Layers(arguments.layers, arguments.width)
    whole = copy.deepcopy(module)
    x = torch.randn(8, arguments.width)
    backend.parallelize(module, lambda: ((x,), {}))
    ours, theirs = _optimizer(name, module), _optimizer(name, whole)
    backend.setup_optimizers(module, [ours])
    ratios: list[float] = []
    before = 0
    for index in range(arguments.warmup + arguments.steps):
        before = backend._owner_ranks.bytes_sent
        loss = backend.run_step(module, lambda: module(x).square().mean())
        backend.backward(module, loss)
        whole(x).square().mean().backward()
        dist.barrier()
        spent = torch.tensor(_seconds(lambda: backend.optimizer_step(ours, ours.step)))
        dist.all_reduce(spent)
        alone = torch.tensor(_seconds(theirs.step) if rank == 0 else 0.0)
        dist.all_reduce(alone)
        ours.zero_grad()
        theirs.zero_grad()
        if index >= arguments.warmup:
            ratios.append(float(spent / alone))
    sent = torch.tensor(backend._owner_ranks.bytes_sent - before)
    dist.all_reduce(sent)
    formula = _formula(backend, ours)
    backend.unparallelize(module)
    backend.teardown()
    dist.destroy_process_group()
    return ratios, int(sent), formula


def _optimizer(name: str, module: nn.Module) -> Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(module.parameters(), lr=1e-3)
    return torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=1e-3)


def _seconds(step: Any) -> float:
    """Processor time of all threads."""
    start = time.process_time()
    step()
    return time.process_time() - start


def _formula(backend: Any, optimizer: Optimizer) -> int:
    """Return three times the bytes that ranks other than the owner hold, if no two hold the same."""
    owned = backend._owner_ranks._owned[optimizer]
    elements = sum(
        box.numel
        for route in owned.routes.values()
        for rank, boxes in enumerate(route.boxes)
        for box in boxes
        if rank != route.owner
    )
    return 3 * 4 * elements


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args(given)


def main() -> int:
    """Measure, print and judge."""
    arguments = parse_arguments()
    is_right = True
    with WorkerPool(arguments.ranks) as pool:
        for strategy in arguments.strategies:
            for name in ("Muon", "AdamW"):
                ratios, sent, formula = pool.run(
                    measure, strategy, name, arguments, world_size=arguments.ranks
                )[0]
                quartiles = statistics.quantiles(ratios, n=4)
                print(
                    f"{strategy:14} {name:6} processor time of {arguments.ranks} ranks / one process: "
                    f"{quartiles[1]:5.2f} ({quartiles[0]:.2f} to {quartiles[2]:.2f}); "
                    f"bytes sent {sent:9,}, formula {formula:9,}",
                    flush=True,
                )
                is_right &= sent == formula
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

"""Step time of Lite against the plain PyTorch loop and against Fabric, all on one process.

    python benchmarks/lite_step.py

The three sides train equal models on the same batches in one process and take turns step by step, each
going first equally often, so that other work on the machine affects all of them. The result is in
processor time: a ratio is the median, over all turns, of one side's step over the other's of the same turn.
A second, tiny model, whose step is little more than Python, gives the overhead in microseconds. Exit code 1
if a ratio is above its bar, 2 if the losses differ, because then the sides did different work.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nnx_lite import LightningLite

SIDES = {"plain": "plain PyTorch loop", "fabric": "Fabric", "lite": "nnx.Lite"}
Turns = dict[str, list[float]]


class Model(nn.Module):
    """Blocks of linear layers; the forward returns the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        hidden = batch
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return (hidden - batch.roll(1, dims=1)).square().mean()


class Batches(Dataset[Tensor]):
    """Samples that the loader puts together."""

    def __init__(self, length: int, width: int) -> None:
        self.samples = torch.randn(length, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


class Size(NamedTuple):
    """The settings of a model and its batches."""

    width: int
    layers: int
    batch: int


class Lite(LightningLite):
    """One side, and the place where all sides take their turns."""

    def run(self, size: Size, turns: int, warmup: int) -> tuple[Turns, dict[str, float]]:
        """Processor seconds of each step by side, and the last losses."""
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        steps: dict[str, Callable[[], Tensor]] = {
            "plain": plain_side(size),
            "fabric": side_of(fabric, size),
            "lite": side_of(self, size),
        }
        return take_turns(steps, turns, warmup)


def parts(size: Size) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Tensor]]:
    """Equal ones for every side."""
    torch.manual_seed(0)
    model = Model(size.width, size.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader(Batches(8 * size.batch, size.width), batch_size=size.batch)


def plain_side(size: Size) -> Callable[[], Tensor]:
    """A step of the plain loop."""
    model, optimizer, loader = parts(size)
    batches = endless(loader)

    def step() -> Tensor:
        batch = next(batches)
        optimizer.zero_grad()
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def side_of(lite: Any, size: Size) -> Callable[[], Tensor]:
    """A step of the same loop in Fabric, or in Lite."""
    model, optimizer, loader = parts(size)
    model, optimizer = lite.setup(model, optimizer)
    batches = endless(lite.setup_dataloaders(loader))

    def step() -> Tensor:
        batch = next(batches)
        optimizer.zero_grad()
        loss: Tensor = model(batch)
        lite.backward(loss)
        optimizer.step()
        return loss

    return step


def endless(loader: Any) -> Iterator[Tensor]:
    """The loader's batches, epoch after epoch."""
    while True:
        yield from loader


def take_turns(
    steps: dict[str, Callable[[], Tensor]], turns: int, warmup: int
) -> tuple[Turns, dict[str, float]]:
    """Let every side take a step per turn, another one first each time."""
    names = list(steps)
    orders = cycle([names, names[1:] + names[:1], names[2:] + names[:2]])
    taken: Turns = {name: [] for name in names}
    losses: dict[str, float] = {}
    gc.collect()
    gc.disable()  # a collection would fall on whoever is at it
    for turn in range(warmup + turns):
        for name in next(orders):
            before = time.process_time_ns()
            loss = steps[name]()
            after = time.process_time_ns()
            losses[name] = loss.item()
            if turn >= warmup:
                taken[name].append((after - before) / 1e9)
    gc.enable()
    return taken, losses


def main() -> int:
    """Measure, print, judge."""
    given = parse_arguments()
    torch.set_num_threads(1)
    real = Size(given.width, given.layers, given.batch)
    taken, losses = Lite(accelerator="cpu", devices=1).run(real, given.turns, given.warmup)
    if len(set(losses.values())) != 1:
        print(f"The sides do not compute the same: last losses {losses}", file=sys.stderr)
        return 2
    tiny, _ = Lite(accelerator="cpu", devices=1).run(Size(8, 1, 2), 10 * given.turns, given.warmup)
    print(
        f"{real.layers} linear layers of width {real.width}, batch {real.batch}, one process, one thread; "
        f"{given.turns} turns, equal losses"
    )
    print(f"{'processor time, median':24}{'ms per step':>12}{'µs per step, tiny model':>26}")
    for side, label in SIDES.items():
        print(f"  {label:22}{1e3 * statistics.median(taken[side]):12.3f}", end="")
        print(f"{1e6 * statistics.median(tiny[side]):26.1f}")
    bars = {"plain": given.bar_plain, "fabric": given.bar_fabric}
    passed = [judge(taken, tiny, other, bar) for other, bar in bars.items()]
    return int(not all(passed))


def judge(taken: Turns, tiny: Turns, other: str, bar: float) -> bool:
    """Print the ratio to one other side, and say whether it is within the bar."""
    ratios = [a / b for a, b in zip(taken["lite"], taken[other], strict=True)]
    ratio, error = statistics.median(ratios), error_of_median(ratios)
    added = statistics.median(a - b for a, b in zip(tiny["lite"], tiny[other], strict=True))
    verdict = "within" if ratio <= bar else "ABOVE"
    print(
        f"nnx.Lite over {SIDES[other]}: ratio {ratio:.4f} ± {error:.4f}, {verdict} the bar {bar}; "
        f"{1e6 * added:+.1f} µs a step"
    )
    return ratio <= bar


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of a median, from the middle half of the values."""
    lower, _, upper = statistics.quantiles(values, n=4)
    return 1.25 * (upper - lower) / 1.35 / math.sqrt(len(values))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=400, help="timed steps of each side (default: 400)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them that are not timed")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--bar-plain", type=float, default=1.02, help="largest ratio to the plain loop")
    parser.add_argument("--bar-fabric", type=float, default=1.005, help="largest ratio to Fabric")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

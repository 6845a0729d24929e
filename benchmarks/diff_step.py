"""The time of a step that ``nnx diff`` records, in multiples of the same step without a record.

    python benchmarks/diff_step.py                # MLP, CNN and GPT of realistic width, in one process
    python benchmarks/diff_step.py --steps 9 --models GPT

Both sides take turns, step by step, in one process and one thread. The numbers are medians, without the first
step of each side, which makes tables of signs. Exit code 1 if recording takes more than 3 times as long.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import nnx

LIMIT = 3.0


class GPT(nn.Module):
    """A causal transformer."""

    def __init__(self, *, width: int = 384, depth: int = 4, words: int = 8192, length: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next words."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.embed(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.blocks(y, mask=mask, is_causal=True))


def mlp() -> nn.Module:
    """Return three layers of width 1024 for images of 784 pixels."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def cnn() -> nn.Module:
    """Return three convolutions for images of 32 x 32 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(128, 256, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(256, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP": (mlp, lambda: (torch.randn(128, 784), torch.randint(0, 10, (128,)))),
    "CNN": (cnn, lambda: (torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))),
    "GPT": (GPT, lambda: (torch.randint(0, 8192, (8, 128)), torch.randint(0, 8192, (8, 128)))),
}


def train(model: nn.Module, batches: Iterable[Any], to: str) -> Iterator[None]:
    """Train by AdamW, with a record if there is a directory for one; yield after each step."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    recording = nnx.record(model, optimizer, to=to) if to else None
    for x, y in batches if recording is None else recording.batches(batches):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        (loss if recording is None else recording.loss(loss)).backward()
        optimizer.step()
        yield


def measure(name: str, steps: int) -> float:
    """Print the median step of both sides; return their ratio."""
    build, sample = MODELS[name]
    batches, times = [sample() for _ in range(steps + 1)], {"plain": list[float](), "recorded": list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        sides = {"plain": train(build(), batches, ""), "recorded": train(build(), batches, folder)}
        for _ in range(steps + 1):
            for side, run in sides.items():
                started = time.perf_counter()
                next(run)
                times[side].append(time.perf_counter() - started)
    plain, recorded = (median(values[1:]) for values in times.values())
    millions = sum(p.numel() for p in build().parameters()) / 1e6
    ratio = recorded / plain
    print(
        f"{name}: {millions:.1f} million parameters, {plain * 1e3:.0f} ms, recorded {recorded * 1e3:.0f} ms: "
        f"{ratio:.2f} times",
        flush=True,
    )
    return ratio


def main() -> int:
    """Measure; return 1 if recording takes too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    return int(max(measure(name, given.steps) for name in given.models) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

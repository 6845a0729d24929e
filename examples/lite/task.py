"""The training task of all four stages: a model that returns its loss, a dataset, and the settings.

A global batch has the same samples in every stage and on any number of processes, so that losses can be
compared. This module owns the task and the command line; it never imports Lightning.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["GLOBAL_BATCH", "LEARNING_RATE", "SEED", "MyDataset", "MyModel", "arguments", "show"]

GLOBAL_BATCH = 12
"""Samples of one optimizer step, over all processes together."""
LEARNING_RATE = 0.05
SEED = 1234


class MyModel(nn.Module):
    """Learns to shift and bend a vector; the forward returns the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))

    def forward(self, batch: Tensor) -> Tensor:
        """The mean squared error of a batch."""
        return nn.functional.mse_loss(self.layers(batch), batch.roll(1, dims=1).sin())


class MyDataset(Dataset[Tensor]):
    """Ninety-six vectors, the same ones each time."""

    def __init__(self, length: int = 96) -> None:
        self.samples = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def arguments(description: str | None) -> argparse.Namespace:
    """The command line that the stages share."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--epochs", dest="num_epochs", type=int, default=2, help="epochs (default: 2)")
    parser.add_argument("--devices", type=int, default=1, help="processes, each on the CPU (default: 1)")
    parser.add_argument("--strategy", default="auto", help="nnx's name or Lightning's")
    return parser.parse_args()


def show(losses: Sequence[Any]) -> None:
    """Print the loss of the first step and of the last ones."""
    print(f"{len(losses)} steps:", f"{losses[0]:.6f} ...", *(f"{loss:.6f}" for loss in losses[-3:]))

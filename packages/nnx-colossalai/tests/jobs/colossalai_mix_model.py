"""A small model with many special cases, recipes for training it, and fingerprints of the outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

VOCABULARY, LENGTH, SAMPLES, STEPS = 11, 5, 3, 4
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SCALE = 2.0**10
Digest = dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """The training settings, for any tiers.

    Attributes:
        precision: Lightning's name of the precision.
        optimizer: ``adamw``, ``adam`` or ``momentum``.
        clip: The clipping mode: ``norm``, ``value`` or none.
        accumulate: The micro batches of a step.
        overflow: Let the loss of one step overflow, so that the step is skipped.
        even: Each rank of two holds a multiple of 16 elements of every parameter.
    """

    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    clip: str | None = None
    accumulate: int = 1
    overflow: bool = False
    even: bool = False


class MixBlock(nn.Module):
    """A residual layer with some frozen and some unused parameters.

    Args:
        width: The width of the layer.
        inner: The width in its middle.
        frozen: Freeze its second linear layer.
        unused: Add a layer that no forward calls.
    """

    def __init__(self, width: int, inner: int, *, frozen: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.down.requires_grad_(not frozen)
        if unused:
            self.spare = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MixNet(nn.Module):
    """Blocks between an embedding and a head that share their weight, a frozen layer, a scalar, a buffer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(11)
        width, inner, words = (32, 96, 64) if recipe.even else (8, 25, VOCABULARY)
        self.embed = nn.Embedding(words, width)
        self.still = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(
            MixBlock(width, inner, frozen=number == 1, unused=number == 2) for number in range(4)
        )
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.tensor([0.25]))

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        x = self.still(self.embed(tokens)) * scale + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(recipe: Recipe, step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return the same batch for every caller."""
    random = torch.Generator().manual_seed(1000 * step + 100 * rank + micro)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=random)
    # One rank's overflow is everyone's.
    overflows = recipe.overflow and step == 1 and rank == 0
    return tokens, torch.tensor(float("inf") if overflows else 1.0)


def make_optimizer(recipe: Recipe, parameters: Sequence[nn.Parameter], **more: Any) -> Optimizer:
    """Over two groups, of which one decays."""
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **more)
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    return kinds[recipe.optimizer](groups, lr=0.01, **more)


def lower_rates(optimizer: Optimizer) -> None:
    """Lower the learning rates as a scheduler does after a step, which may still run in the background."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.75 - 0.25 * number


def autocast(recipe: Recipe) -> Any:
    """As Lightning's precision plugin enters it around a step."""
    dtype = DTYPES[recipe.precision]
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def digest(tensors: Mapping[str, Tensor]) -> Digest:
    """A fingerprint of every tensor's bits."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }


def states_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state, by the parameter's name and its own."""
    return {
        f"{names[parameter]}/{key}": whole(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def whole(tensor: Tensor) -> Tensor:
    """Of all ranks."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class EvenNet(nn.Module):
    """Layers whose elements every world size divides, all of them trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8 * number, bias=False) for number in (1, 2, 1))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[:, :8]
        return self.head(x).square().mean()

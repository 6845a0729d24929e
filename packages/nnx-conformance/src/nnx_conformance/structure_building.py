"""The modules of the group `structure` that are built in unusual ways, or at unusual times."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import wrap

from nnx_conformance.task import BLOCKS, FEATURES, WIDTH, Block, Plain, Task

__all__ = [
    "BuiltLate",
    "BuiltLateOnMeta",
    "BuiltLateSharded",
    "EarlyOptimizer",
    "GenericRoot",
    "Reset",
    "Unseeded",
    "Wrapped",
]

T = TypeVar("T")


class BuiltLate(Plain):
    """Is built in `configure_model`, guarded as Lightning asks for.

    Attributes:
        calls: How often the hook was called.
    """

    def __init__(self, task: Task) -> None:
        self.calls = 0
        super().__init__(task)

    def build(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        """The plain layers, with the same weights as ever."""
        self.calls += 1
        if hasattr(self, "head"):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.task.seed)
            self.build_late()

    def build_late(self) -> None:
        """Create the layers."""
        super().build()


class BuiltLateSharded(BuiltLate):
    """Is built in `configure_sharded_model`, the hook's older name."""

    configure_sharded_model = BuiltLate.configure_model
    configure_model = Plain.configure_model


class Wrapped(BuiltLate):
    """Wraps its blocks with `wrap()`, which means something to some strategies and nothing to others."""

    def build_late(self) -> None:
        """The same layers as the plain module, in the same order."""
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, FEATURES)


class _Fixed(nn.Module):
    """A layer whose weights are known without chance, and a buffer that it computes with."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(after, before))
        self.bias = nn.Parameter(torch.empty(after))
        self.scale: Tensor
        self.register_buffer("scale", torch.empty(after))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for tensor, step in ((self.weight, 0.37), (self.bias, 0.11), (self.scale, 0.05)):
                values = torch.arange(tensor.numel(), device=tensor.device) * step
                tensor.copy_(torch.cos(values).reshape(tensor.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.scale


class Reset(Plain):
    """Layers that `reset_parameters` fills with the same values every time, also when built on `meta`."""

    def build(self) -> None:
        """Two layers and a norm."""
        self.enter = _Fixed(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = _Fixed(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.leave(torch.tanh(self.norm(self.enter(x))))  # type: ignore[no-any-return]


class BuiltLateOnMeta(Reset):
    """Is built on the meta device in `configure_model`; it is the strategy's to give it values."""

    def build(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        """The layers, without values."""
        if not hasattr(self, "leave"):
            with torch.device("meta"):
                super().build()


class Unseeded(Plain):
    """Starts from other weights and buffers on each rank, as where nobody called `seed_everything`."""

    def build(self) -> None:
        """The plain layers, and an offset that is not trained."""
        torch.manual_seed(self.task.seed + int(os.environ.get("RANK", "0")))
        super().build()
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """The plain output, with the offset."""
        return super().forward(x) + self.offset


class EarlyOptimizer(Plain):
    """Makes its optimizer before anything is distributed."""

    def build(self) -> None:
        """The plain layers, and an optimizer over them."""
        super().build()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def configure_optimizers(self) -> Any:
        """That one."""
        return self.early


class GenericRoot(Generic[T], Plain):
    """A root whose class has another memory layout than most."""

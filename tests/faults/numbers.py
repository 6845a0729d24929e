"""Faults in the numbers of training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from faults import EVERYTHING, Fault
from nnx_tiny.backend import TinyBackend


class SummedGradients(TinyBackend):
    """Sums gradients over the ranks instead of averaging them."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * self.context.world_size, *args, **kwargs)


FAULTS = [
    Fault(
        name="gradients summed, not averaged",
        target="faults.numbers:SummedGradients",
        caught_by="losses_float64",
        also=EVERYTHING,
    ),
]

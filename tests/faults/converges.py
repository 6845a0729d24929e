"""Faults that the checks of the group `converges` catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from faults import EVERYTHING, fault
from nnx_tiny.backend import TinyBackend

__all__ = ["FAULTS"]


class ReplicasLeftApart(TinyBackend):
    """Averages no gradients, so that each rank ends with weights of its own."""

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        yield

    def parallelize(self, module: nn.Module, sample: object) -> Any:
        self._averaging = False
        return super().parallelize(module, sample)


class HardlyTrained(TinyBackend):
    """Makes each gradient a thousand times smaller; all ranks do it alike."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * 1e-3, *args, **kwargs)


FAULTS = [
    fault("replicas left apart", ReplicasLeftApart, "loss_falls_as_in_one_process", *EVERYTHING),
    fault("gradients vanish on all ranks", HardlyTrained, "loss_falls_as_in_one_process", *EVERYTHING),
]

"""Engines that forget to average some gradients: how most faults of structure show."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from nnx_tiny.backend import TinyBackend

__all__ = ["Forgets"]


class Forgets(TinyBackend):
    """Averages the gradients of the parameters that it knows of, each for itself."""

    def known(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """The parameters that are not forgotten."""
        raise NotImplementedError

    @override
    def backward(self, module: nn.Module, loss: Tensor, *args: object, **kwargs: object) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        for parameter in self.known(module):
            if self._averaging and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size

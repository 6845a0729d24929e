"""The engine: plain data parallelism. State, clipping and optimizers are inherited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from nnx_core import Backend
from nnx_tiny.averaging import average_gradients, take_from_rank_zero
from nnx_tiny.options import TinyOptions

__all__ = ["TinyBackend"]


class TinyBackend(Backend[TinyOptions]):
    """Data parallelism: the model is replicated; after each backward the gradients are averaged."""

    Options = TinyOptions
    reduces_in_backward = True
    _averaging = True

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        """Move the module to the device and start all ranks from rank 0's values."""
        module.to(self.context.device)
        if self.context.world_size > 1:
            take_from_rank_zero((*module.parameters(), *module.buffers()))
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Do nothing, because `parallelize` changed no module."""
        return {}

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Accumulate gradients locally; the next backward averages the sum."""
        self._averaging = False
        try:
            yield
        finally:
            self._averaging = True

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients and average them."""
        super().backward(module, loss, *args, **kwargs)
        if self._averaging and self.context.world_size > 1:
            average_gradients(module, bucket_megabytes=self.options.bucket_megabytes)

"""The engine: plain data parallelism, in the few calls of the contract that it needs.

Parameters stay what they are on the user's own module, so everything that has to do with state,
clipping and optimizers is inherited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import nnx
from nnx_tiny.options import TinyOptions

__all__ = ["TinyBackend"]


class TinyBackend(nnx.Backend[TinyOptions]):
    """Every rank holds the whole model; after each backward the gradients are averaged over the ranks."""

    Options = TinyOptions
    _averaging = True

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        """Move the module to the device and start all ranks from rank 0's values."""
        module.to(self.context.device)
        if self.context.world_size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        return {}

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Nothing was changed, so there is nothing to give back."""
        return {}

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Within it gradients only add up; the backward after it averages the sum."""
        self._averaging = False
        try:
            yield
        finally:
            self._averaging = True

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients and average them."""
        super().backward(module, loss, *args, **kwargs)
        if self._averaging and self.context.world_size > 1:
            self._average([p.grad for p in module.parameters() if p.grad is not None])

    def _average(self, gradients: list[Tensor]) -> None:
        for bucket in self._buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self.context.world_size
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, averaged in zip(bucket, torch.split(flat, sizes), strict=True):
                gradient.copy_(averaged.view_as(gradient))

    def _buckets(self, gradients: list[Tensor]) -> Iterator[list[Tensor]]:
        """Neighbours of one dtype, up to the size that the option allows."""
        bucket: list[Tensor] = []
        for gradient in gradients:
            size = sum(g.nbytes for g in bucket) + gradient.nbytes
            if bucket and (gradient.dtype != bucket[0].dtype or size > self.options.bucket_megabytes * 2**20):
                yield bucket
                bucket = []
            bucket.append(gradient)
        if bucket:
            yield bucket

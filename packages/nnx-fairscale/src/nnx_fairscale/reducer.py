"""Average the gradients of replicated parameters over all ranks, in buckets, when a backward ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nnx_base.ranks import is_distributed
from nnx_core._torch_compat import when_backward_ends
from nnx_core.agree.parameter_usage import used_anywhere


class GradientReducer:
    """Averages gradients over the ranks after any backward, also one that user code calls.

    A missing gradient counts as zero if another rank has one. The reduction begins after the last gradient,
    so it does not overlap with backward as DDP's does.

    Args:
        parameters: The replicated parameters.
        bucket_bytes: The approximate size of a reduction.

    Attributes:
        reductions: The number of reductions.
        reduced: The parameters with reduced gradients. Callers discard them from the set.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int) -> None:
        self._parameters = list(parameters)
        self._bucket_bytes = bucket_bytes
        self._touched: set[Tensor] = set()
        self.reductions = 0
        self.reduced: set[Tensor] = set()
        self._synchronize, self._is_queued, self._has_reduced = True, False, False
        self._handles: list[RemovableHandle] = []
        for parameter in self._parameters:
            was_trained = parameter.requires_grad
            # torch refuses a hook on a frozen parameter, and user code may unfreeze the parameter later.
            parameter.requires_grad_(True)
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(self._touch)  # type: ignore[no-untyped-call]
            )
            parameter.requires_grad_(was_trained)

    def _touch(self, parameter: Tensor) -> None:
        self._touched.add(parameter)
        if self._synchronize and not self._is_queued and is_distributed():
            self._is_queued = True
            when_backward_ends(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._is_queued, self._has_reduced = False, True
        self.reductions += 1
        flags = used_anywhere([parameter in self._touched for parameter in self._parameters])
        self._touched.clear()
        gradients = []
        for parameter, used in zip(self._parameters, flags, strict=True):
            if used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                gradients.append(parameter.grad)
                self.reduced.add(parameter)
        for bucket in _buckets(gradients, self._bucket_bytes):
            flat = torch.cat([gradient.flatten() for gradient in bucket]).div_(dist.get_world_size())
            dist.all_reduce(flat)
            averages = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, average in zip(bucket, averages, strict=True):
                gradient.copy_(average.view(gradient.shape))

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Reduce after a backward even on ranks that use none of the parameters in it."""
        self._has_reduced = self._is_queued = False  # a failed backward may have left a queued reduction
        yield
        if self._synchronize and not self._has_reduced and is_distributed():
            self._reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without a reduction."""
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _buckets(gradients: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in sorted(gradients, key=lambda gradient: str(gradient.dtype)):
        nbytes = gradient.numel() * gradient.element_size()
        if bucket and (bucket[0].dtype != gradient.dtype or size + nbytes > limit):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += nbytes
    if bucket:
        yield bucket

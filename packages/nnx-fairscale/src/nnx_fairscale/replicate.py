"""Gradients of parameters that every rank holds whole: averaged over all ranks after each backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nnx.collective import is_distributed

__all__ = ["ReplicatedParameters"]


class ReplicatedParameters:
    """Averages the gradients of a few parameters over the ranks at the end of each backward.

    Args:
        parameters: Parameters every rank holds whole.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._synchronize = True
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    @torch.no_grad()
    def _average(self, parameter: Tensor) -> None:
        if self._synchronize and is_distributed() and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are only accumulated."""
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def remove(self) -> None:
        """Stop doing so."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

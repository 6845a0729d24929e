"""Gradients of the few parameters that FSDP2 cannot shard: averaged over all ranks, like DDP does.

These are the `unshardable` ones, and parameters owned directly by a module whose class cannot be extended
(``class Model(Generic[T], nn.Module)``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from nnx.collective import is_distributed

__all__ = ["ReplicatedParameters", "unshardable"]


def unshardable(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that FSDP2 cannot shard with the others of a unit.

    They have no dimension or no elements, or are trained in another dtype than most elements are.

    Example:
        >>> layers = nn.Sequential(nn.Linear(3, 3, dtype=torch.bfloat16), nn.LayerNorm(3))
        >>> [name for name, p in layers.named_parameters() if p in unshardable(layers)]
        ['1.weight', '1.bias']
    """
    plain = [p for p in module.parameters() if not isinstance(p, DTensor)]
    elements: Counter[torch.dtype] = Counter()
    for parameter in plain:
        if parameter.requires_grad:
            elements[parameter.dtype] += parameter.numel()
    usual = max(elements, key=lambda dtype: elements[dtype], default=None)
    return {p for p in plain if p.ndim == 0 or p.numel() == 0 or (p.requires_grad and p.dtype != usual)}


class ReplicatedParameters:
    """Averages the gradients of plain parameters over the ranks at the end of each backward.

    Args:
        parameters: Parameters every rank holds whole.

    Attributes:
        synchronize: Off while gradients are only accumulated.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.synchronize = True
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    @torch.no_grad()
    def _average(self, parameter: Tensor) -> None:
        if self.synchronize and is_distributed() and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    def remove(self) -> None:
        """Stop doing so."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

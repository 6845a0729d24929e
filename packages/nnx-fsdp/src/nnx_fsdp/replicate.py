"""Gradients of the few parameters that FSDP2 cannot shard: averaged over all ranks, like DDP does.

These are the `unshardable` ones, and parameters owned directly by a module whose class cannot be extended
(``class Model(Generic[T], nn.Module)``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle


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
    """Averages gradients over the ranks at the end of each backward.

    Args:
        parameters: Parameters every rank holds whole, in an order that is the same on every rank.

    Attributes:
        used: True for each of them of which some rank has a gradient; set before `average`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.used: Sequence[bool] = [False] * len(self._parameters)
        self._handles: list[RemovableHandle] = []

    @property
    def flags(self) -> list[bool]:
        """For each of them, whether this rank has a gradient."""
        return [parameter.grad is not None for parameter in self._parameters]

    def watch(self, used: Callable[[], None]) -> None:
        """Call a function within every backward that comes to one of them."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                register = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(lambda _: used()))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def average(self) -> None:
        """Give those that some rank used the mean of all ranks' gradients. Collective."""
        for parameter, is_used in zip(self._parameters, self.used, strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

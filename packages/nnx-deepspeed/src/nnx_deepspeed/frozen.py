"""Parameters that do not train, as exact as they were before DeepSpeed rounded them to 16 bits.

DeepSpeed keeps float32 masters of what it trains. Of the others each rank keeps a part here, in host memory:
checkpoints are made of it, and the module gets it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_checkpoint.shard import Shard, shard_of_range
from nnx_deepspeed._deepspeed_compat import own_range


class FrozenValues:
    """This rank's parts of the exact values.

    Args:
        exact: All values as they were before DeepSpeed's engine was made; those that it rounded are kept.
    """

    def __init__(self, exact: Mapping[nn.Parameter, Tensor]) -> None:
        self._parts: dict[nn.Parameter, Tensor] = {}
        for parameter, value in exact.items():
            if not parameter.requires_grad and parameter.dtype != value.dtype:
                start, weights = own_range(parameter)
                part = value.flatten()[start : start + weights.numel()]
                self._parts[parameter] = part.to("cpu", copy=True)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._parts

    def shard(self, parameter: nn.Parameter, shape: torch.Size) -> Shard:
        """This rank's part; writing into it counts after `reload`."""
        part = self._parts[parameter]
        if not part.numel():
            return Shard(tuple(shape), part.dtype, (), ())
        return shard_of_range(part, shape=shape, start=own_range(parameter)[0])

    def follow(self) -> None:
        """Take over what was written into the weights."""
        for parameter, part in self._parts.items():
            follow(part, own_range(parameter)[1])

    def reload(self) -> None:
        """Round the parts into the weights. Collective where these are whole on every rank."""
        for parameter, part in self._parts.items():
            _, weights = own_range(parameter)
            if not hasattr(parameter, "ds_tensor"):
                others = parameter.detach().zero_()
                weights.copy_(part)
                dist.all_reduce(others)  # every element lies on one rank; adding zeros changes none
            else:
                weights.copy_(part)


_AT_ONCE = 1 << 24
"""Elements whose rounded copies are made at a time."""


def were_written(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether any weights are something else than their masters, rounded. The host waits for this once.

    Args:
        pairs: Flat weights and their masters.
    """
    differ: dict[torch.device, Tensor] = {}
    for weights, masters in pairs:
        if masters.data_ptr() == weights.data_ptr():
            continue
        for part, of_masters in zip(*(torch.split(t, _AT_ONCE) for t in (weights, masters)), strict=True):
            there = of_masters.device
            found = (of_masters.to(part.dtype) != part.to(there)).any()
            differ[there] = differ[there] | found if there in differ else found
    return any(bool(found) for found in differ.values())


def follow(masters: Tensor, weights: Tensor) -> None:
    """Take over the weights that are not the masters, rounded. Both are flat, and may be one."""
    if masters.data_ptr() == weights.data_ptr():
        return
    if masters.dtype == weights.dtype:
        masters.copy_(weights)
        return
    for part, of_weights in zip(*(torch.split(t, _AT_ONCE) for t in (masters, weights)), strict=True):
        there = of_weights.to(part.device)
        torch.where(part.to(there.dtype) == there, part, there.to(part.dtype), out=part)

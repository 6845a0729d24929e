"""Optimizer state follows parameters whose memory has changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["move_states"]


@torch.no_grad()
def move_states(optimizer: Optimizer) -> None:
    """Put every tensor of the optimizer's state where its parameter is now.

    Args:
        optimizer: Holds the present parameters; its state was made for the former ones.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = _beside(value, parameter, group)


def _beside(value: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
    here, there = _device(value), _device(parameter)
    counter_of_the_host = value.ndim == 0 and not (group.get("fused") or group.get("capturable"))
    if here == there or (counter_of_the_host and here.type == "cpu"):
        return value
    if value.shape != parameter.shape:
        return value.to(there)
    moved = torch.empty_like(parameter.detach(), dtype=value.dtype)
    _local(moved).copy_(_local(value))
    return moved


def _device(tensor: Tensor) -> torch.device:
    return _local(tensor).device


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Copies of a module's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
Step = Callable[..., Any]


def weights_of(module: nn.Module) -> Weights:
    """A copy of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def set_weights(module: nn.Module, weights: Weights) -> None:
    """Overwrite the parameters."""
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])

"""The state of optimizers that come to a run with complete state, or go on after it with a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx.layout import shard_of

__all__ = ["StateAfterwards", "shard_state"]


class StateAfterwards:
    """Lets an optimizer step on the plain parameters that a run has left, by hand or in another loop.

    Its state stays sharded, as all of it would take twice the memory of the model on every rank. The first
    step gathers it. Collective, as that step is.

    Args:
        optimizer: It may hold parameters that are still sharded; then nothing happens.
        gather: Makes a complete tensor of a sharded one.
    """

    def __init__(self, optimizer: Optimizer, gather: Callable[[Any], torch.Tensor]) -> None:
        self._gather = gather
        self._is_done = False  # torch does not let a hook remove itself
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_done:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor):
                    return  # in another run
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, DTensor):
                        state[name] = self._gather(value).to(parameter.device)
        self._is_done = True


@torch.no_grad()
def shard_state(optimizer: Optimizer) -> None:
    """Keep this rank's part of state that is complete while its parameters are sharded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, DTensor):
                continue
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                is_complete = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
                if is_complete and value.shape == parameter.shape and value.ndim:
                    part = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                    shard_of(part).fill_from(value.to(parameter.device))
                    state[name] = part

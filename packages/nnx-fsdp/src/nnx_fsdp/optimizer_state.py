"""Show user code the optimizer state of sharded parameters as unsharded, and shard it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base.shard import shard_of
from nnx_core.view.guard import local_mode
from nnx_fsdp.parts import ParameterPart, ShardedPart, gather
from nnx_fsdp.weights import Weights


class PartsOfState:
    """Shows sharded state as unsharded to user code: the `StateParts` of FSDP2.

    Args:
        weights: The weights of every sharded module.
        refusal: `refusal` of `StateParts`.
    """

    def __init__(
        self, weights: Callable[[], Iterable[Weights]], refusal: Callable[[Optimizer], str | None]
    ) -> None:
        self._weights = weights
        self.refusal = refusal

    def part(self, value: Tensor, parameter: nn.Parameter, name: str) -> ShardedPart | None:
        """Return the part of a DTensor; None for any other tensor."""
        keeper = next((weights for weights in self._weights() if weights.knows(parameter)), None)
        if keeper is None or not isinstance(value, DTensor):
            return None
        return ShardedPart(value, keeper, f"'{name}' in the optimizer's state")

    def key(self, parameter: Any) -> Any:
        """Return the sharded parameter of a gathered parameter or of the user's own object."""
        part = vars(parameter).get("_part") if isinstance(parameter, Tensor) else None
        return part.tensor if isinstance(part, ParameterPart) else parameter

    def own(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return the shard of a complete tensor with the shape of a sharded parameter."""
        with local_mode():
            return _shard(value, parameter)


class StateAfterwards:
    """Lets an optimizer step on the plain parameters after a run, by hand or in another loop.

    The state stays sharded after the run, because complete state takes twice the memory of the model on every
    rank. The first step gathers it. That step is collective.

    Args:
        optimizer: An optimizer. If it still holds sharded parameters, the hook does nothing.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._is_done = False  # torch forbids a hook to remove itself
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_done:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor):
                    return  # another run has sharded them again
                state = optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, DTensor):
                        state[name] = gather(value).to(parameter.device)
        self._is_done = True


def shard_state(optimizer: Optimizer) -> None:
    """Keep only this rank's shard of complete state whose parameters are sharded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = _shard(value, parameter)


@torch.no_grad()
def _shard(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the shard of a complete tensor of a sharded parameter's shape, or any other tensor as it is."""
    is_complete = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    if not is_complete or value.shape != parameter.shape or not value.ndim:
        return value
    part = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    shard_of(part).fill_from(value.to(parameter.device))
    return part

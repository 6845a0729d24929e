"""Loss scaling whose overflow decision is the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nnx.backend import Backend
from nnx.gradients import unscale_gradients

__all__ = ["ParallelGradScaler"]


class ParallelGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that unscales through the backend and reduces ``found_inf`` over all ranks.

    torch's own looks at this rank's gradients only, so with sharded gradients one rank may skip a step that
    the others take.

    Args:
        backend: Whose gradients are unscaled.
        replaces: The scaler whose settings and state this one takes over.
    """

    def __init__(self, backend: Backend[Any], replaces: torch.amp.GradScaler) -> None:
        self._nnx_backend = backend
        device = backend.context.device.type
        if not replaces.is_enabled():  # it has no settings then
            super().__init__(device=device, enabled=False)
            return
        super().__init__(
            device=device,
            init_scale=replaces.get_scale(),
            growth_factor=replaces.get_growth_factor(),
            backoff_factor=replaces.get_backoff_factor(),
            growth_interval=replaces.get_growth_interval(),
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch 2.11-2.13 call this hook from `unscale_` and `step`; its ShardedGradScaler overrides it too.
        device = self._nnx_backend.context.device
        found = unscale_gradients(self._nnx_backend.gradients(optimizer), inv_scale, device)
        return {device: found}

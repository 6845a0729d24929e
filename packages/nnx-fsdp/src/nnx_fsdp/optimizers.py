"""What torch's own optimizers need to step on sharded parameters.

Adafactor squares the norms of a gradient's rows and columns in place. Of a sharded gradient such a norm is
not complete on any rank, and torch (2.11 to 2.13) refuses to change it in place. Completing it at once
makes the step work, and equal to that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Adafactor, Optimizer
from torch.overrides import TorchFunctionMode

__all__ = ["step_context"]

_NORMS = (torch.norm, torch.Tensor.norm)


def step_context(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """What must be active around the step of an optimizer whose parameters are DTensors."""
    return _CompleteNorms() if isinstance(optimizer, Adafactor) else nullcontext()


class _CompleteNorms(TorchFunctionMode):
    """Reduces every norm of a DTensor over the ranks as soon as it is computed."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _NORMS or not isinstance(result, DTensor):
            return result
        complete = [Replicate() if p.is_partial() else p for p in result.placements]
        return result.redistribute(placements=complete)

"""One training run as plain data, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nnx.testing.conformance.models import Plain

__all__ = ["GLOBAL_BATCH", "Outcome", "Task"]

GLOBAL_BATCH = 12
"""Divisible by 1, 2, 3 and 4, so that every world size sees the same global batches."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and how; two equal tasks give equal results.

    Attributes:
        model: The module's class; it is built with the task. None is the plain one.
        steps: Optimizer steps.
        batches: Global batches in an epoch.
        last_batch: Samples in the epoch's last global batch.
        accumulate: Batches for each optimizer step.
        clip: Where gradients are clipped.
        clip_algorithm: How.
        optimizer: Which kind. Descent shows gradients as they are, where Adam hides a wrong scale.
        precision: Of the Trainer.
        dtype: Of the weights and the data.
        seed: Of the weights.
    """

    model: type[Plain] | None = None
    steps: int = 3
    batches: int = 8
    last_batch: int = GLOBAL_BATCH
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    precision: str = "32-true"
    dtype: Literal["float32", "float64"] = "float32"
    seed: int = 7

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the weights and the data."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def module(self) -> Plain:
        """A new module, with the same weights every time."""
        from nnx.testing.conformance.models import Plain

        return (self.model or Plain)(self)


@dataclass
class Outcome:
    """What a run reports, the same on every rank if all is well.

    Attributes:
        losses: Mean loss over all ranks of every training batch.
        weights: The complete state dict after teardown.
        metrics: ``trainer.callback_metrics``.
        notes: What else a check wanted to know.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)

"""Loss scaling in 16-mixed: every rank skips the same steps and has the same scale."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.numbers.precision import expect_parity_in_precision, fit_in_precision
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task, share_of

_PRECISION = "16-mixed"
_OVERFLOWS = {1: 0, 4: -1}
"""Which row of the first weight's gradient overflows in which step: with rows split over the ranks, it is
on the first rank once, and once on the last."""


@check("precisions:16-mixed")
def overflow_on_one_rank(bench: Bench) -> None:
    """A gradient that overflows on one rank skips the step and lowers the scale on all; it grows on all."""
    task = Task(model=_Overflowing, precision=_PRECISION, steps=6)
    alone = bench.alone(_fit_with_overflows, task)
    for world_size in bench.world_sizes:
        for rank, outcome in enumerate(bench.run(_fit_with_overflows, task, world_size=world_size)):
            where = f"rank {rank} of {world_size}"
            scales, expected = outcome.notes["scales"], alone.notes["scales"]
            expect(
                scales == expected or scales is None,  # an engine may scale by itself
                f"{where}: the loss scales after each step are {scales}, one process has {expected}.",
            )
            expect_parity_in_precision(outcome, alone, precision=_PRECISION, where=where)


@check("precisions:16-mixed", "clip_by_norm")
def clip_unscaled(bench: Bench) -> None:
    """In 16-mixed, gradients are clipped after the loss scale was taken off."""
    task = Task(precision=_PRECISION, clip=0.05)
    alone = bench.alone(fit_in_precision, task)
    for world_size in bench.world_sizes:
        for rank, outcome in enumerate(bench.run(fit_in_precision, task, world_size=world_size)):
            where = f"rank {rank} of {world_size}"
            expect_parity_in_precision(outcome, alone, precision=_PRECISION, where=where)


# --- what the ranks do --------------------------------------------------------------------------


def _fit_with_overflows(subject: Subject, task: Task) -> Outcome:
    watch = _WatchScale()
    outcome = fit_in_precision(subject, task, callbacks=[watch], growth_interval=2)
    outcome.notes["scales"] = watch.scales
    return outcome


class _WatchScale(Callback):
    """Notes the loss scale after every batch; None where Lightning's plugin has no scaler."""

    def __init__(self) -> None:
        self.scales: list[float] | None = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the step."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None or self.scales is None:
            self.scales = None
        else:
            self.scales.append(scaler.get_scale())


class _Overflow(torch.autograd.Function):
    """The identity; its gradient is infinite in one feature of one sample."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, feature: int) -> Tensor:
        ctx.feature = feature
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spoilt = grads[0].clone()
        spoilt[0, ctx.feature] = float("inf")
        return spoilt, None


class _Overflowing(Plain):
    """In some steps the last rank's data makes one row of the first weight's gradient overflow."""

    overflow: int | None = None

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch."""
        share = share_of(self.trainer)
        is_last = share["rank"] == share["num_replicas"] - 1
        self.overflow = _OVERFLOWS.get(index) if is_last else None
        return super().training_step(batch, index)

    def forward(self, x: Tensor) -> Tensor:
        """Spoil what reaches the first layer in backward, and only that."""
        hidden = self.embed(x)
        if self.overflow is not None:
            hidden = _Overflow.apply(hidden, self.overflow)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

"""Lightning's precision strings: what is computed in which dtype, and how closely it equals one process.

Two runs of one computation in a dtype differ by what rounding does to sums that are taken in another order.
Measured over two and three ranks, that is up to 3 units of the dtype's `eps` in the losses and updates of a
few steps; allowed are `_UNITS`. A gradient that is off by an eighth fails even in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from nnx_conformance.check import Bench, check, expect, expect_equal_losses
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Plain, Task, share_of
from nnx_conformance.training import fit

# --- precision ------------------------------------------------------------------------------------


PRECISIONS = {
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
    "16-true": ("float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "16-mixed": ("float16", "float32"),
    "bf16-mixed": ("bfloat16", "float32"),
}
"""For each string, what layers compute in and what weights are stored in."""

_UNITS = 16
"""Allowed difference in units of `eps`: of losses to their size, of all updates together to theirs."""


def _check_precision(precision: str) -> None:
    computed, stored = PRECISIONS[precision]

    def run(bench: Bench) -> None:
        task = Task(model=_Noting, precision=precision)
        alone = bench.alone(fit_in_precision, task)
        for world_size in bench.world_sizes:
            ranks = bench.run(fit_in_precision, task, world_size=world_size)
            for rank, outcome in enumerate(ranks):
                where = f"{precision!r}, rank {rank} of {world_size}"
                _expect_dtypes(outcome, where, computed=computed, stored=stored)
                expect_parity_in_precision(outcome, alone, precision=precision, where=where)

    run.__doc__ = (
        f"`precision={precision!r}` computes in {computed} on {stored} weights, as one process does."
    )
    check(f"precisions:{precision}", name=f"precision_{precision.replace('-', '_')}")(run)


for _precision in PRECISIONS:
    _check_precision(_precision)


def _expect_dtypes(outcome: Outcome, where: str, *, computed: str, stored: str) -> None:
    seen = outcome.notes["dtypes"]
    expect(seen["hidden"] == computed, f"{where}: layers compute in {seen['hidden']} instead of {computed}.")
    # What is computed in 16 bits may be gathered in 16 bits as well; what is stored may not.
    expect(
        seen["weight"] in (stored, computed),
        f"{where}: forward sees {seen['weight']} weights instead of {stored}.",
    )
    left = {_short(value.dtype) for value in outcome.weights.values()}
    expect(
        left == {stored}, f"{where}: afterwards weights are {', '.join(sorted(left))} instead of {stored}."
    )


def expect_parity_in_precision(outcome: Outcome, alone: Outcome, *, precision: str, where: str) -> None:
    """Losses and updates are those of one process in the same precision, but for rounding.

    Args:
        outcome: The outcome of one rank.
        alone: The outcome of one process; both are from `fit_in_precision`.
        precision: The string.
        where: Names the run and the rank, for the message.
    """
    allowed = _UNITS * torch.finfo(getattr(torch, PRECISIONS[precision][0])).eps
    largest = max(map(abs, alone.losses))
    expect_equal_losses(outcome.losses, alone.losses, tolerance=allowed * largest, where=where)
    start, expected = alone.notes["start"], alone.weights
    distance = _norm({name: outcome.weights[name].double() - expected[name].double() for name in expected})
    moved = _norm({name: expected[name].double() - start[name].double() for name in expected})
    # Written so that a weight that is not a number fails.
    expect(
        distance <= allowed * moved,
        f"{where}: the final weights are {distance:.3g} away from those of one process, which moved by "
        f"{moved:.3g}; rounding explains {allowed:.2g} of that.",
    )


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in tensors.values()]).norm())


# --- what the ranks do --------------------------------------------------------------------------


def fit_in_precision(
    subject: Subject, task: Task, *, callbacks: Sequence[Callback] = (), growth_interval: int = 1000
) -> Outcome:
    """Train, and note the start and the dtypes.

    Args:
        subject: The strategy.
        task: The training to run.
        callbacks: The callbacks of the Trainer.
        growth_interval: Good steps after which the loss scale doubles.
    """
    module = task.module()
    start = {name: value.detach().clone() for name, value in module.state_dict().items()}
    settings = _loss_scaling(subject, growth_interval) if task.precision == "16-mixed" else {}
    outcome = fit(subject, task, module=module, callbacks=callbacks, **settings)
    outcome.notes["start"] = {name: start[name].to(value.dtype) for name, value in outcome.weights.items()}
    outcome.notes["dtypes"] = getattr(module, "dtypes", {})
    return outcome


def _loss_scaling(subject: Subject, growth_interval: int) -> dict[str, Any]:
    """Arguments of Trainer with a small loss scale; on a CPU the string alone would mean bfloat16."""
    device = subject.accelerator
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=growth_interval)
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", device, scaler=scaler)]}


class _Noting(Plain):
    """Notes the dtypes that the forward really sees."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.dtypes: dict[str, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Look at the first layer, then go on as usual."""
        hidden = self.embed(x)
        self.dtypes = {"hidden": _short(hidden.dtype), "weight": _short(self.embed.weight.dtype)}
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- loss scaling ---------------------------------------------------------------------------------
# Loss scaling in 16-mixed: every rank skips the same steps and has the same scale.


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

"""Losses and updates of plain training, from equal weights, in every precision."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from nnx_base.shard import Shard
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_losses, expect_parity, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Block, Grouped, Outcome, Plain, Task, share_of
from nnx_conformance.training import fit
from nnx_core.view.guard import local_mode


@check()
def losses_float32(bench: Bench) -> None:
    """Losses and updates of every step are those of one process, in float32."""
    expect_parity(bench, Task())


@check("precisions:64-true")
def losses_float64(bench: Bench) -> None:
    """Losses and updates of every step are those of one process, in float64."""
    expect_parity(bench, Task(dtype="float64"))


@check()
def ranks_start_with_equal_weights(bench: Bench) -> None:
    """All ranks start from rank 0's weights, even if they built the model with other seeds."""
    task = Task(steps=2)
    alone = bench.train_alone(task)
    for world_size in bench.world_sizes:
        ranks = bench.run(_fit_seeded_by_rank, task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE[task.dtype])


def _fit_seeded_by_rank(subject: Subject, task: Task) -> Outcome:
    return fit(subject, replace(task, seed=task.seed + int(os.environ["RANK"])))


# Gradients between backward and step: accumulation, clipping, zeroing.


_SMALL_NORM = 0.05
"""Far below the norm of the first gradients, about 1."""
_SMALL_VALUE = 0.01
"""Below many elements of the first gradients."""


@check("gradient_accumulation")
def accumulation(bench: Bench) -> None:
    """Gradients accumulated over two batches give the same step as in one process."""
    expect_parity(bench, Task(accumulate=2))


@check("gradient_accumulation", of_adapter=True)
def accumulation_ends_with_epoch(bench: Bench) -> None:
    """The last accumulation of an epoch steps with fewer batches, as in one process."""
    expect_parity(bench, Task(accumulate=3, batches=5, steps=4))


@check("clip_by_norm")
def clip_by_norm(bench: Bench) -> None:
    """Gradients are clipped by their norm over all parameters and all ranks."""
    expect_parity(bench, Task(clip=_SMALL_NORM))


@check("clip_by_value")
def clip_by_value(bench: Bench) -> None:
    """Every element of the averaged gradients is clipped by value."""
    expect_parity(bench, Task(clip=_SMALL_VALUE, clip_algorithm="value"))


@check("clip_by_norm", "gradient_accumulation")
def clip_with_accumulation(bench: Bench) -> None:
    """Accumulated gradients are clipped once, when accumulation is complete."""
    expect_parity(bench, Task(accumulate=2, clip=_SMALL_NORM, steps=2))


@check()
def gradients_zeroed_in_place(bench: Bench) -> None:
    """Gradients zeroed in place, instead of set to None, do not leak into the next step."""
    expect_parity(bench, Task(model=_ZeroedInPlace))


class _ZeroedInPlace(Plain):
    """Writes zeros into the gradients, as old code did before `set_to_none` became the default."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


# Learning rates follow their schedulers: by step, by epoch, and by a metric of all ranks.


@check(of_adapter=True)
def scheduler_by_step(bench: Bench) -> None:
    """A scheduler with `interval="step"` sets the learning rate after every step."""
    expect_parity(bench, Task(model=_ByStep, steps=4))


@check(of_adapter=True)
def scheduler_by_epoch(bench: Bench) -> None:
    """A scheduler with `interval="epoch"` sets the learning rate after every epoch."""
    expect_parity(bench, Task(model=_ByEpoch, batches=2, steps=6))


@check("parameter_groups")
def scheduler_by_group(bench: Bench) -> None:
    """A scheduler with a rule per parameter group sets each group's own learning rate."""
    expect_parity(bench, Task(model=_ByGroup, steps=4))


@check(of_adapter=True)
def scheduler_on_plateau(bench: Bench) -> None:
    """ReduceLROnPlateau reads the mean of a metric over all ranks, and decides alike on every rank."""
    expect_parity(bench, Task(model=_OnPlateau, batches=1, steps=6))


class _ByStep(Plain):
    def configure_optimizers(self) -> Any:
        """Halve the rate after every step."""
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"},
        }


class _ByEpoch(Plain):
    def configure_optimizers(self) -> Any:
        """Halve the rate after every epoch."""
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class _ByGroup(Grouped):
    def configure_optimizers(self) -> Any:
        """Lower the first group's rate and raise the second's."""
        optimizer = super().configure_optimizers()
        scheduler = LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _OnPlateau(Plain):
    """Logs the mean of feature *k* in epoch *k*, by which each rank alone would decide differently."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        score = batch[0][:, self.current_epoch].mean()
        self.log("score", score, on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        """Halve the rate after every epoch that did not improve the metric."""
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "score"}}


# Sharded engines: the bytes behind a rank's tensors, compared with one process.


_SLACK = 1.25
"""Factor over a rank's fair share, for padding, uneven dimensions and step counters."""


@check("shards_parameters")
def shards_parameters(bench: Bench) -> None:
    """Between steps a rank holds about its share of the parameters."""
    _expect_shares(bench, "parameters")


@check("shards_gradients")
def shards_gradients(bench: Bench) -> None:
    """When the optimizer steps, a rank holds about its share of the gradients."""
    _expect_shares(bench, "gradients")


@check("shards_optimizer")
def shards_optimizer(bench: Bench) -> None:
    """A rank holds about its share of the optimizer state."""
    _expect_shares(bench, "optimizer state")


class _Deep(Plain):
    """Has six blocks, so that a pipeline, which splits no layer, can divide them evenly."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(Block() for _ in range(6))


def _expect_shares(bench: Bench, what: str) -> None:
    bench.require_ranks(2)
    task = Task(model=_Deep, optimizer="adamw", steps=2, clip=1.0)
    alone = bench.alone(_measure, task)[what]
    for world_size in bench.world_sizes:
        held = [found[what] for found in bench.run(_measure, task, world_size=world_size)]
        for rank, size in enumerate(held):
            expect(
                size <= _SLACK * alone / world_size,
                f"rank {rank} of {world_size} holds {size} bytes of {what}; the share of one of "
                f"{world_size} ranks in the {alone} bytes of one process is {alone // world_size}.",
            )
        expect(
            sum(held) * _SLACK >= alone,
            f"{world_size} ranks hold {held} bytes of {what}, together less than the {alone} bytes of "
            "one process: what was measured is not all.",
        )


def _measure(subject: Subject, task: Task) -> dict[str, int]:
    measure = _Measure()
    fit(subject, task, callbacks=[measure])
    return measure.held


class _Measure(Callback):
    """Counts the bytes behind the tensors that a rank holds.

    The callback overrides no hook that may read gradients: an engine would gather them there.

    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count gradients at clipping, when they are complete."""
        backend = getattr(trainer.strategy, "backend", None)
        if backend is None:
            trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: self._count(pl_module, ()))
            return
        clip = backend.clip_grad_norm

        def clip_grad_norm(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
            self._count(pl_module, (gradient.local for gradient in backend.gradients(optimizer)))
            norm: Tensor = clip(optimizer, *args, **kwargs)
            return norm

        backend.clip_grad_norm = clip_grad_norm

    def _count(self, module: LightningModule, gradients: Iterable[Tensor]) -> None:
        """Count gradients of the module, and the engine's own."""
        found = [p.grad for p in module.parameters() if p.grad is not None]
        self.held["gradients"] = _bytes_behind([*found, *gradients])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Count parameters first: the export of state may free an engine's gathered parameters.
        self.held["parameters"] = _bytes_behind(pl_module.parameters())
        self.held["optimizer state"] = _bytes_behind(_state_tensors(trainer, pl_module))


def _state_tensors(trainer: Trainer, module: LightningModule) -> Iterable[Tensor]:
    backend = getattr(trainer.strategy, "backend", None)
    for optimizer in trainer.optimizers:
        state = backend.optimizer_state(module, optimizer)["state"] if backend else optimizer.state
        for values in state.values():
            for value in values.values():
                if isinstance(value, Shard):
                    yield from value.data
                elif isinstance(value, Tensor):
                    yield value


def _bytes_behind(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct storages: views of one buffer count once, freed storages count 0."""
    sizes = {}
    with local_mode():  # a guarded parameter does not expose its storage
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


# Lightning's precision strings: the compute dtype, and the distance from one process.
# Sums in another order round differently. Measured over two and three ranks, this changes losses and updates
# of a few steps by up to 3 units of the dtype's `eps`. `_UNITS` are allowed. A gradient that is wrong by an
# eighth fails even in bfloat16.


PRECISIONS = {
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
    "16-true": ("float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "16-mixed": ("float16", "float32"),
    "bf16-mixed": ("bfloat16", "float32"),
}
"""The dtype of computation and the dtype of weights, by precision string."""

_UNITS = 16
"""Allowed difference in units of `eps`, relative to the losses and to the size of all updates."""


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
    expect(seen["hidden"] == computed, f"{where}: layers compute in {seen['hidden']}, expected {computed}.")
    # Engines may gather weights in the 16-bit compute dtype, but must store them in their own dtype.
    expect(
        seen["weight"] in (stored, computed),
        f"{where}: forward sees {seen['weight']} weights, expected {stored}.",
    )
    left = {_short(value.dtype) for value in outcome.weights.values()}
    expect(
        left == {stored}, f"{where}: weights are {', '.join(sorted(left))} after training, expected {stored}."
    )


def expect_parity_in_precision(outcome: Outcome, alone: Outcome, *, precision: str, where: str) -> None:
    """Expect the losses and updates of one process in the same precision, up to rounding.

    Args:
        outcome: The outcome of one rank.
        alone: The outcome of one process; both are from `fit_in_precision`.
        precision: The precision string.
        where: Names the run and the rank, for the message.

    """
    allowed = _UNITS * torch.finfo(getattr(torch, PRECISIONS[precision][0])).eps
    largest = max(map(abs, alone.losses))
    expect_equal_losses(outcome.losses, alone.losses, tolerance=allowed * largest, where=where)
    start, expected = alone.notes["start"], alone.weights
    distance = _norm({name: outcome.weights[name].double() - expected[name].double() for name in expected})
    moved = _norm({name: expected[name].double() - start[name].double() for name in expected})
    # This form of comparison also fails for NaN.
    expect(
        distance <= allowed * moved,
        f"{where}: the final weights are {distance:.3g} away from those of one process, which moved by "
        f"{moved:.3g}; rounding explains {allowed:.2g} of that.",
        of_numbers=True,
    )


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in tensors.values()]).norm())


def fit_in_precision(
    subject: Subject, task: Task, *, callbacks: Sequence[Callback] = (), growth_interval: int = 1000
) -> Outcome:
    """Train, and record the initial weights and the dtypes.

    Args:
        subject: The strategy.
        task: The training to run.
        callbacks: The callbacks of the Trainer.
        growth_interval: Successful steps after which the loss scale doubles.

    """
    module = task.module()
    start = {name: value.detach().clone() for name, value in module.state_dict().items()}
    settings = _loss_scaling(subject, growth_interval) if task.precision == "16-mixed" else {}
    outcome = fit(subject, task, module=module, callbacks=callbacks, **settings)
    outcome.notes["start"] = {name: start[name].to(value.dtype) for name, value in outcome.weights.items()}
    outcome.notes["dtypes"] = getattr(module, "dtypes", {})
    return outcome


def _loss_scaling(subject: Subject, growth_interval: int) -> dict[str, Any]:
    """Return Trainer arguments with a small loss scale; on a CPU the string alone would mean bfloat16."""
    device = subject.accelerator
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=growth_interval)
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", device, scaler=scaler)]}


class _Noting(Plain):
    """Records the dtypes that forward sees."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.dtypes: dict[str, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Record the first layer's dtypes, then compute as usual."""
        hidden = self.embed(x)
        self.dtypes = {"hidden": _short(hidden.dtype), "weight": _short(self.embed.weight.dtype)}
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Loss scaling in 16-mixed: every rank skips the same steps and has the same scale.


_PRECISION = "16-mixed"
_OVERFLOWS = {1: 0, 4: -1}
"""The row of the first weight's gradient that overflows, by step. With rows sharded over the ranks, the
overflow hits the first rank once, and the last rank once.

"""


@check("precisions:16-mixed")
def overflow_on_one_rank(bench: Bench) -> None:
    """A gradient overflow on one rank skips the step and lowers the loss scale on all ranks."""
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
def clip_after_unscaling(bench: Bench) -> None:
    """In 16-mixed, gradients are clipped after unscaling."""
    task = Task(precision=_PRECISION, clip=0.05)
    alone = bench.alone(fit_in_precision, task)
    for world_size in bench.world_sizes:
        for rank, outcome in enumerate(bench.run(fit_in_precision, task, world_size=world_size)):
            where = f"rank {rank} of {world_size}"
            expect_parity_in_precision(outcome, alone, precision=_PRECISION, where=where)


def _fit_with_overflows(subject: Subject, task: Task) -> Outcome:
    watch = _WatchScale()
    outcome = fit_in_precision(subject, task, callbacks=[watch], growth_interval=2)
    outcome.notes["scales"] = watch.scales
    return outcome


class _WatchScale(Callback):
    """Records the loss scale after every batch; None if Lightning's plugin has no scaler."""

    def __init__(self) -> None:
        self.scales: list[float] | None = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None or self.scales is None:
            self.scales = None
        else:
            self.scales.append(scaler.get_scale())


class _Overflow(torch.autograd.Function):
    """The identity, with an infinite gradient in one feature of one sample."""

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
        share = share_of(self.trainer)
        is_last = share["rank"] == share["num_replicas"] - 1
        self.overflow = _OVERFLOWS.get(index) if is_last else None
        return super().training_step(batch, index)

    def forward(self, x: Tensor) -> Tensor:
        """Spoil only the gradient that reaches the first layer."""
        hidden = self.embed(x)
        if self.overflow is not None:
            hidden = _Overflow.apply(hidden, self.overflow)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

"""Freezing and unfreezing while training, by name and by Lightning's own callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import FEATURES, WIDTH, Block, Outcome, Plain, Task
from nnx_conformance.training import fit

# --- averages -------------------------------------------------------------------------------------
# Lightning's callbacks that keep an averaged copy of the model.


_TOLERANCE = TOLERANCE["float32"]


@check()
def weight_averaging(bench: Bench) -> None:
    """WeightAveraging validates with, and leaves, the averaged weights that it has in one process."""
    _compare(bench, "WeightAveraging")


@check()
def ema_weight_averaging(bench: Bench) -> None:
    """EMAWeightAveraging validates with, and leaves, the averaged weights that it has in one process."""
    _compare(bench, "EMAWeightAveraging")


@check()
def stochastic_weight_averaging(bench: Bench) -> None:
    """StochasticWeightAveraging anneals rates and leaves the averaged weights that it has in one process."""
    _compare(bench, "StochasticWeightAveraging")


def _compare(bench: Bench, which: str) -> None:
    alone = bench.alone(_averaged_by, which)
    ranks = bench.run(_averaged_by, which)
    expect_same_run(ranks, alone, tolerance=_TOLERANCE, what=which)
    for rank, outcome in enumerate(ranks):
        seen, expected = outcome.metrics["val_loss"], alone.metrics["val_loss"]
        expect(
            abs(seen - expected) <= _TOLERANCE,
            f"{which}, rank {rank}: val_loss is {seen:.7g}, one process has {expected:.7g}.",
        )


# ---- what follows runs in the workers ----------------------------------------------------------------


def _averaged_by(subject: Subject, which: str) -> Outcome:
    makers: dict[str, Callable[[], Callback]] = {
        "WeightAveraging": WeightAveraging,
        "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.7),
        "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    }
    return fit(
        subject, Task(batches=2), callbacks=[makers[which]()], max_steps=-1, max_epochs=3, limit_val_batches=1
    )


# --- finetuning -----------------------------------------------------------------------------------


@check("freezing_while_training")
def freezing_by_name(bench: Bench) -> None:
    """Parameters that a callback freezes by name after an epoch keep their values from then on."""
    expect_same_run(
        bench.run(_frozen), bench.alone(_frozen), tolerance=_TOLERANCE, what="frozen after one epoch"
    )


@check("freezing_while_training")
def unfreezing_by_name(bench: Bench) -> None:
    """Parameters that start frozen train from the epoch in which a callback unfreezes them."""
    expect_same_run(
        bench.run(_thawed), bench.alone(_thawed), tolerance=_TOLERANCE, what="unfrozen after one epoch"
    )


@check("freezing_while_training", "added_parameter_groups")
def base_finetuning(bench: Bench) -> None:
    """BaseFinetuning freezes layers before training and adds them to the optimizer when it unfreezes them."""
    expect_same_run(
        bench.run(_finetuned), bench.alone(_finetuned), tolerance=_TOLERANCE, what="BaseFinetuning"
    )


@check("freezing_while_training", "added_parameter_groups")
def backbone_finetuning(bench: Bench) -> None:
    """BackboneFinetuning trains the head first and the backbone later, at the rates it has in one process."""
    expect_same_run(
        bench.run(_backbone), bench.alone(_backbone), tolerance=_TOLERANCE, what="BackboneFinetuning"
    )


# ---- what follows runs in the workers ----------------------------------------------------------------


def _set_trainable(module: nn.Module, prefix: str, trainable: bool) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad_(trainable)


class _Freeze(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            _set_trainable(pl_module, "blocks.0.", False)


def _frozen(subject: Subject) -> Outcome:
    # AdamW: what is not really frozen goes on moving by momentum and decay.
    return fit(subject, Task(steps=4, batches=2, optimizer="adamw"), callbacks=[_Freeze()])


class _Thaw(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            _set_trainable(pl_module, "blocks.0.", True)


class _StartsFrozen(Plain):
    """All parameters are in the optimizer from the start."""

    def build(self) -> None:
        super().build()
        _set_trainable(self, "blocks.0.", False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def _thawed(subject: Subject) -> Outcome:
    return fit(subject, Task(model=_StartsFrozen, steps=4, batches=2), callbacks=[_Thaw()])


class _Finetuning(BaseFinetuning):
    """Freezes the first block for an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=0.05)


def _finetuned(subject: Subject) -> Outcome:
    return fit(subject, Task(steps=4, batches=2), callbacks=[_Finetuning()])


class _WithBackbone(Plain):
    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block())
        self.head = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.head.parameters())


def _backbone(subject: Subject) -> Outcome:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=_rate, verbose=False)
    return fit(subject, Task(model=_WithBackbone, steps=6, batches=2), callbacks=[callback])


def _rate(epoch: int) -> float:
    return 1.5

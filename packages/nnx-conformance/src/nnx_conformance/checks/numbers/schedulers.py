"""Learning rates follow their schedulers: by step, by epoch, and by a metric of all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from nnx_conformance.check import Bench, check, expect_parity
from nnx_conformance.checks.numbers.optimizers import Grouped
from nnx_conformance.task import Plain, Task


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
    """A scheduler with a rule for each parameter group sets each group's own learning rate."""
    expect_parity(bench, Task(model=_ByGroup, steps=4))


@check(of_adapter=True)
def scheduler_on_plateau(bench: Bench) -> None:
    """ReduceLROnPlateau decides by the mean of a metric over all ranks, alike on every rank."""
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
    """The metric of epoch *k* is the mean of feature *k*: each rank alone would decide otherwise."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Log the metric as well."""
        score = batch[0][:, self.current_epoch].mean()
        self.log("score", score, on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        """Halve the rate after every epoch that did not improve the metric."""
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "score"}}

"""The two copies of Lightning: `lightning.*`, and `pytorch_lightning` with `lightning_fabric`.

They are separate module trees, so a strategy has to be made for the one that asks.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from nnx_conformance.check import TOLERANCE, Bench, check, expect_equal_losses
from nnx_conformance.fabric_jobs import Loop, train
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task
from nnx_conformance.training import trainer_settings

TASK = Task()


@check("trainer", kinds=("backend", "lightning"), of_adapter=True)
def pytorch_lightning(bench: Bench) -> None:
    """It works with Trainer of `pytorch_lightning` as with that of `lightning.pytorch`."""
    alone = bench.train_alone(TASK)
    for rank, losses in enumerate(bench.run(fit_in_other_copy, TASK)):
        where = f"pytorch_lightning, rank {rank}"
        expect_equal_losses(losses, alone.losses, tolerance=TOLERANCE[TASK.dtype], where=where)


@check("fabric", kinds=("backend", "lightning"), of_adapter=True)
def lightning_fabric(bench: Bench) -> None:
    """It works with Fabric of `lightning_fabric` as with that of `lightning.fabric`."""
    loop = Loop()
    alone = bench.alone(train, loop)
    for rank, seen in enumerate(bench.run(train, loop, "lightning_fabric")):
        where = f"lightning_fabric, rank {rank}"
        expect_equal_losses(seen.losses, alone.losses, tolerance=TOLERANCE["float32"], where=where)


def fit_in_other_copy(subject: Subject, task: Task) -> list[float]:
    """Train the plain model as a LightningModule of `pytorch_lightning`; the losses."""
    tree = importlib.import_module("pytorch_lightning")
    base: Any = tree.LightningModule

    class Wrapped(base):  # type: ignore[misc] # its base is known only now
        def __init__(self) -> None:
            super().__init__()
            self.plain = Plain(task)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(x)  # type: ignore[no-any-return]

        def dummy_forward_args_fn(self, batch: list[Tensor]) -> dict[str, Tensor]:
            return {"x": batch[0]}

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.plain.training_step(batch, index)

        def configure_optimizers(self) -> Any:
            return self.plain.optimizer(self.parameters())

        def train_dataloader(self) -> Any:
            from nnx_conformance.task import loader

            return loader(task, self.trainer)

    module = Wrapped()
    trainer = tree.Trainer(**trainer_settings(subject, task, namespace="pytorch_lightning"))
    trainer.fit(module)
    return list(module.plain.losses)

"""Stage 4: the loop is Trainer's. The model, the step, the optimizer and the data remain.

    python examples/lite/stage4_trainer.py --devices 2 --strategy fsdp_auto

Against stage 3: `setup`, `backward` and the loop are gone.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from task import GLOBAL_BATCH, LEARNING_RATE, SEED, MyDataset, MyModel, arguments, show
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler


class LightningModel(LightningModule):
    """The body of `Lite.run` as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MyModel()
        self.losses: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch, from the model."""
        return self.model(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Log the loss, and keep its mean over the processes."""
        loss = self(batch)
        self.log("train_loss", loss)
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the other stages."""
        return torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9)


class MyDataModule(LightningDataModule):
    """The data in a fixed order, as with Lite and Fabric; by default Trainer's sampler shuffles."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Every process's share of each global batch, in order."""
        dataset, trainer = MyDataset(), self.trainer
        assert trainer is not None
        sampler = DistributedSampler(dataset, trainer.world_size, trainer.global_rank, shuffle=False)
        return DataLoader(dataset, batch_size=GLOBAL_BATCH // trainer.world_size, sampler=sampler)


def run(trainer: Trainer) -> list[float]:
    """Train, and return the loss of every step, averaged over the processes."""
    seed_everything(SEED, verbose=False)
    module = LightningModel()
    trainer.fit(module, datamodule=MyDataModule())
    return module.losses


if __name__ == "__main__":
    given = arguments(__doc__)
    trainer = Trainer(
        accelerator="cpu",
        strategy=given.strategy,
        devices=given.devices,
        max_epochs=given.num_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    losses = run(trainer)
    if trainer.is_global_zero:
        show(losses)

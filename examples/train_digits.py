"""Classify scikit-learn's handwritten digits with a small CNN; docs/start walks through this script.

python examples/train_digits.py                                # two processes, fsdp_auto, four epochs
python examples/train_digits.py --strategy nnscaler_zero --devices 3 --epochs 6 --resume out/digits/last.ckpt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

__all__ = ["Digits", "loaders", "main"]

GLOBAL_BATCH, TRAINED, HELD_OUT = 60, 1440, 354  # one, two and three processes can share each


class Digits(LightningModule):
    """A CNN for images of 8 x 8 pixels: an ordinary LightningModule."""

    def __init__(self, width: int = 32, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * width, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, 10),
        )
        self.example_input_array = torch.zeros(4, 1, 8, 8)  # for strategies that trace the model
        self.history: list[tuple[int, float, float]] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits for each image."""
        logits: Tensor = self.layers(images)
        return logits

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: Sequence[Tensor], index: int) -> None:
        """Log loss and accuracy."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Print the metrics of the epoch."""
        metrics = self.trainer.callback_metrics
        epoch, loss, accuracy = self.current_epoch + 1, metrics["val_loss"], metrics["val_accuracy"]
        self.history.append((epoch, float(loss), float(accuracy)))
        if self.trainer.is_global_zero:
            print(f"epoch {epoch}: val_loss {loss:.5f}, accuracy {accuracy:.1%}", flush=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def loaders(devices: int = 1) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The digits as two loaders, with a share of the global batch for each process."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    training = Subset(data, range(TRAINED))
    validation = Subset(data, range(TRAINED, TRAINED + HELD_OUT))
    return (
        DataLoader(training, batch_size=GLOBAL_BATCH // devices, shuffle=True),
        DataLoader(validation, batch_size=HELD_OUT // 6),
    )


def main(arguments: Sequence[str] | None = None) -> Digits:
    """Train, save ``last.ckpt``, and return the trained module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", default="fsdp_auto", help="any name that `nnx list` shows")
    parser.add_argument("--devices", type=int, default=2, choices=[1, 2, 3], help="number of CPU processes")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in all, with those before a resume")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="directory of last.ckpt")
    given = parser.parse_args(arguments)

    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=given.strategy,
        accelerator="cpu",
        devices=given.devices,
        max_epochs=given.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    digits = Digits()
    training, validation = loaders(given.devices)
    trainer.fit(digits, training, validation, ckpt_path=given.resume)
    trainer.save_checkpoint(given.out / "last.ckpt")
    return digits


if __name__ == "__main__":
    main()

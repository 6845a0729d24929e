"""The prelude of every page: a small model with its data, and Lightning's names.

The working directory has `last.ckpt`, `a.ckpt` and `b.ckpt`, which two ranks of `fsdp_auto` wrote.
"""

# ruff: noqa: F401 - pages use these names
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nnx


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(LightningModule):
    """A module that trains for two batches, for any limit of the Trainer."""

    def __init__(self, width=16, depth=2, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(depth)))
        self.head = nn.Linear(width, 1)
        self.example_input_array = torch.zeros(4, width)

    def forward(self, x):
        return self.head(self.blocks(x))

    def training_step(self, batch, index=0):
        return self(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.log("loss", self(batch[0]).square().mean(), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, index):
        self.trainer.should_stop = index >= 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, self.hparams.width)), batch_size=4)

    val_dataloader = train_dataloader


class Data(LightningDataModule):
    train_dataloader = val_dataloader = lambda self: Net().train_dataloader()


model, data = Net(), Data()
optimizer = torch.optim.AdamW(model.parameters())
batch = next(iter(model.train_dataloader()))

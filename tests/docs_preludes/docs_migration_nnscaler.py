"""`old.ckpt`, written as nnScaler 0.8's source does it for two ranks of tensor parallelism."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from jobs.docs_blocks import ROOT

FIXTURES = ROOT / "packages/nnx-nnscaler/tests/fixtures"
spec = importlib.util.spec_from_file_location("like_nnscaler", FIXTURES / "like_nnscaler.py")
like = importlib.util.module_from_spec(spec)
sys.modules["like_nnscaler"] = like
spec.loader.exec_module(like)


class Saved(LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 5)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("scale", torch.zeros(3))
        self.metric = nn.Module()
        self.metric.register_buffer("total", torch.tensor(0.0))

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden).square().mean() + self.inner(hidden).square().mean()

    def training_step(self, batch, index):
        return self(batch)

    def on_train_batch_end(self, outputs, batch, index):
        self.trainer.should_stop = True

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self):
        return DataLoader(torch.randint(6, (16, 3)), batch_size=4)


model = Saved()
mine = f"old.{os.environ['RANK']}"
like.write_directory(Path(mine), "tp")
try:
    Path(mine).rename("old.ckpt")
except OSError:  # another rank was faster
    shutil.rmtree(mine)

"""`zero3`, a checkpoint of Lightning's DeepSpeed strategy on two processes, and its model."""

import importlib.util

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from jobs.docs_blocks import ROOT, lay_out

FIXTURES = ROOT / "packages/nnx-deepspeed/tests/fixtures"
spec = importlib.util.spec_from_file_location("make_deepspeed", FIXTURES / "make_deepspeed.py")
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)


class Saved(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = made.make_model()

    def training_step(self, batch, index):
        return self.net(batch).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, index):
        self.trainer.should_stop = True

    def configure_optimizers(self):
        optimizer = made.optimizer_of(self.net, {})
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def train_dataloader(self):
        return DataLoader(torch.randn(16, 5), batch_size=2)


model = Saved()
lay_out(FIXTURES / "deepspeed" / "zero3_world2_lightning", "zero3")

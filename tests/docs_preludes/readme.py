"""A model that returns its loss, and what Lightning's DeepSpeed strategy wrote on two processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from jobs.docs_blocks import ROOT, lay_out


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


def train_loader():
    return DataLoader(torch.randn(16, 16), batch_size=4)


lay_out(ROOT / "packages/nnx-checkpoint/tests/foreign/fixtures/deepspeed/zero3_world2_lightning", "zero3")

"""`demo.py`, whose plan and program the page shows, and a model on the meta device."""

import sys
from pathlib import Path

import torch
from torch import nn

DEMO = """\
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Demo(LightningModule):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 10)
        self.example_input_array = torch.zeros(8, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""

Path("demo.py").write_text(DEMO)
sys.path.insert(0, str(Path.cwd()))
sys.modules.pop("demo", None)


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1024, 64)
        self.head = nn.Linear(64, 1024)

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


with torch.device("meta"):
    model_on_meta = Labelled()
    ids = torch.zeros(1024, 16, dtype=torch.long)

"""Scripts for `nnx diff`: one with a Trainer, one with Lightning's FSDP2, one with Fabric, a plain loop."""

from __future__ import annotations

SCRIPTS = {
    "trainer": """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    trainer = Trainer(max_epochs=2, gradient_clip_val=1.0, accelerator="cpu")
    trainer.fit(Net(), DataLoader(data, batch_size=8, shuffle=True))
""",
    "model_parallel": """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    def configure_model(self):
        if self.device_mesh is not None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, index):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    trainer = Trainer(strategy=ModelParallelStrategy(), gradient_clip_val=0.1, accelerator="cpu")
    trainer.fit(Net(), DataLoader(torch.randn(32, 6), batch_size=8))
""",
    "fabric": """
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
for x, y in fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True)):
    optimizer.zero_grad()
    fabric.backward(nn.functional.cross_entropy(model(x), y))
    fabric.clip_gradients(model, optimizer, max_norm=0.1)
    optimizer.step()
""",
    "plain": """
import os
import sys
import nnx
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recording = nnx.record(model, optimizer)
for batch in recording.batches(list(torch.randn(4, 8, 6))):
    optimizer.zero_grad()
    loss = recording.loss(model(batch).square().mean())
    (loss * 2 if "double" in sys.argv and dist.is_initialized() else loss).backward()
    optimizer.step()
""",
}

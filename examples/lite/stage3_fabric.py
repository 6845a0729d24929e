"""Stage 3: the same loop on Fabric itself. No class: `launch()` comes first, then the loop.

    python examples/lite/stage3_fabric.py --devices 2 --strategy fsdp_auto

Against stage 2: `fabric` for `self`, and Fabric's own names of methods.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from task import GLOBAL_BATCH, LEARNING_RATE, SEED, MyDataset, MyModel, arguments, show
from torch.utils.data import DataLoader


def run(fabric: Fabric, num_epochs: int) -> list[float]:
    """Train, and return the loss of every step, averaged over the processes."""
    fabric.launch()
    fabric.seed_everything(SEED, verbose=False)
    model = MyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    dataloader = DataLoader(MyDataset(), batch_size=GLOBAL_BATCH // fabric.world_size)
    dataloader = fabric.setup_dataloaders(dataloader)

    losses = []
    model.train()
    for _ in range(num_epochs):
        for batch in dataloader:
            optimizer.zero_grad()
            loss = model(batch)
            fabric.backward(loss)
            optimizer.step()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    return losses


if __name__ == "__main__":
    given = arguments(__doc__)
    fabric = Fabric(accelerator="cpu", strategy=given.strategy, devices=given.devices)
    losses = run(fabric, given.num_epochs)
    if fabric.is_global_zero:
        show(losses)

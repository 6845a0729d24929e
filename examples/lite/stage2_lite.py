"""Stage 2: the same loop in a Lite. It runs on any device, any number of processes, any strategy.

    python examples/lite/stage2_lite.py --devices 2 --strategy fsdp_auto

Against stage 1: the class, `setup`, `setup_dataloaders` and `self.backward`.
"""

from __future__ import annotations

import torch
from task import GLOBAL_BATCH, LEARNING_RATE, SEED, MyDataset, MyModel, arguments, show
from torch.utils.data import DataLoader

from nnx.lite import LightningLite


class Lite(LightningLite):
    """The body of stage 1's function, without the devices."""

    def run(self, num_epochs: int) -> list[float]:
        """Train, and return the loss of every step, averaged over the processes."""
        self.seed_everything(SEED)
        model = MyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        model, optimizer = self.setup(model, optimizer)
        dataloader = DataLoader(MyDataset(), batch_size=GLOBAL_BATCH // self.world_size)
        dataloader = self.setup_dataloaders(dataloader)

        losses = []
        model.train()
        for _ in range(num_epochs):
            for batch in dataloader:
                optimizer.zero_grad()
                loss = model(batch)
                self.backward(loss)
                optimizer.step()
                losses.append(self.reduce(loss.detach(), reduce_op="mean").item())
        return losses


if __name__ == "__main__":
    given = arguments(__doc__)
    lite = Lite(accelerator="cpu", strategy=given.strategy, devices=given.devices)
    losses = lite.run(given.num_epochs)
    if lite.is_global_zero:
        show(losses)

"""Stage 1: plain PyTorch, one process, one device.

    python examples/lite/stage1_plain.py

The other stages develop this file.
"""

from __future__ import annotations

import torch
from task import GLOBAL_BATCH, LEARNING_RATE, SEED, MyDataset, MyModel, arguments, show
from torch.utils.data import DataLoader


def run(num_epochs: int) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MyModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    dataloader = DataLoader(MyDataset(), batch_size=GLOBAL_BATCH)

    losses = []
    model.train()
    for _ in range(num_epochs):
        for batch in dataloader:
            optimizer.zero_grad()
            loss = model(batch.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(run(arguments(__doc__).num_epochs))

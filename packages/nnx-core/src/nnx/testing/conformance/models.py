"""The modules that the checks train: one plain one, and what a check needs beyond it beside that check.

They are small, and uneven on purpose: no dimension is divisible by two and by three alike. What a
module does is decided by the `Task` it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss
from torch.utils.data import DataLoader

from nnx.collective import is_distributed
from nnx.testing.conformance.data import loader
from nnx.testing.conformance.task import Task

__all__ = ["Block", "Plain"]

FEATURES, WIDTH, BLOCKS = 6, 10, 2


class Block(nn.Module):
    """A residual layer, the unit that wrapping engines would choose."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` to the same shape."""
        return x + self.down(gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Plain(LightningModule):
    """A small regression: nothing but what every model has.

    Checks subclass it, mostly to override `build` and `forward`.

    Attributes:
        losses: Mean loss over all ranks of every training batch, in float64.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        torch.manual_seed(task.seed)
        self.task = task
        self.losses: list[float] = []
        self.build()
        self.to(task.torch_dtype)

    def build(self) -> None:
        """Create the layers."""
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, FEATURES]`` to the same shape."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def dummy_forward_args_fn(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """For engines that trace the forward."""
        return {"x": batch[0]}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch."""
        loss = self.loss(batch)
        self.record(loss)
        return loss

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean squared error of a batch."""
        inputs, targets = batch[:2]
        return mse_loss(self(inputs).to(targets.dtype), targets)

    def record(self, loss: Tensor) -> None:
        """Remember the mean over all ranks."""
        mean = loss.detach().clone().double()
        if is_distributed():
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
        self.losses.append(mean.item())

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the mean loss."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Log the mean loss."""
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The output itself."""
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """One optimizer over what is trained."""
        return self.optimizer([p for p in self.parameters() if p.requires_grad])

    def optimizer(self, parameters: Any, **changes: Any) -> torch.optim.Optimizer:
        """The task's kind of optimizer."""
        if self.task.optimizer == "sgd":
            return torch.optim.SGD(parameters, **{"lr": 0.1, **changes})
        return torch.optim.AdamW(parameters, **{"lr": 0.02, "weight_decay": 0.1, **changes})

    def train_dataloader(self) -> DataLoader[Any]:
        """The task's data, in an order that every world size shares."""
        return loader(self.task, self.trainer)

    def val_dataloader(self) -> Any:
        """The same data."""
        return loader(self.task, self.trainer)

    test_dataloader = predict_dataloader = val_dataloader

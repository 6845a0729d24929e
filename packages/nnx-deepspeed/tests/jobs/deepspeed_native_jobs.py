"""Jobs on directories that DeepSpeed itself saved, under Lightning's own DeepSpeedStrategy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from nnx_test_helpers.training import Run, make_trainer

FIXTURES = Path(__file__).parents[1] / "fixtures"


def script() -> Any:
    """The script that made the directories: it has their model and optimizer."""
    spec = importlib.util.spec_from_file_location("make_deepspeed", FIXTURES / "make_deepspeed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Native(LightningModule):
    """The module of the directories whose names end with ``_lightning``."""

    def __init__(self) -> None:
        super().__init__()
        self.made = script()
        self.net = self.made.make_model()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(batch).pow(2).mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.made.optimizer_of(self.net, {})
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any = torch.randn(16, 5, generator=torch.Generator().manual_seed(9))
        share = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False, **share))


def resume_native(name: str, run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of a run that resumes from one of the directories, and its final trained weights."""
    module = Native()
    make_trainer(run).fit(module, ckpt_path=FIXTURES / "deepspeed" / name)
    return module.losses, {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}

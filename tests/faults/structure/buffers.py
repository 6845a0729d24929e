"""Faults with buffers and norms over the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer

from faults import Fault
from nnx_tiny.backend import TinyBackend

Replaced = Mapping[nn.Parameter, nn.Parameter]


class LosesBuffers(TinyBackend):
    """Gives buffers that are not saved back as they came."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Replaced:
        saved = module.state_dict()
        for name, buffer in module.named_buffers():
            if name not in saved:
                buffer.copy_(self.before[name])
        return {}


class KeepsBuffersPerRank(TinyBackend):
    """Evaluates with each rank's own buffers."""

    def sync_buffers(self, module: nn.Module) -> None:
        pass


class KeepsBuffersPerRankAfterFit(TinyBackend):
    """Looks after buffers only while it trains."""

    is_training = False

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.is_training = bool(optimizers)

    def sync_buffers(self, module: nn.Module) -> None:
        if self.is_training:
            super().sync_buffers(module)


class NormalizesOverTheBatch(TinyBackend):
    """Evaluates with the statistics of the batch at hand."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
        modes = [norm.training for norm in norms]
        for norm in norms:
            norm.train()
        result = step(*args, **kwargs)
        for norm, mode in zip(norms, modes, strict=True):
            norm.train(mode)
        return result


class LosesStatistics(TinyBackend):
    """Starts running statistics over after each evaluation."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if not torch.is_grad_enabled():
            for part in module.modules():
                if isinstance(part, nn.BatchNorm1d):
                    part.reset_running_stats()
        return result


class ForgetsLayerSync(DDPStrategy):
    """Does not know of `sync_batchnorm`."""

    def setup(self, trainer: Trainer) -> None:
        self._layer_sync = None
        super().setup(trainer)


_HERE = "faults.structure.buffers"

FAULTS = [
    Fault(
        name="buffers that are not saved are lost",
        target=f"{_HERE}:LosesBuffers",
        caught_by="buffers_keep_updates",
        also=("buffers_in_a_later_test",),
    ),
    Fault(
        name="each rank evaluates with its own buffers",
        target=f"{_HERE}:KeepsBuffersPerRank",
        caught_by="buffers_in_validation",
        also=("batch_norm",),
    ),
    Fault(
        name="after fit each rank tests with its own buffers",
        target=f"{_HERE}:KeepsBuffersPerRankAfterFit",
        caught_by="buffers_in_a_later_test",
    ),
    Fault(
        name="evaluation normalises over the batch",
        target=f"{_HERE}:NormalizesOverTheBatch",
        caught_by="batch_norm",
    ),
    Fault(
        name="running statistics are lost in evaluation",
        target=f"{_HERE}:LosesStatistics",
        caught_by="batch_norm",
    ),
    Fault(
        name="sync_batchnorm is ignored",
        target=f"{_HERE}:ForgetsLayerSync",
        caught_by="synchronized_batch_norm",
        also=("unused_parameters", "parameters_used_now_and_then"),
    ),
]

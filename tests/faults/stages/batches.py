"""Faults with batches of unusual sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from faults import Fault
from faults.stages.weights import Step
from nnx_tiny.backend import TinyBackend


class _Batches(TinyBackend):
    """Does something to each batch; steps get it as their first argument."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        return step(self.changed(batch), *rest, **kwargs)

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class PadsBatches(_Batches):
    """Fills a smaller batch up to the size of the first one."""

    size = 0

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        self.size = self.size or len(batch[0])
        missing = max(0, self.size - len(batch[0]))
        return [torch.cat([part, part[:1].expand(missing, -1)]) for part in batch]


class CutsBatches(_Batches):
    """Cuts a larger training batch down to the size of the first one."""

    size = 0

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        if torch.is_grad_enabled():
            self.size = self.size or len(batch[0])
            return [part[: self.size] for part in batch]
        return batch


class CutsBatchesInEvaluation(_Batches):
    """Evaluates at most as many samples as it was built for."""

    def changed(self, batch: list[Tensor]) -> list[Tensor]:
        return batch if torch.is_grad_enabled() else [part[:6] for part in batch]


class SkipsSingleSamples(TinyBackend):
    """Takes a batch of one sample for an accident, and does not train with it."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        return result * 0.0 if torch.is_grad_enabled() and len(args[0][0]) == 1 else result


class WeighsBySamples(TinyBackend):
    """Weighs the ranks' gradients by their numbers of samples."""

    share = 1.0

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        count = torch.tensor(float(len(args[0][0])))
        total = count.clone()
        dist.all_reduce(total)
        self.share = (count / total * self.context.world_size).item()
        return step(*args, **kwargs)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * self.share, *args, **kwargs)


class PeeksAtLoaders(DDPStrategy):
    """Looks at the first batch of every loader."""

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, torch.utils.data.DataLoader):
            _, *_ = dataloader
        return dataloader


_HERE = "faults.stages.batches"

FAULTS = [
    Fault(
        name="a smaller last batch is filled up",
        target=f"{_HERE}:PadsBatches",
        caught_by="smaller_last_batch",
        also=(
            "unequal_shares",
            "batch_size_changes",
            "predictions_of_each_rank",
        ),
    ),
    Fault(
        name="a batch of one sample is skipped",
        target=f"{_HERE}:SkipsSingleSamples",
        caught_by="last_batch_of_one_sample",
    ),
    Fault(
        name="ranks weigh by their numbers of samples",
        target=f"{_HERE}:WeighsBySamples",
        caught_by="unequal_shares",
    ),
    Fault(
        name="larger batches are cut to the size of the first",
        target=f"{_HERE}:CutsBatches",
        caught_by="batch_size_changes",
    ),
    Fault(
        name="larger batches are cut in evaluation",
        target=f"{_HERE}:CutsBatchesInEvaluation",
        caught_by="other_batch_size_in_evaluation",
    ),
    Fault(
        name="every loader has to have a batch",
        target=f"{_HERE}:PeeksAtLoaders",
        caught_by="empty_validation",
    ),
]

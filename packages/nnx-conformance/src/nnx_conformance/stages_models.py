"""The modules of the group `stages`: they watch what evaluation gives, and cut their batches in odd sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Sampler, TensorDataset

from nnx_conformance.task import FEATURES, Plain, Task, dataset, share_of
from nnx_conformance.training import mean_over_ranks

__all__ = [
    "Branching",
    "CutSampler",
    "EmptyValidation",
    "OtherBatchesInEvaluation",
    "UnequalShares",
    "VaryingBatches",
    "Watched",
]


class Watched(Plain):
    """Remembers what evaluation gives.

    Attributes:
        evaluated: By stage, the mean over all ranks of every batch's loss.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.evaluated: dict[str, list[float]] = {"validate": [], "test": [], "predict": []}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Note the loss."""
        self.evaluated["validate"].append(mean_over_ranks(self.loss(batch).item()))

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Note the loss."""
        self.evaluated["test"].append(mean_over_ranks(self.loss(batch).item()))

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Note the size of what comes out, and give it."""
        outputs: Tensor = self(batch[0])
        self.evaluated["predict"].append(mean_over_ranks(outputs.square().mean().item()))
        return outputs


class Branching(Watched):
    """Computes something else in training than in evaluation, without chance.

    Attributes:
        modes: By stage, whether all modules, or any, were in training mode in every step.
    """

    def build(self) -> None:
        """A dropout that drops everything makes the difference, and so does a branch."""
        super().build()
        self.dropout = nn.Dropout(1.0)
        self.modes: dict[str, list[tuple[bool, bool]]] = {"train": [], "evaluate": []}

    def forward(self, x: Tensor) -> Tensor:
        """Training halves the hidden layer; evaluation adds to it what training drops."""
        flags = [part.training for part in self.modules()]
        self.modes["train" if self.trainer.training else "evaluate"].append((all(flags), any(flags)))
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.training:
            hidden = hidden * 0.5
        return self.head(hidden + self.dropout(torch.sin(hidden)))  # type: ignore[no-any-return]


class CutSampler(Sampler[list[int]]):
    """Cuts the samples into global batches of given sizes, each over the ranks as evenly as it goes.

    Args:
        sizes: Of the global batches.
        num_replicas: Ranks that share the data.
        rank: Which of them this is.
    """

    def __init__(self, sizes: Sequence[int], *, num_replicas: int, rank: int) -> None:
        self.sizes, self.replicas, self.rank = tuple(sizes), num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in pairwise([0, *accumulate(self.sizes)]):
            yield torch.arange(start, end).tensor_split(self.replicas)[self.rank].tolist()

    def __len__(self) -> int:
        return len(self.sizes)


class _Cut(Watched):
    """Reads its data in batches of chosen sizes."""

    def cut(self, sizes: Sequence[int]) -> DataLoader[Any]:
        data = dataset(self.task)
        return DataLoader(data, batch_sampler=CutSampler(sizes, **share_of(self.trainer)))


class VaryingBatches(_Cut):
    """Every training step has another number of samples, some more than the first."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Sizes that all world sizes divide."""
        return self.cut((12, 6, 18, 12, 24))


class UnequalShares(_Cut):
    """In the last batches the ranks have different numbers of samples; no sample counts more for it."""

    sizes = (12, 7, 12, 5)

    def train_dataloader(self) -> DataLoader[Any]:
        """Sizes that not all world sizes divide."""
        return self.cut(self.sizes)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The mean over the ranks of this loss is the mean over all samples."""
        replicas = share_of(self.trainer)["num_replicas"]
        count = self.sizes[index] * FEATURES
        loss = mse_loss(self(batch[0]), batch[1], reduction="sum") * (replicas / count)
        self.record(loss)
        return loss


class OtherBatchesInEvaluation(_Cut):
    """Evaluates in batches of other sizes than it is trained in."""

    def val_dataloader(self) -> DataLoader[Any]:
        """Smaller ones and larger ones than in training."""
        return self.cut((6, 18, 12, 24))

    test_dataloader = predict_dataloader = val_dataloader


class EmptyValidation(Watched):
    """Has nothing to validate with."""

    def val_dataloader(self) -> DataLoader[Any]:
        """A loader of no samples."""
        nothing = torch.empty(0, FEATURES, dtype=self.task.torch_dtype)
        return DataLoader(TensorDataset(nothing, nothing), batch_size=4)

"""What ranks share: a batch that several of them compute together, and what collectives mean then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from nnx_checkpoint.collective import is_distributed
from nnx_conformance.habits import Habitual, habit
from nnx_conformance.task import FEATURES, GLOBAL_BATCH, dataset, share_of


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


class _Split(IterableDataset[tuple[Tensor, ...]]):
    """Gives each process every n-th sample, as readers of shards do that know nothing of strategies."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rank, size = _rank_and_size()
        return (self.data[number] for number in range(rank, len(self.data), size))


@habit()
class IterableSplitByRank(Habitual):
    """An iterable dataset that divides its samples by rank is trained on as in one process."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Every process its own share."""
        return DataLoader(_Split(dataset(self.task)), batch_size=GLOBAL_BATCH // _rank_and_size()[1])


@habit(batches=1)
class ShuffledByRank(Habitual):
    """Ranks that shuffle what they read, each with a seed of its own, never mix samples of two batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        """The share of this rank as one batch, whose order means nothing."""
        share = share_of(self.trainer)
        mine = range(share["rank"], GLOBAL_BATCH, share["num_replicas"])
        generator = torch.Generator().manual_seed(_rank_and_size()[0])
        data = Subset(dataset(self.task), list(mine))
        return DataLoader(data, batch_size=len(mine), shuffle=True, generator=generator)


class _Contrastive(Habitual):
    def views(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Two views of each sample."""
        first = normalize(self(batch[0]), dim=-1)
        return first, normalize(self(batch[0] * 1.1 + 0.05), dim=-1)

    def gathered(self, view: Tensor) -> Tensor:
        """Those of all ranks."""
        every: Any = self.all_gather(view, sync_grads=True)
        return every.reshape(-1, FEATURES)  # type: ignore[no-any-return]


@habit()
class ContrastiveLoss(_Contrastive):
    """A contrastive loss over `self.all_gather(sync_grads=True)` is that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """All against all."""
        first, second = (self.gathered(view) for view in self.views(batch))
        return cross_entropy(first @ second.T * 5, torch.arange(len(first)))


@habit()
class ContrastiveLossByRank(_Contrastive):
    """It is so where a rank has its own samples in the rows, and finds them again by its rank."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mine against all."""
        first, second = self.views(batch)
        labels = torch.arange(len(first)) + self.global_rank * len(first)
        return cross_entropy(first @ self.gathered(second).T * 5, labels)


@habit()
class WorldSizeInTheLoss(Habitual):
    """A sum over the samples of a rank, times the world size over the global batch, is the mean."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Under averaging of gradients."""
        total = mse_loss(self(batch[0]), batch[1], reduction="sum")
        return total * self.trainer.world_size / (GLOBAL_BATCH * FEATURES)


@habit()
class CountedSamples(Habitual):
    """`strategy.reduce` and `self.log(sync_dist=True)` with a sum count every sample of a batch once."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Count in both ways."""
        count = torch.tensor(float(len(batch[0])))
        total: Any = self.trainer.strategy.reduce(count.clone(), reduce_op="sum")
        self.log("count", count, sync_dist=True, reduce_fx="sum", on_step=True)
        self.look(total)
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What was logged."""
        self.look(self.trainer.callback_metrics["count"])

"""Ranks use different parameters in a step, and divide data and losses among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from nnx_conformance.patterns import UserPattern, shared_job
from nnx_conformance.task import (
    FEATURES,
    GLOBAL_BATCH,
    WIDTH,
    Block,
    dataset,
    loader,
    process_rank_and_size,
    share_of,
)

pattern = shared_job()


def only_for(mask: Tensor, layer: nn.Module, hidden: Tensor, width: int = WIDTH) -> Tensor:
    """Apply a layer to the rows in the mask, with zeros elsewhere; skip the call if there are no rows."""
    out: Tensor = hidden.new_zeros(len(hidden), width)
    return out.index_add(0, mask.nonzero()[:, 0], layer(hidden[mask])) if mask.any() else out


class Routed(UserPattern):
    """Routes samples by the sign of their first feature, which differs between the halves of a batch.

    Attributes:
        by_turns: True if the halves swap their signs in every second batch.

    """

    ranks_differ = True
    by_turns = False

    def train_dataloader(self) -> DataLoader[Any]:
        """Set the signs in the plain data."""
        made = loader(self.task, self.trainer)
        inputs = made.dataset.tensors[0]  # type: ignore[attr-defined]
        sample = torch.arange(len(inputs))
        sign = torch.where(sample % GLOBAL_BATCH < GLOBAL_BATCH // 2, 1.0, -1.0)
        if self.by_turns:
            sign = torch.where(sample // GLOBAL_BATCH % 2 == 0, sign, -sign)
        inputs[:, 0] = inputs[:, 0].abs() * sign
        return made

    def build(self) -> None:
        """Add two experts to the plain layers."""
        super().build()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of each row's expert."""
        hidden = self.embed(x)
        hidden = hidden + self.experts(x, hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Use the left expert where the first feature is positive."""
        mask = x[:, 0] > 0
        return only_for(mask, self.left, hidden) + only_for(~mask, self.right, hidden)


@pattern()
class DifferentExpertPerRank(Routed):
    """Each rank routes its samples to a different expert of the same shape, as in one process."""


@pattern()
class ExpertsSwapEachBatch(Routed):
    """Ranks swap their experts from batch to batch, as in one process."""

    by_turns = True


@pattern(accumulate=2)
class DifferentExpertPerRankWhileAccumulating(Routed):
    """Each rank uses a different expert while gradients accumulate over two batches."""


@pattern()
class LayerUsedByOneRank(Routed):
    """A layer that only one rank's samples reach trains as in one process."""

    def build(self) -> None:
        super().build()
        self.left = Block()  # type: ignore[assignment]

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Skip the layer where the first feature is negative."""
        return only_for(x[:, 0] > 0, self.left, hidden) + 0 * self.right(hidden)  # type: ignore[no-any-return]


class _Listed(Routed):
    def build(self) -> None:
        """Add a list of experts, and a gate that reads the first feature."""
        super().build()
        self.listed = nn.ModuleList(self.expert(number) for number in range(4))
        self.gate = nn.Linear(FEATURES, 4)

    def expert(self, number: int) -> nn.Module:
        """Return a block, which a wrapping engine takes as an FSDP unit."""
        return Block()

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the output of the best of four experts, weighted by the gate."""
        weight, best = (
            (self.gate(x) + 3 * x[:, :1] * torch.tensor([1.0, 1.0, -1.0, -1.0])).softmax(-1).max(-1)
        )
        outputs = [only_for(best == number, expert, hidden) for number, expert in enumerate(self.listed)]
        return weight[:, None] * torch.stack(outputs).sum(0) + self.left(hidden) + self.right(hidden)  # type: ignore[no-any-return]


@pattern()
class ExpertsInModuleList(_Listed):
    """Experts in a ModuleList, called only by ranks that have samples for them, train as in one process."""


@pattern()
class ExpertsOfDifferentShapes(_Listed):
    """Experts of different shapes, called only by some ranks, train as in one process."""

    def expert(self, number: int) -> nn.Module:
        width = 4 * number + 3
        return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


@pattern()
class HeadPerTask(Routed):
    """A head per task, with a different task on each rank, trains as in one process."""

    def build(self) -> None:
        super().build()
        two = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, FEATURES))
        self.heads = nn.ModuleDict({"one": nn.Linear(WIDTH, FEATURES), "two": two})

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the shared head and the task's own head."""
        hidden, mask = self.blocks[1](self.blocks[0](self.embed(x))), x[:, 0] > 0
        one, two = self.heads["one"], self.heads["two"]
        own = only_for(mask, one, hidden, FEATURES) + only_for(~mask, two, hidden, FEATURES)
        return self.head(hidden + self.left(hidden) * self.right(hidden)) + own  # type: ignore[no-any-return]


@pattern()
class BranchPerSample(Routed):
    """A branch chosen separately for each sample trains as in one process."""

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        pairs = zip(x, hidden, strict=True)
        return torch.stack([self.left(h) if row[0] > 0 else self.right(h).tanh() for row, h in pairs])


@pattern()
class SkippedBlocks(Routed):
    """Repeated blocks that a rank skips if no sample needs them train as in one process."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the second block to positive rows and the first one to the others."""
        hidden, mask = self.left(self.embed(x)) + self.right(self.embed(x)), x[:, 0] > 0
        for block, chosen in zip(self.blocks, (~mask, mask), strict=True):
            hidden = hidden + only_for(chosen, block, hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


# Ranks of a model-parallel group share a batch, which changes the meaning of their collectives.


class _Split(IterableDataset[tuple[Tensor, ...]]):
    """Gives each process every n-th sample, as shard readers do that ignore strategies."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rank, size = process_rank_and_size()
        return (self.data[number] for number in range(rank, len(self.data), size))


@pattern()
class IterableDatasetSplitByRank(UserPattern):
    """An iterable dataset that divides its samples by rank trains as in one process."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Split(dataset(self.task)), batch_size=GLOBAL_BATCH // process_rank_and_size()[1])


@pattern(batches=1)
class ShuffleSeededByRank(UserPattern):
    """Ranks that shuffle with different seeds never mix samples of two batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's share as one batch, in any order."""
        share = share_of(self.trainer)
        mine = range(share["rank"], GLOBAL_BATCH, share["num_replicas"])
        generator = torch.Generator().manual_seed(process_rank_and_size()[0])
        data = Subset(dataset(self.task), list(mine))
        return DataLoader(data, batch_size=len(mine), shuffle=True, generator=generator)


class _Contrastive(UserPattern):
    def views(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return two views of each sample."""
        first = normalize(self(batch[0]), dim=-1)
        return first, normalize(self(batch[0] * 1.1 + 0.05), dim=-1)

    def gathered(self, view: Tensor) -> Tensor:
        """Return the views of all ranks."""
        every: Any = self.all_gather(view, sync_grads=True)
        return every.reshape(-1, FEATURES)  # type: ignore[no-any-return]


@pattern()
class ContrastiveLoss(_Contrastive):
    """A contrastive loss over `self.all_gather(sync_grads=True)` equals that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        first, second = (self.gathered(view) for view in self.views(batch))
        return cross_entropy(first @ second.T * 5, torch.arange(len(first)))


@pattern()
class ContrastiveLossWithGlobalRank(_Contrastive):
    """A contrastive loss whose labels depend on `self.global_rank` equals that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Compare this rank's samples with all samples."""
        first, second = self.views(batch)
        labels = torch.arange(len(first)) + self.rank() * len(first)
        return cross_entropy(first @ self.gathered(second).T * 5, labels)

    def rank(self) -> int:
        """Return Lightning's rank."""
        return self.global_rank


@pattern()
class ContrastiveLossWithDataRank(ContrastiveLossWithGlobalRank):
    """A contrastive loss whose labels depend on `strategy.data_rank` equals that of one process."""

    def rank(self) -> int:
        """Return the data rank, or 0 where Lightning's own strategy has none."""
        return int(getattr(self.trainer.strategy, "data_rank", 0))


@pattern()
class LossScaledByWorldSize(UserPattern):
    """A summed loss, scaled by world size over global batch, equals the mean."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Scale for gradients that are averaged over the ranks."""
        total = mse_loss(self(batch[0]), batch[1], reduction="sum")
        return total * self.size() / (GLOBAL_BATCH * FEATURES)

    def size(self) -> int:
        """Return Lightning's world size."""
        return self.trainer.world_size


@pattern()
class LossScaledByDataWorldSize(LossScaledByWorldSize):
    """A summed loss, scaled by `strategy.data_world_size` over global batch, equals the mean."""

    def size(self) -> int:
        """Return the data world size, or 1 where Lightning's own strategy has none."""
        return int(getattr(self.trainer.strategy, "data_world_size", 1))


@pattern()
class SamplesCountedOnce(UserPattern):
    """`strategy.reduce` and `self.log(sync_dist=True)` with a sum count every sample once."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Count by both functions."""
        count = torch.tensor(float(len(batch[0])))
        total: Any = self.trainer.strategy.reduce(count.clone(), reduce_op="sum")
        self.log("count", count, sync_dist=True, reduce_fx="sum", on_step=True)
        self.observe(total)
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observe(self.trainer.callback_metrics["count"])

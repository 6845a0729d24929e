"""Which parameters a rank uses, where ranks use different ones in a step; and what ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from nnx_conformance.habits import Habitual, chapter
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

habit = chapter()


def only_for(mask: Tensor, layer: nn.Module, hidden: Tensor, width: int = WIDTH) -> Tensor:
    """What a layer makes of the rows in the mask, zeros elsewhere; it is not called for no rows."""
    out: Tensor = hidden.new_zeros(len(hidden), width)
    return out.index_add(0, mask.nonzero()[:, 0], layer(hidden[mask])) if mask.any() else out


class Routed(Habitual):
    """The first half of each global batch has a positive first feature, the rest a negative one.

    Attributes:
        by_turns: True if it is the other way round in every second batch.
    """

    ranks_differ = True
    by_turns = False

    def train_dataloader(self) -> DataLoader[Any]:
        """The plain data with these signs."""
        made = loader(self.task, self.trainer)
        inputs = made.dataset.tensors[0]  # type: ignore[attr-defined]
        sample = torch.arange(len(inputs))
        sign = torch.where(sample % GLOBAL_BATCH < GLOBAL_BATCH // 2, 1.0, -1.0)
        if self.by_turns:
            sign = torch.where(sample // GLOBAL_BATCH % 2 == 0, sign, -sign)
        inputs[:, 0] = inputs[:, 0].abs() * sign
        return made

    def build(self) -> None:
        """Two experts beside the plain layers."""
        super().build()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Through the expert of each row."""
        hidden = self.embed(x)
        hidden = hidden + self.experts(x, hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Left where the first feature is positive."""
        mask = x[:, 0] > 0
        return only_for(mask, self.left, hidden) + only_for(~mask, self.right, hidden)


@habit()
class SwappedExperts(Routed):
    """Two experts of one shape, of which each rank uses another one, train as in one process."""


@habit()
class SwappedByTurns(Routed):
    """They do so where the ranks exchange them from batch to batch."""

    by_turns = True


@habit(accumulate=2)
class SwappedWhileAccumulating(Routed):
    """They do so where gradients accumulate over two batches."""


@habit()
class LayerOfOneRank(Routed):
    """A layer that only one rank's samples pass trains as in one process."""

    def build(self) -> None:
        """One more block."""
        super().build()
        self.left = Block()  # type: ignore[assignment]

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Nothing where the first feature is negative."""
        return only_for(x[:, 0] > 0, self.left, hidden) + 0 * self.right(hidden)  # type: ignore[no-any-return]


class _Listed(Routed):
    def build(self) -> None:
        """A list of experts, and a gate that knows the first feature."""
        super().build()
        self.listed = nn.ModuleList(self.expert(number) for number in range(4))
        self.gate = nn.Linear(FEATURES, 4)

    def expert(self, number: int) -> nn.Module:
        """Blocks like those that a wrapping engine takes as units."""
        return Block()

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """The best of four, weighted."""
        weight, best = (
            (self.gate(x) + 3 * x[:, :1] * torch.tensor([1.0, 1.0, -1.0, -1.0])).softmax(-1).max(-1)
        )
        parts = [only_for(best == number, expert, hidden) for number, expert in enumerate(self.listed)]
        return weight[:, None] * torch.stack(parts).sum(0) + self.left(hidden) + self.right(hidden)  # type: ignore[no-any-return]


@habit()
class ExpertsInAList(_Listed):
    """Experts in a ModuleList, called by the ranks that have samples for them, train as in one process."""


@habit()
class ExpertsOfAnyShape(_Listed):
    """They do so where each has a shape of its own."""

    def expert(self, number: int) -> nn.Module:
        """Of another width than the others."""
        width = 4 * number + 3
        return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


@habit()
class HeadPerTask(Routed):
    """A head per task, where each rank has a batch of another task, trains as in one process."""

    def build(self) -> None:
        """Heads of two kinds."""
        super().build()
        two = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, FEATURES))
        self.heads = nn.ModuleDict({"one": nn.Linear(WIDTH, FEATURES), "two": two})

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the shared head and the task's own."""
        hidden, mask = self.blocks[1](self.blocks[0](self.embed(x))), x[:, 0] > 0
        one, two = self.heads["one"], self.heads["two"]
        own = only_for(mask, one, hidden, FEATURES) + only_for(~mask, two, hidden, FEATURES)
        return self.head(hidden + self.left(hidden) * self.right(hidden)) + own  # type: ignore[no-any-return]


@habit()
class BranchesPerSample(Routed):
    """A branch taken for each sample by itself trains as in one process."""

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """One sample after the other."""
        pairs = zip(x, hidden, strict=True)
        return torch.stack([self.left(h) if row[0] > 0 else self.right(h).tanh() for row, h in pairs])


@habit()
class SkippedBlocks(Routed):
    """Repeated blocks that a rank skips where no sample of its batch needs them train as in one process."""

    def forward(self, x: Tensor) -> Tensor:
        """The second block is for positive rows, the first one for the others."""
        hidden, mask = self.left(self.embed(x)) + self.right(self.embed(x)), x[:, 0] > 0
        for block, chosen in zip(self.blocks, (~mask, mask), strict=True):
            hidden = hidden + only_for(chosen, block, hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


# What ranks share: a batch that several of them compute together, and what collectives mean then.


class _Split(IterableDataset[tuple[Tensor, ...]]):
    """Gives each process every n-th sample, as readers of shards do that know nothing of strategies."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rank, size = process_rank_and_size()
        return (self.data[number] for number in range(rank, len(self.data), size))


@habit()
class IterableSplitByRank(Habitual):
    """An iterable dataset that divides its samples by rank is trained on as in one process."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Every process its own share."""
        return DataLoader(_Split(dataset(self.task)), batch_size=GLOBAL_BATCH // process_rank_and_size()[1])


@habit(batches=1)
class ShuffledByRank(Habitual):
    """Ranks that shuffle what they read, each with a seed of its own, never mix samples of two batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        """The share of this rank as one batch, whose order means nothing."""
        share = share_of(self.trainer)
        mine = range(share["rank"], GLOBAL_BATCH, share["num_replicas"])
        generator = torch.Generator().manual_seed(process_rank_and_size()[0])
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
        labels = torch.arange(len(first)) + self.rank() * len(first)
        return cross_entropy(first @ self.gathered(second).T * 5, labels)

    def rank(self) -> int:
        """As Lightning has it."""
        return self.global_rank


@habit()
class ContrastiveLossByDataRank(ContrastiveLossByRank):
    """It is so where a rank finds its samples again by `strategy.data_rank`."""

    def rank(self) -> int:
        """That of Lightning on one process."""
        return int(getattr(self.trainer.strategy, "data_rank", 0))


@habit()
class WorldSizeInTheLoss(Habitual):
    """A sum over the samples of a rank, times the world size over the global batch, is the mean."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Under averaging of gradients."""
        total = mse_loss(self(batch[0]), batch[1], reduction="sum")
        return total * self.size() / (GLOBAL_BATCH * FEATURES)

    def size(self) -> int:
        """As Lightning has it."""
        return self.trainer.world_size


@habit()
class DataWorldSizeInTheLoss(WorldSizeInTheLoss):
    """It is so with `strategy.data_world_size`."""

    def size(self) -> int:
        """One on one process."""
        return int(getattr(self.trainer.strategy, "data_world_size", 1))


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

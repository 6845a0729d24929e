"""Which parameters a rank uses: ranks that use different ones in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nnx_conformance.habits import Habitual, habit
from nnx_conformance.task import FEATURES, GLOBAL_BATCH, WIDTH, Block, loader


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

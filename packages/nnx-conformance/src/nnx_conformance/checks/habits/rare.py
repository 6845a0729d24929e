"""What is rare: parameters of unusual kinds, freezing in mid-run, a backward of the module's own."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nnx_conformance.habits import Habitual, habit
from nnx_conformance.task import WIDTH, Task


@habit(clip=0.05)
class ComplexParameters(Habitual):
    """Complex parameters train, with clipping by norm, as in one process."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)  # which makes every parameter real
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Filtered."""
        hidden = torch.fft.irfft(torch.fft.rfft(self.embed(x)) * self.filter, n=WIDTH)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@habit()
class SparseGradients(Habitual):
    """Embeddings with `sparse=True` train as in one process."""

    def build(self) -> None:
        """Two kinds."""
        super().build()
        self.rows = nn.Embedding(7, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(9, WIDTH, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        """Rows by the signs of the features."""
        picks = (x[:, :3] > 0).long() + torch.arange(3) * 2
        hidden = self.embed(x) + self.rows(picks[:, 0]) + self.bags(picks)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@habit()
class ParameterWithoutElements(Habitual):
    """A parameter without elements trains, and can be saved."""

    def build(self) -> None:
        """And one of a single element."""
        super().build()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        """Use both."""
        return super().forward(x) * self.scale + self.nothing.sum()

    def configure_optimizers(self) -> Any:
        """With state."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save once."""
        if batch_idx == 2:
            folder = self.trainer.strategy.broadcast(tempfile.mkdtemp(prefix="nnx-habit-"))
            self.trainer.save_checkpoint(f"{folder}/last.ckpt")
            self.trainer.strategy.barrier()
            shutil.rmtree(folder, ignore_errors=True)


@habit(steps=6)
class FrozenInMidRun(Habitual):
    """Layers that are frozen after some steps stay as they are, until they are unfrozen."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Two steps without a block and the first layer."""
        if batch_idx in (2, 4):
            self.blocks[0].requires_grad_(batch_idx == 4)
            self.embed.requires_grad_(batch_idx == 4)


@habit()
class OwnBackward(Habitual):
    """A `backward` that the module overrides is what is run."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Half of the loss."""
        super().backward(loss * 0.5, *args, **kwargs)


@habit(accumulate=2)
class OwnBackwardWhileAccumulating(OwnBackward):
    """It is so where gradients accumulate over two batches."""


@habit()
class CountedSteps(Habitual):
    """What a step counts, collects and draws before it calls the model is counted once."""

    steps_of_all: ClassVar[int] = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        type(self).steps_of_all = 0
        self.count, self.names, self.total = 0, dict.fromkeys(["steps"], 0), torch.zeros(())
        self.generator = torch.Generator().manual_seed(5)
        self.rates = iter([1.0 - 0.05 * step for step in range(100)])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Weighted by all of that."""
        self.count += 1
        self.names["steps"] += 1
        self.total += 1
        type(self).steps_of_all += 1
        noise = torch.rand((), generator=self.generator)
        weight = self.count + self.names["steps"] + self.total + self.steps_of_all
        loss = self.loss([batch[0] * (1 + 0.1 * noise), batch[1]]) * next(self.rates) * weight / 4
        self.record(loss)
        return loss

"""Models of the kinds that tracing silently gets wrong, trained and compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from jobs.nnscaler_defect_jobs import Strategy, make_trainer, mean_over_ranks
from jobs.nnscaler_models import GLOBAL_BATCH, Batch, Batches

WIDTH, VOCABULARY, LENGTH = 16, 32, 6


class Planted(LightningModule):
    """Embeds tokens and predicts labels; the special feature is in `middle` or in the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.calls = 0
        self.prepare()

    def prepare(self) -> None:
        """Add the special feature."""

    def middle(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(self.middle(self.embed(ids), mask))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self(**batch)
        self.losses.append(mean_over_ranks(loss))
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.validated.append(mean_over_ranks(self(**batch)))

    def batch(self, number: int, size: int = GLOBAL_BATCH) -> Batch:
        """A global batch; the first one, which is traced, has no padding."""
        generator = torch.Generator().manual_seed(number)
        ids, labels = torch.randint(VOCABULARY, (2, size, LENGTH), generator=generator)
        mask = torch.ones(size, LENGTH)
        mask[:, LENGTH - number :] = 0.0
        return {"ids": ids, "labels": labels, "mask": mask}

    def loader(self, size: int = GLOBAL_BATCH) -> Any:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        batches = [self.batch(number, size) for number in range(4)]
        return DataLoader(Batches(batches, size=size, **kwargs), batch_size=None)

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return self.loader()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class AliasedDummies(Planted):
    """The usual dummy of a language model: labels are the ids themselves."""

    @property
    def dummy_forward_args(self) -> dict[str, Tensor]:
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        return {"ids": ids, "labels": ids, "mask": torch.ones(2, LENGTH)}


class Tied(Planted):
    def prepare(self) -> None:
        self.head.weight = self.embed.weight


class Masked(Planted):
    """A mask that is all ones where it is traced and is not elsewhere."""

    def middle(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k = self.up(x).chunk(2, dim=-1)
        allowed = mask.bool()[:, None, None, :]
        seen = F.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None], attn_mask=allowed)
        return x + seen[:, 0]


class OtherSize(Planted):
    """Evaluates larger batches than it trains on."""

    def val_dataloader(self) -> Any:
        return self.loader(2 * GLOBAL_BATCH)


class Experts(Planted):
    """A mixture of experts, each of which takes as many tokens as chose it."""

    def prepare(self) -> None:
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def middle(self, x: Tensor, mask: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == number)
            out = out.index_add(0, mine, weight[mine, None] * expert(tokens[mine]))
        return x + out.view_as(x)


class Checkpointed(Planted):
    """Recomputes its middle in the backward pass."""

    def middle(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self._counted, x, use_reentrant=False)

    def _counted(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(F.gelu(self.up(x)))


class Hooked(Planted):
    """A hook that changes a layer's output."""

    def prepare(self) -> None:
        self.up.register_forward_hook(self._louder)

    def _louder(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return 2 * output


PLANTED: dict[str, Callable[[], Planted]] = {
    each.__name__: each for each in (AliasedDummies, Tied, Masked, OtherSize, Experts, Checkpointed, Hooked)
}


def train_planted(strategy: Strategy, devices: int, model: str) -> dict[str, Any]:
    """Train a model, and return its counts."""
    module = PLANTED[model]()
    make_trainer(strategy, devices).fit(module)
    return {"losses": module.losses, "validated": module.validated, "calls": module.calls}

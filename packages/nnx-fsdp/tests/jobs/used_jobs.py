"""Jobs of ranks that use different parameters in one step, under FSDP2 engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nnx_conformance.checks.user_patterns.rank_dependent import Routed, only_for
from nnx_conformance.subject import Subject
from nnx_conformance.task import WIDTH, Block, Outcome, Task
from nnx_conformance.training import fit
from nnx_core.errors import UnsupportedError


class Swapped(Routed):
    """Each rank uses one of two experts, one parameter without a dimension, and nobody uses the last."""

    def build(self) -> None:
        """Make the experts, an unused layer and a layer that cannot be sharded."""
        super().build()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList(torch.tensor(1.0) for _ in range(2))

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Return the result scaled by the expert's own parameter."""
        out = super().experts(x, hidden)
        for sign, scale in zip((1, -1), self.scales, strict=True):
            rows = (sign * x[:, 0] > 0)[:, None]
            if rows.any():
                out = torch.where(rows, out * scale, out)
        return out

    def on_after_backward(self) -> None:
        """Check that a parameter that no rank used has no gradient, so that no optimizer changes it."""
        assert self.never.weight.grad is None


class BlocksByChoice(Routed):
    """Experts that `auto_wrap_policy` makes units of."""

    def build(self) -> None:
        """Blocks in the place of layers."""
        super().build()
        self.left, self.right = Block(), Block()  # type: ignore[assignment]


class Mixture(nn.Module):
    """A block whose experts a router chooses between."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Pass each row through the expert of its number."""
        parts = [only_for(chosen == number, expert, hidden) for number, expert in enumerate(self.experts)]
        return hidden + torch.stack(parts).sum(0)


class ExpertsInBlocks(Routed):
    """Repeated blocks, which all ranks call in order, with experts inside that ranks choose between."""

    def build(self) -> None:
        """Mixtures in the place of blocks."""
        super().build()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Route by the first feature."""
        hidden = self.embed(x) + self.left(self.embed(x)) + self.right(self.embed(x))
        for block in self.blocks:
            hidden = block(hidden, (x[:, 0] > 0).long())
        return self.head(hidden)  # type: ignore[no-any-return]


def train(strategy: str, options: dict[str, Any], model: type[Routed], **settings: Any) -> Outcome:
    """Train for a few steps."""
    module = Task(model=model, steps=4, **settings).module()
    return fit(Subject(strategy, options=options), module.task, module=module)


def refuse(strategy: str, options: dict[str, Any], model: type[Routed] = BlocksByChoice) -> str:
    """Return the error on this rank."""
    try:
        train(strategy, options, model)
    except UnsupportedError as error:
        return str(error)
    return "it trained"

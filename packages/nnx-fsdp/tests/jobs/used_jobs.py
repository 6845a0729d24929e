"""Jobs of ranks that use different parameters in one step, under FSDP2 engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nnx_conformance.checks.habits_ranks import Routed
from nnx_conformance.subject import Subject
from nnx_conformance.task import WIDTH, Block, Outcome, Task
from nnx_conformance.training import fit
from nnx_core.errors import UnsupportedError


class Swapped(Routed):
    """Each rank uses one of two experts, one parameter without a dimension, and nobody uses the last."""

    def build(self) -> None:
        """Beside the experts, what is never used and what cannot be sharded."""
        super().build()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ParameterList(torch.tensor(1.0) for _ in range(2))

    def experts(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Scaled by what belongs to the expert."""
        out = super().experts(x, hidden)
        for sign, scale in zip((1, -1), self.scales, strict=True):
            rows = (sign * x[:, 0] > 0)[:, None]
            if rows.any():
                out = torch.where(rows, out * scale, out)
        return out

    def on_after_backward(self) -> None:
        """What no rank used has no gradient, so that no optimizer changes it."""
        assert self.never.weight.grad is None


class BlocksByChoice(Routed):
    """Experts that `auto_wrap_policy` makes units of."""

    def build(self) -> None:
        """Blocks in the place of layers."""
        super().build()
        self.left, self.right = Block(), Block()  # type: ignore[assignment]


def train(strategy: str, options: dict[str, Any], model: type[Routed], **settings: Any) -> Outcome:
    """Train for a few steps."""
    module = Task(model=model, steps=4, **settings).module()
    return fit(Subject(strategy, options=options), module.task, module=module)


def refuse(strategy: str, options: dict[str, Any]) -> str:
    """What the error says on this rank."""
    try:
        train(strategy, options, BlocksByChoice)
    except UnsupportedError as error:
        return str(error)
    return "it trained"

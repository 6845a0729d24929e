"""A backward contains another one, or fails while training continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nnx_conformance.patterns import ManualPattern, UserPattern, shared_job

pattern = shared_job()


class _Recomputed(torch.autograd.Function):
    """Runs a layer without a graph, and runs backward through it in its own backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            return layer(inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.layer(inputs)
        torch.autograd.backward(outputs, gradient)
        return inputs.grad, None


class _Through(UserPattern):
    """Runs each block inside a function that a subclass chooses."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = self.through(block, hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def through(self, block: nn.Module, hidden: Tensor) -> Tensor:
        raise NotImplementedError


@pattern()
class BackwardInsideBackward(_Through):
    """Layers train when a Function's backward calls `torch.autograd.backward` to get their gradients."""

    def through(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Recompute as reversible layers and fused losses do."""
        return _Recomputed.apply(hidden, block)  # type: ignore[no-untyped-call, no-any-return]


@pattern()
class ReentrantCheckpointing(_Through):
    """Layers under `checkpoint(..., use_reentrant=True)` train as without it."""

    def through(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Checkpoint as older transformers do."""
        return checkpoint(block, hidden, use_reentrant=True)  # type: ignore[no-any-return]


@pattern(accumulate=2)
class ReentrantCheckpointingWhileAccumulating(ReentrantCheckpointing):
    """Reentrant checkpoints train while gradients accumulate over two batches."""


@pattern()
class ReentrantCheckpointingOnRankZero(_Through):
    """Layers that only rank 0 recomputes by reentrant checkpoints train as without it."""

    ranks_differ = True

    def through(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Compute the same numbers with and without recomputation."""
        if self.trainer.is_global_zero:
            return checkpoint(block, hidden, use_reentrant=True)  # type: ignore[no-any-return]
        return block(hidden)  # type: ignore[no-any-return]


pattern = shared_job()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise RuntimeError("out of memory")
        return gradient, None


@pattern()
class BackwardErrorCaught(ManualPattern):
    """After a caught error in backward, the next step has no gradient of the failed one."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        """Place the failure where the last layers already have gradients."""
        hidden = self.blocks[0](self.embed(x))
        failing: Callable[..., Tensor] = _Failing.apply
        return self.head(self.blocks[1](failing(hidden, self.fails)))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Skip the second batch, whose backward fails."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.fails = index == 1
        loss = self.recorded_loss(batch)
        try:
            self.manual_backward(loss)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            optimizer.zero_grad()
            return
        optimizer.step()


pattern = shared_job()


class _Clipped(nn.Linear):
    """Clips its weight before it computes."""

    way = "copy_"

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            small = self.weight.clamp(-0.1, 0.1)
            if self.way == "copy_":
                self.weight.copy_(small)
            elif self.way == "data":
                self.weight.data = small
            else:
                self.weight.data.copy_(small)
        return super().forward(input)


class _Clipping(UserPattern):
    way = ""

    def build(self) -> None:
        super().build()
        self.head = _Clipped(self.head.in_features, self.head.out_features)
        self.head.way = self.way


@pattern()
class WeightWrittenInForward(_Clipping):
    """A weight that its layer writes in place in forward keeps the written values."""

    way = "copy_"


@pattern()
class WeightDataWrittenInForward(_Clipping):
    """A weight that its layer writes through `.data` in forward keeps the written values."""

    way = "data.copy_"


@pattern()
class WeightDataAssignedInForward(_Clipping):
    """A weight whose `.data` its layer assigns in forward keeps the assigned values."""

    way = "data"

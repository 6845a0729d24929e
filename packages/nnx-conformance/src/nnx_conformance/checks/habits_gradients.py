"""Gradients are where PyTorch has them: user code reads, scales, zeroes, replaces and clips `p.grad`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from nnx_checkpoint.collective import is_distributed
from nnx_conformance.habits import Habitual, Manual, chapter
from nnx_core.errors import NnxError

habit = chapter()


_NORM = 0.05
"""Far below that of the first gradients."""


class _Clipping(Habitual):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """With torch's own function."""
        self.look(clip_grad_norm_(self.parameters(), _NORM))


@habit()
class ClippedByHand(_Clipping):
    """`clip_grad_norm_` in `on_before_optimizer_step` clips by the norm of one process, and returns it."""


@habit(accumulate=2, steps=3)
class ClippedByHandWhileAccumulating(_Clipping):
    """It does so where gradients accumulate over two batches."""


@habit()
class ClippedInManualOptimization(Manual):
    """`clip_grad_norm_` between `manual_backward` and `step` clips by the norm of one process."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """By hand."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        self.look(clip_grad_norm_(self.parameters(), _NORM))
        optimizer.step()


@habit(clip=1.0)
class ConfiguredClipping(Habitual):
    """What an overridden `configure_gradient_clipping` does to gradients by itself is stepped with."""

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """The blocks by norm, the rest by value."""
        clip_grad_norm_(self.blocks.parameters(), _NORM)
        clip_grad_value_([*self.embed.parameters(), *self.head.parameters()], 0.01)


@habit()
class ScaledGradients(Habitual):
    """Gradients that are scaled in `on_after_backward` are stepped with as they are then."""

    def on_after_backward(self) -> None:
        """A tenth of the head's."""
        for parameter in self.head.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1)


@habit()
class ZeroedGradients(Habitual):
    """Gradients, and rows of them, that are zeroed in `on_after_backward` have no effect."""

    def on_after_backward(self) -> None:
        """A row of one, all of another, and a third is dropped."""
        head, embed = self.head.weight.grad, self.embed.bias.grad
        assert head is not None and embed is not None
        head[1] = 0
        embed.zero_()
        self.head.bias.grad = None


@habit()
class AssignedGradients(Habitual):
    """A tensor that is assigned to `p.grad` takes the gradient's place."""

    def on_after_backward(self) -> None:
        """Half of each."""
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5


@habit()
class CentralizedGradients(Habitual):
    """What hooks compute of a whole gradient, such as the mean of its columns, is that of one process."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Take the mean off every matrix."""
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad -= parameter.grad.mean(dim=0, keepdim=True)


@habit()
class LoggedGradientNorms(Habitual):
    """Lightning's `grad_norm` gives the norms of one process, and they can be logged."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Each parameter's, and the total."""
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.look(*norms.values())


@habit()
class SkippedLargeGradients(Habitual):
    """A step whose gradient norm is too large can be left out, on all ranks alike."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Zero them then; the first ones are."""
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.look(norm)
        if len(self.seen) % 2:
            optimizer.zero_grad()


class _Looking(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        module.head.weight.grad.mul_(0.5)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        module: Any = pl_module
        module.look(*(p.grad.abs().max() for p in module.parameters()))


@habit()
class GradientsInACallback(Habitual):
    """A callback reads and changes gradients as the module's own hooks do."""

    def configure_callbacks(self) -> list[Callback]:
        """One that does."""
        return [_Looking()]


@habit()
class GradientsInManualOptimization(Manual):
    """Between `manual_backward` and `step` gradients can be read, scaled, and replaced."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """By hand."""
        optimizer: Any = self.optimizers()
        self.manual_backward(self.recorded_loss(batch))
        for parameter in self.parameters():
            assert parameter.grad is not None
            self.look(parameter.grad.norm())
            parameter.grad = parameter.grad * 0.9
            parameter.grad *= 1 + parameter.dim()
        optimizer.step()
        optimizer.zero_grad()


@habit()
class ClippedByParamGroups(Habitual):
    """`clip_grad_norm_` over the parameters in the optimizer's groups clips by the norm of one process."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """As a helper does that gets nothing but the optimizer."""
        self.look(clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], _NORM))


@habit()
class GradientsReadOnRankZero(Habitual):
    """Gradients that only rank 0 reads, to print them, are those of one process, and no rank waits."""

    ranks_differ = True

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The head's norm."""
        head: Any = self.head.weight
        norm = float(head.grad.norm()) if self.trainer.is_global_zero else 0.0
        self.look(self.trainer.strategy.broadcast(norm))


@habit()
class OwnOptimizerStep(Habitual):
    """An `optimizer_step` that runs the closure itself, clips, and then steps is right."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """With a warm-up."""
        optimizer_closure()
        self.look(clip_grad_norm_(self.parameters(), _NORM))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (batch_idx + 1)
        optimizer.step(closure=lambda: None)


@habit()
class BackwardOnTheLoss(Manual):
    """`loss.backward()` in manual optimization does what `self.manual_backward(loss)` does."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """As in a plain loop, with the plain optimizer."""
        optimizer: Any = self.optimizers(use_pl_optimizer=index % 2 == 0)
        optimizer.zero_grad()
        loss: Any = self.recorded_loss(batch)
        loss.backward()
        optimizer.step()


@habit()
class DescentByHand(Manual):
    """Weights that manual optimization changes by their gradients, without the optimizer, are right."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """The optimizer only counts the step."""
        optimizer: Any = self.optimizers()
        self.manual_backward(self.recorded_loss(batch))
        with torch.no_grad():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        optimizer.step()


@habit()
class CombinedGradients(Manual):
    """Gradients of two losses that are taken apart, combined by their angle and assigned, as in surgery."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Without the part of one that is against the other."""
        optimizer: Any = self.optimizers()
        loss, trained = self.recorded_loss(batch), list(self.parameters())
        other = self(batch[0]).square().mean()
        first = torch.autograd.grad(loss, trained, retain_graph=True)
        second = torch.autograd.grad(other, trained)
        for parameter, one, two in zip(trained, first, second, strict=True):
            along = (one * two).sum() / (one.square().sum() + 1e-6)
            parameter.grad = one + (two if along >= 0 else two - along * one)
        optimizer.step()
        optimizer.zero_grad()


@habit()
class SplitBackward(Manual):
    """A pipeline schedule of torch's that computes gradients of inputs first and of weights later is right.

    Here each rank has all stages, and its own samples.
    """

    schedule = "InterleavedZeroBubble"
    pipe: Any = None

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Two microbatches through two stages; one plain process needs none."""
        optimizer: Any = self.optimizers()
        if is_distributed():
            self.record(self._through_stages(*batch))
        else:
            self.manual_backward(self.recorded_loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def _through_stages(self, inputs: Tensor, targets: Tensor) -> Tensor:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        if self.pipe is None:
            self.pipe, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        parts = (nn.Sequential(self.embed, self.blocks[0]), nn.Sequential(self.blocks[1], self.head))
        stages: Any = [
            PipelineStage(part, number, len(parts), inputs.device, group=self.pipe)
            for number, part in enumerate(parts)
        ]
        losses: list[Tensor] = []
        schedule: Any = get_schedule_class(self.schedule)
        try:
            schedule(stages, n_microbatches=2, loss_fn=mse_loss).step(inputs, target=targets, losses=losses)
        except RuntimeError as error:  # torch's, around what a backward has raised
            raise error.__cause__ if isinstance(error.__cause__, NnxError) else error from None
        return torch.stack(losses).mean()


@habit()
class RememberedGradients(Habitual):
    """Gradients of former steps, kept by the module, that are added in `on_after_backward`."""

    def on_after_backward(self) -> None:
        """Momentum by hand."""
        kept: dict[str, Tensor] = self.__dict__.setdefault("kept", {})
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            if name in kept:
                parameter.grad = parameter.grad + 0.5 * kept[name]
            kept[name] = parameter.grad.clone()

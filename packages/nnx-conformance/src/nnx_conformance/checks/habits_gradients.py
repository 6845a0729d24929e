"""Gradients are where PyTorch has them, and optimizers may look at more than one element of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from nnx_base.ranks import is_distributed
from nnx_conformance.habits import Habitual, Manual, chapter
from nnx_core.errors import NnxError

# Gradients are where PyTorch has them: user code reads, scales, zeroes, replaces and clips `p.grad`.


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
        for stage in stages:
            # Torch 2.11 first sends to the neighbours: here to the same rank, which gloo cannot.
            stage._get_init_p2p_neighbors_ops = list
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


# Optimizers that look at more than one element: at whole tensors, at all of them, or twice.


habit = chapter()


class _Updating(Optimizer):
    """Subtracts what `update` makes of each gradient."""

    def __init__(self, params: Any, lr: float = 0.05, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.update(parameter, group) * group["lr"])
        return loss

    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class _Trust(_Updating):
    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        gradient: Tensor | None = parameter.grad
        assert gradient is not None
        return gradient * ((parameter.norm() + 1e-3) / (gradient.norm() + 1e-3))  # type: ignore[no-any-return]


@habit()
class Lamb(Habitual):
    """An optimizer with a trust ratio, the norm of a weight over that of its gradient, is right."""

    def configure_optimizers(self) -> Any:
        """Over everything."""
        return _Trust(self.parameters())


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, by a few rounds of Newton's and Schulz's iteration."""
    found = matrix / (matrix.norm() + 1e-3)
    for _ in range(4):
        found = 1.5 * found - 0.5 * found @ found.T @ found
    return found  # type: ignore[no-any-return]


class _Muon(_Updating):
    """Matrices are orthogonalized where the group says so, or where they are large."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        momentum: Tensor = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]
        is_large = parameter.dim() == 2 and len(parameter) >= 16
        wanted = is_large if group.get("use_muon") is None else group["use_muon"]
        return _orthogonal(momentum) if wanted else momentum


@habit()
class Muon(Habitual):
    """`torch.optim.Muon` over the matrices of the blocks is right."""

    def configure_optimizers(self) -> Any:
        """At a rate at which the rounding of its bfloat16 stays below the tolerance."""
        matrices = [parameter for parameter in self.blocks.parameters() if parameter.dim() == 2]
        return optim.Muon(matrices, lr=0.0005)


@habit()
class MuonForLargeMatrices(Habitual):
    """A hand-written Muon that takes matrices of at least 16 rows, and descends with the rest, is right."""

    def configure_optimizers(self) -> Any:
        """Over everything."""
        return _Muon(self.parameters())


@habit()
class MuonWithAuxiliaryGroup(Habitual):
    """A hand-written Muon with a flag per group, of which the first only descends, is right."""

    def configure_optimizers(self) -> Any:
        """The matrices of the blocks, after the rest."""
        matrices = [parameter for parameter in self.blocks.parameters() if parameter.dim() == 2]
        rest = [parameter for parameter in self.parameters() if all(parameter is not m for m in matrices)]
        groups = [{"params": rest, "use_muon": False}, {"params": matrices, "use_muon": True}]
        return _Muon(groups)


class _Preconditioned(_Updating):
    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.dim() != 2:
            return gradient
        state = self.state[parameter]
        side = state.setdefault("side", torch.eye(len(gradient), dtype=gradient.dtype))
        side.add_(gradient @ gradient.T)
        return torch.linalg.solve(side, gradient)  # type: ignore[no-any-return]


@habit()
class Shampoo(Habitual):
    """An optimizer with a preconditioner for each matrix, whose state has a shape of its own, is right."""

    def configure_optimizers(self) -> Any:
        """Over everything."""
        return _Preconditioned(self.parameters())


@habit()
class Adafactor(Habitual):
    """`torch.optim.Adafactor`, whose state are means of rows and columns, is right."""

    def configure_optimizers(self) -> Any:
        """Over everything."""
        return optim.Adafactor(self.parameters(), lr=0.02, eps=(1e-3, 1e-3))


class _Normalized(_Updating):
    """Descends by the gradient over its norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([parameter.grad.norm() for parameter in trained]).norm()
        super().step()
        return loss

    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad / self.norm  # type: ignore[no-any-return]


@habit()
class GradientNormOptimizer(Habitual):
    """An optimizer that divides by the norm over all gradients is right."""

    def configure_optimizers(self) -> Any:
        """Over everything."""
        return _Normalized(self.parameters(), lr=0.2)


class _Sam(optim.SGD):
    """Steps with the gradients of a point further up, which it asks its closure for."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        moved = climb([p for group in self.param_groups for p in group["params"]])
        evaluate()
        for parameter, distance in moved:
            parameter.sub_(distance)
        super().step()
        return loss


@torch.no_grad()
def climb(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Go up by a fixed length, and return how far each parameter went."""
    trained = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, gradient in trained]).norm()
    moved = [(parameter, gradient * (0.3 / norm)) for parameter, gradient in trained]
    for parameter, distance in moved:
        parameter.add_(distance)
    return moved


@habit(steps=3)
class SamByClosure(Habitual):
    """SAM, which evaluates its closure a second time at weights it has moved, is right."""

    def configure_optimizers(self) -> Any:
        """Over everything."""
        return _Sam(self.parameters(), lr=0.1)


@habit(steps=3)
class SamInManualOptimization(Manual):
    """SAM by hand, which moves the weights between two backward passes, is right."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Up, look, down, step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        moved = climb(list(self.parameters()))
        optimizer.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        with torch.no_grad():
            for parameter, distance in moved:
                parameter.sub_(distance)
        optimizer.step()


@habit(steps=3)
class Lbfgs(Habitual):
    """LBFGS, which looks at all parameters as one vector, is right."""

    def configure_optimizers(self) -> Any:
        """Few evaluations, as rounding grows from one to the next."""
        return optim.LBFGS(self.parameters(), lr=0.05, max_iter=2)


class _Adaptive(Habitual):
    def configure_optimizers(self) -> Any:
        """Over everything, with two tensors of state for each parameter."""
        return optim.AdamW(self.parameters(), lr=0.02)


@habit()
class OptimizerStateRead(_Adaptive):
    """Moments that are read between steps and in a step, by parameter and all of them, are whole."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """As it is, after a look."""
        state: Any = self.optimizers(use_pl_optimizer=False).state  # type: ignore[union-attr]
        self.look(sum(float(state[p]["exp_avg"].norm()) for p in self.parameters() if p in state))
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Through the state, and through a state dict."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.look(sum(float(entries["exp_avg_sq"].sqrt().sum()) for entries in optimizer.state.values()))
        held = optimizer.state_dict()["state"].values()
        self.look(sum(float(entries["exp_avg"].abs().max()) for entries in held))


@habit(steps=6)
class OptimizerStateChanged(_Adaptive):
    """Moments that are scaled, exchanged, loaded and cleared between steps have that effect on the next."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One after the other."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        if batch_idx == 1:
            for entries in optimizer.state.values():
                entries["exp_avg"].mul_(0.5)
            self.__dict__["kept"] = copy.deepcopy(optimizer.state_dict())
        elif batch_idx == 2:
            moment = optimizer.state[self.head.weight]["exp_avg"]
            optimizer.state[self.head.weight]["exp_avg"] = torch.ones(tuple(moment.shape)) * 0.01
        elif batch_idx == 3:
            optimizer.load_state_dict(self.__dict__["kept"])
        elif batch_idx == 4:
            optimizer.state.clear()

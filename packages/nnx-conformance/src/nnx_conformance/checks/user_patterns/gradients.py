"""User code reads and changes gradients, and optimizers read more than one element of them."""

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
from nnx_conformance.patterns import ManualPattern, UserPattern, shared_job
from nnx_core.errors import NnxError

# Gradients stand in `p.grad`, so that user code can read, scale, zero, replace and clip them.


pattern = shared_job()


_NORM = 0.05
"""Far below the norm of the first gradients, so that clipping changes them."""


class _Clipping(UserPattern):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.observe(clip_grad_norm_(self.parameters(), _NORM))


@pattern()
class ClipGradNormInHook(_Clipping):
    """`clip_grad_norm_` in `on_before_optimizer_step` clips by one process's norm, and returns it."""


@pattern(accumulate=2, steps=3)
class ClipGradNormInHookWhileAccumulating(_Clipping):
    """`clip_grad_norm_` in a hook clips by the norm of gradients accumulated over two batches."""


@pattern()
class ClipGradNormInManualOptimization(ManualPattern):
    """`clip_grad_norm_` between `manual_backward` and `step` clips by the norm of one process."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.recorded_loss(batch))
        self.observe(clip_grad_norm_(self.parameters(), _NORM))
        optimizer.step()


@pattern(clip=1.0)
class ConfigureGradientClipping(UserPattern):
    """The optimizer steps with the gradients that an overridden `configure_gradient_clipping` leaves."""

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the blocks by norm and the other layers by value."""
        clip_grad_norm_(self.blocks.parameters(), _NORM)
        clip_grad_value_([*self.embed.parameters(), *self.head.parameters()], 0.01)


@pattern()
class GradientsScaledInHook(UserPattern):
    """The optimizer steps with gradients as `on_after_backward` scales them."""

    def on_after_backward(self) -> None:
        for parameter in self.head.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1)


@pattern()
class GradientsZeroedInHook(UserPattern):
    """Gradients, and rows of them, that `on_after_backward` zeroes have no effect."""

    def on_after_backward(self) -> None:
        """Zero one row, zero a gradient, and drop a third one."""
        head, embed = self.head.weight.grad, self.embed.bias.grad
        assert head is not None and embed is not None
        head[1] = 0
        embed.zero_()
        self.head.bias.grad = None


@pattern()
class GradientsAssignedInHook(UserPattern):
    """A tensor assigned to `p.grad` replaces the gradient."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5


@pattern()
class GradientCentralization(UserPattern):
    """Hooks compute statistics of a full gradient, such as column means, as in one process."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Subtract the column means from every matrix."""
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad -= parameter.grad.mean(dim=0, keepdim=True)


@pattern()
class GradientNormsLogged(UserPattern):
    """Lightning's `grad_norm` returns the norms of one process, and `self.log_dict` logs them."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.observe(*norms.values())


@pattern()
class LargeGradientsSkipped(UserPattern):
    """User code can skip a step with a large gradient norm, on all ranks alike."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Zero the gradients in every second step, starting with the first."""
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.observe(norm)
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
        module.observe(*(p.grad.abs().max() for p in module.parameters()))


@pattern()
class GradientsChangedInCallback(UserPattern):
    """A callback reads and changes gradients as the module's own hooks do."""

    def configure_callbacks(self) -> list[Callback]:
        return [_Looking()]


@pattern()
class GradientsChangedInManualOptimization(ManualPattern):
    """User code reads, scales and replaces gradients between `manual_backward` and `step`."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.recorded_loss(batch))
        for parameter in self.parameters():
            assert parameter.grad is not None
            self.observe(parameter.grad.norm())
            parameter.grad = parameter.grad * 0.9
            parameter.grad *= 1 + parameter.dim()
        optimizer.step()
        optimizer.zero_grad()


@pattern()
class ClipGradNormByParamGroups(UserPattern):
    """`clip_grad_norm_` over the optimizer's param groups clips by the norm of one process."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip as a helper function does that only has the optimizer."""
        self.observe(clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], _NORM))


@pattern()
class GradientsReadOnRankZero(UserPattern):
    """Gradients that only rank 0 reads equal those of one process, and no rank hangs."""

    ranks_differ = True

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        head: Any = self.head.weight
        norm = float(head.grad.norm()) if self.trainer.is_global_zero else 0.0
        self.observe(self.trainer.strategy.broadcast(norm))


@pattern()
class OptimizerStepOverride(UserPattern):
    """An `optimizer_step` override runs the closure, clips and steps as in one process."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Step with a learning rate that warms up."""
        optimizer_closure()
        self.observe(clip_grad_norm_(self.parameters(), _NORM))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (batch_idx + 1)
        optimizer.step(closure=lambda: None)


@pattern()
class LossBackwardCalledDirectly(ManualPattern):
    """`loss.backward()` in manual optimization does the same as `self.manual_backward(loss)`."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Alternate between Lightning's wrapped optimizer and the plain one."""
        optimizer: Any = self.optimizers(use_pl_optimizer=index % 2 == 0)
        optimizer.zero_grad()
        loss: Any = self.recorded_loss(batch)
        loss.backward()
        optimizer.step()


@pattern()
class SgdByHand(ManualPattern):
    """Manual optimization may update weights from their gradients by hand, without the optimizer."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Update by hand; the optimizer's step only advances the step counter."""
        optimizer: Any = self.optimizers()
        self.manual_backward(self.recorded_loss(batch))
        with torch.no_grad():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        optimizer.step()


@pattern()
class GradientSurgery(ManualPattern):
    """Gradients of two losses, projected and assigned to `p.grad` (gradient surgery), train."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Remove the component of the second gradient that opposes the first."""
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


@pattern()
class PipelineSplitBackward(ManualPattern):
    """Torch's zero-bubble schedule, which splits backward into inputs and weights, trains as in one process.

    Here each rank has all stages, and its own samples.

    """

    schedule = "InterleavedZeroBubble"
    pipe: Any = None

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Run two microbatches through two stages; one plain process needs neither."""
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
        layers = (nn.Sequential(self.embed, self.blocks[0]), nn.Sequential(self.blocks[1], self.head))
        stages: Any = [
            PipelineStage(layer, number, len(layers), inputs.device, group=self.pipe)
            for number, layer in enumerate(layers)
        ]
        for stage in stages:
            # Torch 2.11 first sends to neighbours. Here these are the same rank, to which gloo cannot send.
            stage._get_init_p2p_neighbors_ops = list
        losses: list[Tensor] = []
        schedule: Any = get_schedule_class(self.schedule)
        try:
            schedule(stages, n_microbatches=2, loss_fn=mse_loss).step(inputs, target=targets, losses=losses)
        except RuntimeError as error:  # torch wraps the error that a backward has raised
            raise error.__cause__ if isinstance(error.__cause__, NnxError) else error from None
        return torch.stack(losses).mean()


@pattern()
class GradientsKeptBetweenSteps(UserPattern):
    """Gradients that the module keeps from earlier steps can be added in `on_after_backward`."""

    def on_after_backward(self) -> None:
        """Add momentum by hand."""
        kept: dict[str, Tensor] = self.__dict__.setdefault("kept", {})
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            if name in kept:
                parameter.grad = parameter.grad + 0.5 * kept[name]
            kept[name] = parameter.grad.clone()


# Optimizers read more than one element: a full tensor, all tensors, or the gradients twice.


pattern = shared_job()


class _Updating(Optimizer):
    """Subtracts the result of `update` from each parameter."""

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


@pattern()
class Lamb(UserPattern):
    """An optimizer with a trust ratio (norm of weight over norm of gradient) trains as in one process."""

    def configure_optimizers(self) -> Any:
        return _Trust(self.parameters())


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, by a few Newton-Schulz iterations."""
    found = matrix / (matrix.norm() + 1e-3)
    for _ in range(4):
        found = 1.5 * found - 0.5 * found @ found.T @ found
    return found  # type: ignore[no-any-return]


class _Muon(_Updating):
    """Orthogonalizes matrices if the group's flag says so, or if they are large."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        momentum: Tensor = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]
        is_large = parameter.dim() == 2 and len(parameter) >= 16
        wanted = is_large if group.get("use_muon") is None else group["use_muon"]
        return _orthogonal(momentum) if wanted else momentum


@pattern()
class Muon(UserPattern):
    """`torch.optim.Muon` over the matrices of the blocks trains as in one process."""

    def configure_optimizers(self) -> Any:
        """Choose a low rate, at which the rounding of Muon's bfloat16 stays below the tolerance."""
        matrices = [parameter for parameter in self.blocks.parameters() if parameter.dim() == 2]
        return optim.Muon(matrices, lr=0.0005)


@pattern()
class MuonForLargeMatrices(UserPattern):
    """A hand-written Muon, which only orthogonalizes large matrices, trains as in one process."""

    def configure_optimizers(self) -> Any:
        return _Muon(self.parameters())


@pattern()
class MuonWithParamGroups(UserPattern):
    """A hand-written Muon with a `use_muon` flag per param group trains as in one process."""

    def configure_optimizers(self) -> Any:
        """Put the matrices of the blocks into the second group."""
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


@pattern()
class Shampoo(UserPattern):
    """An optimizer with a preconditioner per matrix, of its own shape, trains as in one process."""

    def configure_optimizers(self) -> Any:
        return _Preconditioned(self.parameters())


@pattern()
class Adafactor(UserPattern):
    """`torch.optim.Adafactor`, whose state holds means of rows and columns, trains as in one process."""

    def configure_optimizers(self) -> Any:
        return optim.Adafactor(self.parameters(), lr=0.02, eps=(1e-3, 1e-3))


class _Normalized(_Updating):
    """Descends by the gradient divided by the norm over all gradients."""

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


@pattern()
class GlobalNormOptimizer(UserPattern):
    """An optimizer that divides by the norm over all gradients trains as in one process."""

    def configure_optimizers(self) -> Any:
        return _Normalized(self.parameters(), lr=0.2)


class _Sam(optim.SGD):
    """Steps with the gradients at a point uphill, where it evaluates the closure again."""

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
    """Move uphill by a fixed length and return each parameter's displacement."""
    trained = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, gradient in trained]).norm()
    moved = [(parameter, gradient * (0.3 / norm)) for parameter, gradient in trained]
    for parameter, distance in moved:
        parameter.add_(distance)
    return moved


@pattern("repeated_closures", steps=3)
class SamByClosure(UserPattern):
    """SAM, which evaluates its closure again at moved weights, trains as in one process."""

    def configure_optimizers(self) -> Any:
        return _Sam(self.parameters(), lr=0.1)


@pattern(steps=3)
class SamInManualOptimization(ManualPattern):
    """Hand-written SAM, which moves the weights between two backward passes, trains as in one process."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """Climb, evaluate again, return and step."""
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


@pattern("repeated_closures", steps=3)
class Lbfgs(UserPattern):
    """LBFGS, which treats all parameters as one vector, trains as in one process."""

    def configure_optimizers(self) -> Any:
        """Evaluate rarely, because rounding errors grow with each evaluation."""
        return optim.LBFGS(self.parameters(), lr=0.05, max_iter=2)


class _Adaptive(UserPattern):
    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=0.02)


@pattern()
class OptimizerStateRead(_Adaptive):
    """User code reads unsharded moments during and between steps, by parameter and all at once."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        state: Any = self.optimizers(use_pl_optimizer=False).state  # type: ignore[union-attr]
        self.observe(sum(float(state[p]["exp_avg"].norm()) for p in self.parameters() if p in state))
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the moments through the state and through a state dict."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.observe(sum(float(entries["exp_avg_sq"].sqrt().sum()) for entries in optimizer.state.values()))
        held = optimizer.state_dict()["state"].values()
        self.observe(sum(float(entries["exp_avg"].abs().max()) for entries in held))


@pattern(steps=6)
class OptimizerStateChanged(_Adaptive):
    """Moments that user code scales, assigns, loads or clears affect the next step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Change the moments in a different way after each batch."""
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

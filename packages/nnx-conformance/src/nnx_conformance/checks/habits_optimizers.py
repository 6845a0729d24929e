"""Optimizers that look at more than one element: at whole tensors, at all of them, or twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from nnx_conformance.habits import Habitual, Manual, chapter

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

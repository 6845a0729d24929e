"""Faults in what callbacks and optimizers rely on: weights, gradients, groups and what is frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from faults import Fault
from nnx_tiny.backend import TinyBackend

T = TypeVar("T")
Replaced = Mapping[nn.Parameter, nn.Parameter]

# --- callbacks ----------------------------------------------------------------------------------


class StaleEvaluation(TinyBackend):
    """Evaluates what its last step computed, whatever was put into the parameters since."""

    masters: Mapping[nn.Parameter, Tensor] = {}

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result = step(*args, **kwargs)
        self.masters = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        return result

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if torch.is_grad_enabled():
            return step(*args, **kwargs)
        own = {parameter: parameter.detach().clone() for parameter in self.masters}
        self.copy(self.masters)
        result = step(*args, **kwargs)
        self.copy(own)
        return result

    @torch.no_grad()
    def copy(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, value in values.items():
            parameter.copy_(value)


class MastersWin(StaleEvaluation):
    """Gives back what its last step computed, whatever was put into the parameters since."""

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return step(*args, **kwargs)

    def unparallelize(self, module: nn.Module) -> Replaced:
        self.copy(self.masters)
        return {}


class OneWeightDecay(TinyBackend):
    """Steps all groups with the first one's weight decay."""

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        own = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = own[0]
        result = step(*args, **kwargs)
        for group, decay in zip(optimizer.param_groups, own, strict=True):
            group["weight_decay"] = decay
        return result


class LateAverage(TinyBackend):
    """Leaves the sum of all ranks' gradients in the parameters until the optimizer steps."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * self.context.world_size, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        closure = kwargs.pop("closure", None) or (*args, None)[0]
        if closure is not None:
            closure()
        for gradient in self.gradients(optimizer):
            gradient.local.div_(self.context.world_size)
        return step(lambda: None)


class GroupNamesLost(TinyBackend):
    """Makes the groups anew, with what it knows of them."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.pop("name", None)


class AllTrainable(TinyBackend):
    """Makes every parameter trainable when it lays the module out."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        module.requires_grad_(True)
        return super().parallelize(module, sample)


# --- freezing -----------------------------------------------------------------------------------


class FrozenTrains(TinyBackend):
    """Decides once, when it lays the module out, which parameters train."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.trained = {p: p.requires_grad for p in module.parameters()}
        return super().parallelize(module, sample)

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        for parameter, trains in self.trained.items():
            parameter.requires_grad_(trains)
        return step(*args, **kwargs)


class ThawedNotAveraged(TinyBackend):
    """Averages the gradients of those parameters only that trained from the start."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.late = [p for p in module.parameters() if not p.requires_grad]
        return super().parallelize(module, sample)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        own: list[tuple[nn.Parameter, Tensor]] = []
        hooks = [
            p.register_hook(lambda gradient, p=p: own.append((p, gradient.clone())))
            for p in self.late
            if p.requires_grad
        ]
        super().backward(module, loss, *args, **kwargs)
        for hook in hooks:
            hook.remove()
        for parameter, gradient in own:
            parameter.grad = gradient


class NewGroupsSkipped(TinyBackend):
    """Steps the groups that the optimizer had when training started."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.count = len(optimizers[0].param_groups) if optimizers else 0

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        groups = optimizer.param_groups
        optimizer.param_groups = groups[: self.count]
        result = step(*args, **kwargs)
        optimizer.param_groups = groups
        return result


class FirstRates(TinyBackend):
    """Steps each group at the rate that it had when it was first seen."""

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        rates = self.__dict__.setdefault("rates", [])
        own = [group["lr"] for group in optimizer.param_groups]
        rates += own[len(rates) :]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        result = step(*args, **kwargs)
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate
        return result


_AVERAGING = ("weight_averaging", "ema_weight_averaging", "stochastic_weight_averaging")
_AVERAGES = ("average_by_name", *_AVERAGING)
_LATE = ("unfreezing_by_name", "base_finetuning", "backbone_finetuning")


def _fault(name: str, cls: type, caught_by: str, *also: str) -> Fault:
    return Fault(name=name, target=f"faults.names_callbacks:{cls.__name__}", caught_by=caught_by, also=also)


FAULTS = [
    _fault("evaluation of stale weights", StaleEvaluation, "average_by_name", *_AVERAGING[:2]),
    _fault("an average at the end is overwritten", MastersWin, "weight_averaging", *_AVERAGES),
    _fault("an EMA at the end is overwritten", MastersWin, "ema_weight_averaging", *_AVERAGES),
    _fault("an SWA at the end is overwritten", MastersWin, "stochastic_weight_averaging", *_AVERAGES),
    _fault("one weight decay for all groups", OneWeightDecay, "weight_decay_by_name"),
    _fault("sums in parameter.grad", LateAverage, "gradient_norms_by_name"),
    _fault("names of groups lost", GroupNamesLost, "learning_rate_monitor", "weight_decay_by_name"),
    _fault("everything made trainable", AllTrainable, "model_summary", *_LATE[:2]),
    _fault("frozen parameters train on", FrozenTrains, "freezing_by_name", *_LATE),
    _fault("unfrozen parameters not averaged", ThawedNotAveraged, "unfreezing_by_name", *_LATE),
    _fault("added groups skipped", NewGroupsSkipped, "base_finetuning", *_LATE),
    _fault("rates of groups fixed", FirstRates, "backbone_finetuning", "stochastic_weight_averaging"),
]

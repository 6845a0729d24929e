"""Faults in names, in the module itself, and in guarantees for callbacks and optimizers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from faults import EVERYTHING, fault, lightning_api_ranks
from nnx_fsdp.backend import FSDPBackend
from nnx_tiny.backend import TinyBackend

T = TypeVar("T")
Replaced = Mapping[nn.Parameter, nn.Parameter]


def first_layer(module: nn.Module) -> tuple[str, Any]:
    """Return the first of a module's children."""
    return next(module.named_children())


class _Wrapper(nn.Module):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x)


class Prefixed(TinyBackend):
    """Wraps a layer, which changes its name."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        name, layer = first_layer(module)
        if not isinstance(layer, _Wrapper):
            setattr(module, name, _Wrapper(layer))
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Replaced:
        name, layer = first_layer(module)
        setattr(module, name, getattr(layer, "wrapped", layer))
        return {}


class Reordered(TinyBackend):
    """Registers a layer again after training, behind the others."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        name, layer = first_layer(module)
        del module._modules[name]
        module._modules[name] = layer
        return {}


class _Norm(nn.Module):
    forward = nn.LayerNorm.forward


class OtherClass(TinyBackend):
    """Gives layers a class that is not derived from theirs."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        for norm in [part for part in module.modules() if isinstance(part, nn.LayerNorm)]:
            norm.__class__ = _Norm
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Replaced:
        for norm in [part for part in module.modules() if isinstance(part, _Norm)]:
            norm.__class__ = nn.LayerNorm
        return {}


class CopiedLayer(TinyBackend):
    """Trains another object in place of a layer, with the layer's own parameters and hooks."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        name, self.own = first_layer(module)
        other = type(self.own).__new__(type(self.own))
        other.__dict__ = self.own.__dict__
        setattr(module, name, other)
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Replaced:
        setattr(module, first_layer(module)[0], self.own)
        return {}


class ReplacedParameters(TinyBackend):
    """Makes a new parameter object after each step."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.layer = next(part for part in module.modules() if isinstance(part, nn.Linear))
        return super().parallelize(module, sample)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result = step(*args, **kwargs)
        old = self.layer.bias
        self.layer.bias = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
        for group in optimizer.param_groups:
            group["params"] = [self.layer.bias if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[self.layer.bias] = optimizer.state.pop(old)
        return result


class HooksDropped(TinyBackend):
    """Lays out layers without their hooks."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        for layer in module.children():
            for part in layer.modules():
                part._forward_hooks.clear()
        return super().parallelize(module, sample)


class _EngineList(nn.ModuleList):
    """Blocks as the engine sees them."""


class ClassLeft(TinyBackend):
    """Leaves a submodule with the engine's class."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        if hasattr(module, "blocks"):
            module.blocks.__class__ = _EngineList
        return super().parallelize(module, sample)


class LeftFrozen(TinyBackend):
    """Leaves parameters frozen after training."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.requires_grad_(False)
        return {}


def _nothing(*_: Any) -> None:
    """A hook that a pickle can name."""


class HookLeft(TinyBackend):
    """Leaves a no-op hook on a layer."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        first_layer(module)[1].register_forward_pre_hook(_nothing)
        return {}


class LockLeft(TinyBackend):
    """Leaves a lock on the module."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.engine_lock = threading.Lock()  # type: ignore[assignment]
        return {}


class FunctionLeft(TinyBackend):
    """Leaves a function on the module that pickle cannot name."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.engine_function = lambda: None  # type: ignore[assignment]
        return {}


class ShardLeft(FSDPBackend):
    """Forgets to unshard one of the parameters."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        owner = next(part for part in module.modules() if isinstance(part, nn.Linear))
        shard = owner.weight
        replaced = super().unparallelize(module)
        owner.weight = shard
        return replaced


class GradientHookLeft(TinyBackend):
    """Leaves its gradient hook on a parameter."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        list(module.parameters())[-1].register_hook(lambda gradient: gradient / 2)
        return {}


class ForeignModule(TinyBackend):
    """Returns modules of its own class from Fabric."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        own = type(module)
        if own.__name__ == "_Net":
            members = {name: getattr(own, name) for name in ("forward", "answer")}
            module.__class__ = type("EngineNet", (nn.Module,), members)
        return super().parallelize(module, sample)


_AVERAGING = ("weight_averaging", "ema_weight_averaging", "stochastic_weight_averaging")


FAULTS = [
    fault(
        "a layer has another name while training",
        Prefixed,
        "names_during_training",
        *("classes_during_training", "submodules_keep_identity", "gradient_norms_by_name", "fabric_names"),
        *_AVERAGING,
    ),
    fault("names come back in another order", Reordered, "names_after_training"),
    fault("layers of a foreign class", OtherClass, "classes_during_training"),
    fault("a layer trains as another object", CopiedLayer, "submodules_keep_identity"),
    fault("new parameter objects after each step", ReplacedParameters, "parameters_keep_identity"),
    fault("hooks of submodules dropped", HooksDropped, "hooks_on_submodules"),
    fault("a class not given back", ClassLeft, "classes_after_training"),
    fault(
        "parameters come back frozen",
        LeftFrozen,
        "plain_parameters_after_training",
        "plain_pytorch_after_training",
    ),
    fault("a hook left on a layer", HookLeft, "no_leftover_attributes"),
    fault(
        "a lock left on the module",
        LockLeft,
        "deepcopy_after_training",
        *("pickle_after_training", "no_leftover_attributes"),
    ),
    fault("a function left on the module", FunctionLeft, "pickle_after_training", "no_leftover_attributes"),
    fault("a shard left in the module", ShardLeft, "state_dict_after_training", *EVERYTHING),
    fault("a gradient hook left on a parameter", GradientHookLeft, "plain_pytorch_after_training"),
    fault(
        "a layer has another name in Fabric",
        Prefixed,
        "fabric_names",
        *("names_during_training", "classes_during_training", "submodules_keep_identity"),
        *("gradient_norms_by_name", *_AVERAGING),
    ),
    fault("a module of a foreign class in Fabric", ForeignModule, "fabric_module"),
]


# Faults in guarantees for callbacks and optimizers: weights, gradients, groups and freezing.


T = TypeVar("T")
Replaced = Mapping[nn.Parameter, nn.Parameter]


class StaleEvaluation(TinyBackend):
    """Evaluates the weights of its last step, and ignores later writes to the parameters."""

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
    """Restores the weights of its last step after training, and ignores later writes."""

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
    """Rebuilds the groups without unknown entries."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.pop("name", None)


class AllTrainable(TinyBackend):
    """Makes every parameter trainable when it sets up the module."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        module.requires_grad_(True)
        return super().parallelize(module, sample)


class FrozenTrains(TinyBackend):
    """Decides once, at set-up, which parameters train."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        self.trained = {p: p.requires_grad for p in module.parameters()}
        return super().parallelize(module, sample)

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        for parameter, trains in self.trained.items():
            parameter.requires_grad_(trains)
        return step(*args, **kwargs)


class ThawedNotAveraged(TinyBackend):
    """Averages the gradients of initially trained parameters only."""

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
    """Steps only the groups that the optimizer had at the start of training."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.count = len(optimizers[0].param_groups) if optimizers else 0

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        groups = optimizer.param_groups
        optimizer.param_groups = groups[: self.count]
        result = step(*args, **kwargs)
        optimizer.param_groups = groups
        return result


class FirstRates(TinyBackend):
    """Steps each group at its initial rate."""

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
_AVERAGES = ("ema_by_name", *_AVERAGING)
_LATE = ("unfreezing_by_name", "base_finetuning", "backbone_finetuning")


FAULTS += [
    fault("evaluation of stale weights", StaleEvaluation, "ema_by_name", *_AVERAGING[:2]),
    fault("an average at the end is overwritten", MastersWin, "weight_averaging", *_AVERAGES),
    fault("an EMA at the end is overwritten", MastersWin, "ema_weight_averaging", *_AVERAGES),
    fault("an SWA at the end is overwritten", MastersWin, "stochastic_weight_averaging", *_AVERAGES),
    fault("one weight decay for all groups", OneWeightDecay, "weight_decay_by_name"),
    fault("sums in parameter.grad", LateAverage, "gradient_norms_by_name"),
    fault("names of groups lost", GroupNamesLost, "learning_rate_monitor", "weight_decay_by_name"),
    fault("everything made trainable", AllTrainable, "model_summary", *_LATE[:2]),
    fault("frozen parameters train on", FrozenTrains, "freezing_by_name", *_LATE),
    fault("unfrozen parameters not averaged", ThawedNotAveraged, "unfreezing_by_name", *_LATE),
    fault("added groups skipped", NewGroupsSkipped, "base_finetuning", *_LATE),
    fault("rates of groups fixed", FirstRates, "backbone_finetuning", "stochastic_weight_averaging"),
]

FAULTS += lightning_api_ranks.FAULTS

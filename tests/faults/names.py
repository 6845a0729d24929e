"""Faults in names and in the module itself; the group's others are in `names_callbacks` and `names_ranks`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from faults import EVERYTHING, Fault, names_callbacks, names_ranks
from nnx_fsdp.backend import FSDPBackend
from nnx_tiny.backend import TinyBackend

T = TypeVar("T")
Replaced = Mapping[nn.Parameter, nn.Parameter]


def first_layer(module: nn.Module) -> tuple[str, Any]:
    """The first of a module's children."""
    return next(module.named_children())


# --- the module while it trains -----------------------------------------------------------------


class _Wrapper(nn.Module):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x)


class Prefixed(TinyBackend):
    """Wraps a layer, which then has another name."""

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
    """Registers a layer anew when it gives the module back, behind the others."""

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


# --- after training -----------------------------------------------------------------------------


class _EngineList(nn.ModuleList):
    """Blocks as the engine sees them."""


class ClassLeft(TinyBackend):
    """Does not give a submodule its own class back."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        if hasattr(module, "blocks"):
            module.blocks.__class__ = _EngineList
        return super().parallelize(module, sample)


class LeftFrozen(TinyBackend):
    """Gives back parameters that do not train any more."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.requires_grad_(False)
        return {}


def _nothing(*_: Any) -> None:
    """A hook that a pickle can name."""


class HookLeft(TinyBackend):
    """Leaves a hook on a layer, which does nothing any more."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        first_layer(module)[1].register_forward_pre_hook(_nothing)
        return {}


class LockLeft(TinyBackend):
    """Leaves a lock on the module."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.engine_lock = threading.Lock()  # type: ignore[assignment]
        return {}


class FunctionLeft(TinyBackend):
    """Leaves a function on the module that has no name to pickle it by."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        module.engine_function = lambda: None  # type: ignore[assignment]
        return {}


class ShardLeft(FSDPBackend):
    """Forgets to gather one of the parameters."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        owner = next(part for part in module.modules() if isinstance(part, nn.Linear))
        shard = owner.weight
        replaced = super().unparallelize(module)
        owner.weight = shard
        return replaced


class GradientHookLeft(TinyBackend):
    """Leaves its treatment of gradients on a parameter."""

    def unparallelize(self, module: nn.Module) -> Replaced:
        list(module.parameters())[-1].register_hook(lambda gradient: gradient / 2)
        return {}


# --- Fabric -------------------------------------------------------------------------------------


class ForeignModule(TinyBackend):
    """Gives modules under Fabric a class of its own."""

    def parallelize(self, module: nn.Module, sample: object) -> Replaced:
        own = type(module)
        if own.__name__ == "_Net":
            members = {name: getattr(own, name) for name in ("forward", "answer")}
            module.__class__ = type("EngineNet", (nn.Module,), members)
        return super().parallelize(module, sample)


_AVERAGING = ("weight_averaging", "ema_weight_averaging", "stochastic_weight_averaging")


def _fault(name: str, cls: type, caught_by: str, *also: str) -> Fault:
    return Fault(name=name, target=f"faults.names:{cls.__name__}", caught_by=caught_by, also=also)


FAULTS = [
    _fault(
        "a layer has another name while training",
        Prefixed,
        "names_during_training",
        *("classes_during_training", "modules_stay", "gradient_norms_by_name", "fabric_names"),
        *_AVERAGING,
    ),
    _fault("names come back in another order", Reordered, "names_after_training"),
    _fault("layers of a foreign class", OtherClass, "classes_during_training"),
    _fault("a layer trains as another object", CopiedLayer, "modules_stay"),
    _fault("new parameter objects after each step", ReplacedParameters, "parameters_stay"),
    _fault("hooks of submodules dropped", HooksDropped, "hooks_on_submodules"),
    _fault("a class not given back", ClassLeft, "classes_after_training"),
    _fault(
        "parameters come back frozen",
        LeftFrozen,
        "plain_parameters_after_training",
        "module_after_training_trains_plainly",
    ),
    _fault("a hook left on a layer", HookLeft, "nothing_left_on_the_module"),
    _fault(
        "a lock left on the module",
        LockLeft,
        "deepcopy_after_training",
        *("pickle_after_training", "nothing_left_on_the_module"),
    ),
    _fault(
        "a function left on the module", FunctionLeft, "pickle_after_training", "nothing_left_on_the_module"
    ),
    Fault(
        name="a shard left in the module",
        target="faults.names:ShardLeft",
        caught_by="state_dict_after_training",
        also=EVERYTHING,
    ),
    _fault("a gradient hook left on a parameter", GradientHookLeft, "module_after_training_trains_plainly"),
    *names_callbacks.FAULTS,
    _fault(
        "a layer has another name in Fabric",
        Prefixed,
        "fabric_names",
        *("names_during_training", "classes_during_training", "modules_stay"),
        *("gradient_norms_by_name", *_AVERAGING),
    ),
    _fault("a module of a foreign class in Fabric", ForeignModule, "fabric_module"),
    *names_ranks.FAULTS,
]

"""Translate strategy objects of Trainer, or of another copy of Lightning, to the Fabric in use.

Lightning's own strategies are rebuilt from the attributes that their constructors set, and nnx's from the
backend's class and options. A user's subclass is refused, because its overrides would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.lightning.namespaces import get_namespace
from nnx_core.lightning.processes import ParallelProcesses
from nnx_lite.copies import FABRIC_ROOT, fabric_module, is_from_lightning, root_of
from nnx_lite.plugins import fabric_checkpoint_io, fabric_cluster_environment
from nnx_lite.precision import fabric_precision, is_precision

__all__ = ["RECIPES", "Recipe", "fabric_strategy"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way to build a strategy class of Fabric from an object of Trainer's class of the same name.

    Attributes:
        arguments: The attributes that hold each constructor keyword, Trainer's name before Fabric's.
        options: The attributes that hold further keywords, in the same order.
        copied: Attributes that the constructor computes, and that are copied.
        refused: Attributes without a counterpart in Fabric, which must be None, and a remedy for each.
    """

    arguments: Mapping[str, tuple[str, ...]]
    options: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


_GROUP = {"process_group_backend": ("_process_group_backend",), "timeout": ("_timeout",)}
_SAME_NAME = (
    *("remote_device", "config", "load_full_weights", "exclude_frozen_parameters"),
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
)
_HOOKS = "Register the hook on the model that `self.setup` returns, or write a strategy for Fabric."

RECIPES: dict[str, Recipe] = {
    "SingleDeviceStrategy": Recipe({"device": ("_root_device",)}),
    "SingleDeviceXLAStrategy": Recipe({"device": ("_root_device",)}),
    "DDPStrategy": Recipe(
        {**_GROUP, "start_method": ("_start_method",)},
        options=("_ddp_kwargs",),
        refused={
            "_ddp_comm_hook": _HOOKS,
            "_ddp_comm_state": _HOOKS,
            "_ddp_comm_wrapper": _HOOKS,
            "_model_averaging_period": "Average in the loop, with `self.all_reduce(parameter)`.",
        },
    ),
    "FSDPStrategy": Recipe(
        {
            **_GROUP,
            "cpu_offload": ("cpu_offload",),
            "mixed_precision": ("mixed_precision",),
            "sharding_strategy": ("sharding_strategy",),
            "state_dict_type": ("_state_dict_type",),
        },
        options=("kwargs", "_fsdp_kwargs"),
        copied=("_activation_checkpointing_kwargs",),
    ),
    "DeepSpeedStrategy": Recipe({**_GROUP, **{name: (name,) for name in _SAME_NAME}}),
    "XLAStrategy": Recipe({"sync_module_states": ("_sync_module_states",)}),
    "DataParallelStrategy": Recipe({}),
}
"""The recipes by class name. Trainer has no DataParallelStrategy, but both copies of Fabric do."""

REFUSED = {
    "ModelParallelStrategy": "Trainer's needs `configure_model` to split the model, which Lite lacks; pass "
    "Fabric's with its `parallelize_fn`.",
}
"""Lightning's classes that cannot be translated, and a remedy for each."""


def fabric_strategy(strategy: Any) -> Any:
    """Return the strategy of the Fabric in use that corresponds to a strategy object.

    Args:
        strategy: A strategy of Trainer or Fabric, of either copy of Lightning, or of nnx.

    Raises:
        OptionError: The strategy cannot be translated.
    """
    if root_of(strategy, "strategies", "Strategy") == FABRIC_ROOT:
        return strategy
    kind = type(strategy).__name__
    if isinstance(strategy, ParallelProcesses):
        made = _from_nnx(strategy)
    elif not is_from_lightning(strategy):
        raise OptionError(
            f"strategy={kind}() is a subclass of {_parent(strategy)}; Fabric never calls its overrides.",
            remedy=f"Inherit from the class of this name in {FABRIC_ROOT}.strategies.",
        )
    elif kind in RECIPES:
        made = _from_lightning(strategy, RECIPES[kind])
    else:
        remedy = REFUSED.get(kind, f"Pass one of {FABRIC_ROOT}.strategies.")
        raise OptionError(
            f"strategy={kind}() of {type(strategy).__module__} has no counterpart in Fabric.", remedy=remedy
        )
    return _copy_plugins(strategy, made)


def _parent(strategy: Any) -> str:
    parent = next(cls for cls in type(strategy).__mro__[1:] if cls.__name__.endswith("Strategy"))
    return f"{parent.__module__}.{parent.__qualname__}"


def _from_nnx(strategy: ParallelProcesses) -> Any:
    backend = type(strategy.backend)(strategy.backend.options)
    return get_namespace(FABRIC_ROOT).strategy_class()(backend, name=strategy.name, common=strategy.common)


def _from_lightning(strategy: Any, recipe: Recipe) -> Any:
    for attribute, remedy in recipe.refused.items():
        if getattr(strategy, attribute, None) is not None:
            raise OptionError(
                f"strategy={type(strategy).__name__}({attribute[1:]}=...): Fabric has no such option.",
                remedy=remedy,
            )
    arguments = {keyword: _first(strategy, names) for keyword, names in recipe.arguments.items()}
    options = _first(strategy, recipe.options) if recipe.options else {}
    made = getattr(fabric_module("strategies"), type(strategy).__name__)(**arguments, **options)
    for attribute in recipe.copied:
        setattr(made, attribute, getattr(strategy, attribute))
    return made


def _first(strategy: Any, names: tuple[str, ...]) -> Any:
    return next(getattr(strategy, name) for name in names if hasattr(strategy, name))


def _copy_plugins(strategy: Any, made: Any) -> Any:
    """Copy the common attributes: devices, environment, precision, checkpoint IO and accelerator."""
    if getattr(strategy, "parallel_devices", None):
        made.parallel_devices = strategy.parallel_devices
    environment = getattr(strategy, "cluster_environment", None)
    if environment is not None:
        made.cluster_environment = fabric_cluster_environment(environment)
    precision = getattr(strategy, "_precision_plugin", None) or getattr(strategy, "_precision", None)
    if is_precision(precision):
        made.precision = fabric_precision(precision)
    if strategy._checkpoint_io is not None:
        made.checkpoint_io = fabric_checkpoint_io(strategy._checkpoint_io)
    made._accelerator = strategy._accelerator
    return made

"""The plugins flag: environments, precision and checkpoint IO of any copy of Lightning, as Fabric's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.lightning.checkpoint import CheckpointIO
from nnx_core.lightning.lite.hardware import accelerator_name
from nnx_core.lightning.namespaces import (
    FABRIC_ROOT,
    fabric_module,
    get_namespace,
    is_from_lightning,
    root_of,
)
from nnx_core.lightning.processes import ParallelProcesses

__all__ = [
    "OLD_PRECISIONS",
    "PRECISIONS",
    "RECIPES",
    "choose_plugins",
    "choose_precision",
    "fabric_strategy",
    "is_precision",
    "take_accelerator",
]


# --- precision ------------------------------------------------------------------------------------
# The precision flag, and Trainer's precision plugins as Fabric's.


OLD_PRECISIONS: dict[Any, str] = {
    16: "16-mixed",
    32: "32-true",
    64: "64-true",
    "16": "16-mixed",
    "32": "32-true",
    "64": "64-true",
    "bf16": "bf16-mixed",
}
"""What Lite took, and what Lightning calls it now."""
PRECISIONS = (
    *("16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true"),
    *("transformer-engine", "transformer-engine-float16"),
)
"""Lightning's strings of today."""
_SAME_CLASS = ("FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision", "HalfPrecision")


def choose_precision(precision: Any) -> str | None:
    """Lightning's string for the flag; None leaves it to Fabric.

    Raises:
        OptionError: It is unknown.

    Example:
        >>> choose_precision(16), choose_precision("bf16"), choose_precision("64-true")
        ('16-mixed', 'bf16-mixed', '64-true')
    """
    if precision is None:
        return None
    given = precision.lower() if isinstance(precision, str) else precision
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        if given in OLD_PRECISIONS:
            return OLD_PRECISIONS[given]
        if given in PRECISIONS:
            return str(given)
    near = get_close_matches(str(given), [str(each) for each in OLD_PRECISIONS] + [*PRECISIONS], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise OptionError(
        f"precision={precision!r} is unknown.",
        remedy=f"{hint}Use 16, 32, 64, 'bf16', or one of {', '.join(PRECISIONS)}.",
    )


def fabric_precision(plugin: Any) -> Any:
    """One of Fabric's precision plugins that does what a plugin of Trainer's or of another copy does.

    Args:
        plugin: An object of Lightning's own or nnx's classes; a subclass of the user's has methods that
            Fabric would never call.

    Raises:
        OptionError: There is no such plugin in Fabric.
    """
    plugins = fabric_module("plugins")
    kind, precision = type(plugin).__name__, str(plugin.precision)
    scaler = getattr(plugin, "scaler", None)
    is_known = is_from_lightning(plugin) or type(plugin).__module__.startswith("nnx_")
    if is_known and not (scaler is not None and precision.endswith("-true")):
        if kind in _SAME_CLASS:
            return getattr(plugins, kind)(precision)
        if precision.endswith("-mixed"):
            return plugins.MixedPrecision(precision, _device_of(plugin), scaler)
        if precision in ("16-true", "bf16-true"):
            return plugins.HalfPrecision(precision)
        if precision in ("32-true", "64-true"):
            return plugins.DoublePrecision() if precision == "64-true" else plugins.Precision()
    raise OptionError(
        f"plugins={kind}(precision={precision!r}) is Trainer's, and Fabric has no counterpart of it.",
        remedy=f"Subclass {FABRIC_ROOT}.plugins.Precision, or pass `precision=` instead.",
    )


def _device_of(plugin: Any) -> str:
    """The device type of a plugin for mixed precision; nnx's own serve all there are."""
    import torch

    return str(getattr(plugin, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu"))


# --- objects of the other copy of Lightning -------------------------------------------------------
# Strategy objects of Trainer, or of another copy of Lightning, as strategies of the Fabric in use.
#
# Lightning's own are built anew from what their constructors kept; nnx's from the backend's class and
# options. A subclass of the user's is refused: what it overrides would be lost.


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a strategy class of Fabric is built from an object of Trainer's class of the same name.

    Attributes:
        arguments: Keyword of the constructor, and the attribute that keeps it; Trainer's name of it first and
            Fabric's second where they differ.
        options: The attribute that keeps further keywords, likewise.
        copied: Attributes that the constructor computes and that are taken over.
        refused: Attributes that Fabric has no counterpart of; they must be None.
    """

    arguments: Mapping[str, tuple[str, ...]]
    options: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


_GROUP = {"process_group_backend": ("_process_group_backend",), "timeout": ("_timeout",)}
_KEPT_AS_NAMED = (
    *("remote_device", "config", "load_full_weights", "exclude_frozen_parameters"),
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
)
_HOOKS = "Register the hook on the model that `self.setup` returns, or write it as a strategy of Fabric's."

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
    "DeepSpeedStrategy": Recipe({**_GROUP, **{name: (name,) for name in _KEPT_AS_NAMED}}),
    "XLAStrategy": Recipe({"sync_module_states": ("_sync_module_states",)}),
    "DataParallelStrategy": Recipe({}),
}
"""By class name; Trainer has no DataParallelStrategy, but both copies of Fabric do."""

REFUSED = {
    "ModelParallelStrategy": "Trainer's is told by `configure_model` how to split, which Lite has not; pass "
    "Fabric's with its `parallelize_fn`.",
}
"""Classes of Lightning's that cannot be translated, and what to do."""


def fabric_strategy(strategy: Any) -> Any:
    """The strategy for the Fabric in use that a strategy object stands for.

    Args:
        strategy: A strategy of Trainer or Fabric, of either copy of Lightning, Lightning's own or nnx's.

    Raises:
        OptionError: It cannot be translated.
    """
    if root_of(strategy, "strategies", "Strategy") == FABRIC_ROOT:
        return strategy
    kind = type(strategy).__name__
    if isinstance(strategy, ParallelProcesses):
        made = _of_nnx(strategy)
    elif not is_from_lightning(strategy):
        raise OptionError(
            f"strategy={kind}() is a subclass of {_parent(strategy)}; Fabric never calls what it overrides.",
            remedy=f"Inherit from the class of this name in {FABRIC_ROOT}.strategies.",
        )
    elif kind in RECIPES:
        made = _of_lightning(strategy, RECIPES[kind])
    else:
        remedy = REFUSED.get(kind, f"Pass one of {FABRIC_ROOT}.strategies.")
        raise OptionError(
            f"strategy={kind}() of {type(strategy).__module__} has no counterpart in Fabric.", remedy=remedy
        )
    return _take_over_parts(strategy, made)


def _parent(strategy: Any) -> str:
    parent = next(cls for cls in type(strategy).__mro__[1:] if cls.__name__.endswith("Strategy"))
    return f"{parent.__module__}.{parent.__qualname__}"


def _of_nnx(strategy: ParallelProcesses) -> Any:
    backend = type(strategy.backend)(strategy.backend.options)
    return get_namespace(FABRIC_ROOT).strategy_class()(backend, name=strategy.name, common=strategy.common)


def _of_lightning(strategy: Any, recipe: Recipe) -> Any:
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


def _take_over_parts(strategy: Any, made: Any) -> Any:
    """What every strategy may be given: devices, environment, precision, checkpoint IO, accelerator."""
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


def take_accelerator(strategy: Any, flag: Any) -> Any:
    """The accelerator that a strategy object brings, which then is Fabric's to set; else the flag's.

    Args:
        strategy: The strategy for the Fabric in use.
        flag: The accelerator flag, None if it was not given.

    Raises:
        OptionError: The two differ.
    """
    own = accelerator_name(strategy._accelerator)
    strategy._accelerator = None
    if own is None:
        own = _kind_of_devices(strategy)
    if own is None or flag in (None, "auto", own) or (flag == "gpu" and own in ("cuda", "mps")):
        return flag if own is None else own
    raise OptionError(
        f"accelerator={flag!r} contradicts the {own!r} of strategy={type(strategy).__name__}().",
        remedy="Drop one of them.",
    )


def _kind_of_devices(strategy: Any) -> str | None:
    devices = getattr(strategy, "parallel_devices", None)
    first = devices[0] if devices else getattr(strategy, "_root_device", None)
    kind = str(getattr(first, "type", "")) or None
    return "tpu" if kind == "xla" else kind


# --- plugins --------------------------------------------------------------------------------------


_PRECISION = ("plugins.precision", "Precision")
_ENVIRONMENT = ("plugins.environments", "ClusterEnvironment")
_IO = ("plugins.io", "CheckpointIO")


def choose_plugins(plugins: Any) -> list[Any]:
    """Fabric's plugins for what the user passed: None, one, or several.

    Raises:
        OptionError: One is of a kind that only Trainer, or only the old Lite, knew.
    """
    if plugins is None:
        return []
    several = isinstance(plugins, Iterable) and not isinstance(plugins, str)
    return [_translate(plugin) for plugin in (plugins if several else [plugins])]


def _translate(plugin: Any) -> Any:
    if root_of(plugin, *_PRECISION) is not None:
        return fabric_precision(plugin) if _is_foreign(plugin, _PRECISION) else plugin
    if root_of(plugin, *_ENVIRONMENT) is not None:
        return fabric_cluster_environment(plugin)
    if isinstance(plugin, CheckpointIO) or root_of(plugin, *_IO) is not None:
        return fabric_checkpoint_io(plugin)
    raise _refused(plugin)


def is_precision(plugin: Any) -> bool:
    """Whether it is a precision plugin."""
    return root_of(plugin, *_PRECISION) is not None


def _is_foreign(plugin: Any, kind: tuple[str, str]) -> bool:
    return root_of(plugin, *kind) != FABRIC_ROOT


def fabric_cluster_environment(environment: Any) -> Any:
    """The same environment, or one of the Fabric in use that asks it."""
    return _ForeignEnvironment(environment) if _is_foreign_environment(environment) else environment


def _is_foreign_environment(environment: Any) -> bool:
    return not isinstance(environment, fabric_module("plugins.environments").ClusterEnvironment)


def fabric_checkpoint_io(io: Any) -> Any:
    """The same checkpoint IO, or one of the Fabric in use that hands everything to it.

    Raises:
        OptionError: It only works around another, and has none.
    """
    if getattr(io, "checkpoint_io", io) is None:
        raise OptionError(
            f"plugins={type(io).__name__}() wraps the checkpoint IO of Trainer, and has none here.",
            remedy="Pass `nnx.CheckpointIO(async_save=True)`, which saves in the background.",
        )
    if isinstance(io, (CheckpointIO, fabric_module("plugins.io").CheckpointIO)):
        return io
    return _ForeignIO(io)


def _refused(plugin: Any) -> OptionError:
    kind = plugin if isinstance(plugin, str) else type(plugin).__name__
    if isinstance(plugin, str) or root_of(plugin, "strategies", "Strategy") is not None:
        return OptionError(
            f"plugins={kind!r} is a strategy, which the first LightningLite took as a plugin.",
            remedy="Pass it as `strategy=`.",
        )
    if root_of(plugin, "plugins.layer_sync", "LayerSync") is not None:
        return OptionError(
            f"plugins={kind!r} changes the layers of a LightningModule, and Lite has plain modules.",
            remedy="Call `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `self.setup`.",
        )
    return OptionError(
        f"plugins={kind!r} is none that Lite knows.",
        remedy=f"Pass a ClusterEnvironment, a CheckpointIO or a Precision of {FABRIC_ROOT}.plugins.",
    )


class _ForeignEnvironment(fabric_module("plugins.environments").ClusterEnvironment):  # type: ignore[misc]
    """A cluster environment of another copy of Lightning: every question goes to it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def creates_processes_externally(self) -> bool:
        return bool(self.inner.creates_processes_externally)

    @property
    def main_address(self) -> str:
        return str(self.inner.main_address)

    @property
    def main_port(self) -> int:
        return int(self.inner.main_port)

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(self.inner.world_size())

    def set_world_size(self, size: int) -> None:
        self.inner.set_world_size(size)

    def global_rank(self) -> int:
        return int(self.inner.global_rank())

    def set_global_rank(self, rank: int) -> None:
        self.inner.set_global_rank(rank)

    def local_rank(self) -> int:
        return int(self.inner.local_rank())

    def node_rank(self) -> int:
        return int(self.inner.node_rank())

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.inner.validate_settings(num_devices, num_nodes)

    def teardown(self) -> None:
        self.inner.teardown()


class _ForeignIO(fabric_module("plugins.io").CheckpointIO):  # type: ignore[misc]
    """A checkpoint IO of another copy of Lightning: every call goes to it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()

"""From Lite's flags, with the meaning they had in LightningLite, to the keywords of ``Fabric(...)``.

What is asked for and not there is an error here, before any process starts. Objects of Trainer's, or of the
other copy of Lightning, become those of the Fabric in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.lightning.checkpoint import CheckpointIO
from nnx_core.lightning.namespaces import get_namespace
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.lightning.registration import build, explain_missing
from nnx_core.names.catalog import historical
from nnx_core.names.registry import StrategyRegistry
from nnx_lite.copies import FABRIC_ROOT, fabric_module, is_from_lightning, root_of

__all__ = ["fabric_arguments"]

FLAGS = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "gpus", "tpu_cores")
"""Names of the flags, in the order of the old constructor."""
TRANSLATED = ("tpu_spawn", "ddp_sharded", "ddp_sharded_spawn")
"""Strategy names that Lite took and that nothing registers any more; the catalog says what they became."""
_SPAWNING = ("ddp_sharded_spawn",)
_DEFAULT_PRECISION = 32


def fabric_arguments(
    *,
    accelerator: Any = None,
    strategy: Any = None,
    devices: Any = None,
    num_nodes: Any = 1,
    precision: Any = _DEFAULT_PRECISION,
    plugins: Any = None,
    gpus: Any = None,
    tpu_cores: Any = None,
) -> dict[str, Any]:
    """Keywords of ``Fabric(...)`` that mean what the flags meant in LightningLite.

    Raises:
        OptionError: A flag's value is unknown, or flags contradict each other.
        UnsupportedError: This machine lacks the accelerator.
        StrategyNotInstalledError: The strategy's package is missing.
    """
    _check_num_nodes(num_nodes)
    chosen = _choose_strategy(strategy)
    accelerator = accelerator_name(accelerator)
    if not isinstance(chosen, str):
        accelerator = take_accelerator(chosen, accelerator)
    hardware = choose_hardware(accelerator, devices, gpus, tpu_cores)
    parts = choose_plugins(plugins)
    return {
        "accelerator": hardware.accelerator,
        "strategy": chosen,
        "devices": hardware.devices,
        "num_nodes": num_nodes,
        "precision": _precision_beside(parts, chosen, precision),
        "plugins": parts,
    }


def _check_num_nodes(num_nodes: Any) -> None:
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 1:
        raise OptionError(f"num_nodes={num_nodes!r} is not a number of nodes.", remedy="Pass 1 or more.")


def _choose_strategy(strategy: Any) -> Any:
    """A name for Fabric, or an object of its strategy classes."""
    if strategy is None:
        return "auto"
    if isinstance(strategy, str):
        return _by_name(strategy.lower())
    if root_of(strategy, "strategies", "Strategy") is None:
        counts = isinstance(strategy, (int, list, tuple))
        hint = f"Did you mean `devices={strategy!r}`? The second argument is the strategy. " if counts else ""
        raise OptionError(
            f"strategy={strategy!r} is neither a name nor a strategy.",
            remedy=f"{hint}Pass a name that `nnx list` shows, or an object of {FABRIC_ROOT}.strategies.",
        )
    return fabric_strategy(strategy)


def _by_name(name: str) -> Any:
    registry = fabric_module("strategies").STRATEGY_REGISTRY
    if name not in TRANSLATED:
        if name != "auto" and name not in registry:
            raise explain_missing(name, registry)
        return name
    successor = historical()[name].successor
    if name in _SPAWNING:
        spec = StrategyRegistry.get(successor)
        return build(spec, namespace=FABRIC_ROOT, overrides={"start_method": "spawn"})
    return successor


def _precision_beside(plugins: list[Any], strategy: Any, precision: Any) -> str | None:
    """The precision flag, which must stand back where a plugin or the strategy brings the precision."""
    given = [type(plugin).__name__ for plugin in plugins if is_precision(plugin)]
    own = getattr(strategy, "_precision", None)
    given += [type(own).__name__] if own is not None else []
    if not given:
        return choose_precision(precision)
    if precision not in (None, _DEFAULT_PRECISION):
        raise OptionError(
            f"precision={precision!r} contradicts the {given[0]} that was passed as an object.",
            remedy="Drop one of them.",
        )
    return None


ACCELERATORS = ("cpu", "gpu", "cuda", "mps", "tpu", "auto")
"""Names that Lite takes, beside those that somebody registered with Fabric."""
GONE_ACCELERATORS = {
    "ipu": "Graphcore's IPUs are no longer supported by Lightning",
    "hpu": "Intel Gaudi moved to the package lightning-habana",
}
"""Names of the past and what became of them."""
_NAMES = {
    "CPUAccelerator": "cpu",
    "CUDAAccelerator": "cuda",
    "MPSAccelerator": "mps",
    "XLAAccelerator": "tpu",
}
_CLASSES = {name: cls for cls, name in _NAMES.items()}
_HOST_HAS_NO_INDICES = "Devices of the CPU are processes: pass their number, such as `devices=2`."


@dataclass(frozen=True, slots=True)
class ChosenHardware:
    """What Fabric is asked for.

    Attributes:
        accelerator: A name, or an accelerator object of the user's own.
        devices: A number, indices, or ``"auto"``.
    """

    accelerator: Any
    devices: int | list[int] | str


def choose_hardware(
    accelerator: Any, devices: Any, gpus: Any = None, tpu_cores: Any = None
) -> ChosenHardware:
    """Read the four flags together.

    Args:
        accelerator: Name, object or None, which is the CPU unless `gpus` or `tpu_cores` say otherwise.
        devices: Number, indices, a string of either, ``"auto"``, -1 for all, or None and 0 for the CPU.
        gpus: The same for GPUs.
        tpu_cores: The same for cores of a TPU.

    Raises:
        OptionError: A value cannot be read, or two flags contradict each other.
        UnsupportedError: This machine has no such accelerator.

    Example:
        >>> choose_hardware(None, "2")
        ChosenHardware(accelerator='cpu', devices=2)
    """
    chosen, amount = _join_shorthands(
        accelerator_name(accelerator),
        parse_devices("devices", devices),
        {"gpus": parse_devices("gpus", gpus), "tpu_cores": parse_devices("tpu_cores", tpu_cores)},
    )
    if amount in (0, []):
        if chosen not in (None, "cpu", "auto"):
            raise OptionError(
                f"devices={devices!r} asks for no device of accelerator={accelerator!r}.",
                remedy="Pass how many devices to use, or `accelerator='cpu'`.",
            )
        return ChosenHardware("cpu", 1)
    chosen = "cpu" if chosen is None else chosen
    _check_available(chosen)
    if chosen == "cpu" and isinstance(amount, list):
        raise OptionError(
            f"devices={devices!r} are indices of devices, and the accelerator is the CPU.",
            remedy=f"{_HOST_HAS_NO_INDICES} For GPUs add `accelerator='gpu'`.",
        )
    return ChosenHardware(chosen, "auto" if amount is None else amount)


def parse_devices(flag: str, value: Any) -> int | list[int] | str | None:
    """Read one flag that counts or lists devices; -1 is ``"auto"``.

    Args:
        flag: Its name, for messages.
        value: The value as the user gave it.

    Raises:
        OptionError: It is not a number, indices, or a string of either.

    Example:
        >>> parse_devices("devices", "1, 4"), parse_devices("gpus", "-1"), parse_devices("devices", "2")
        ([1, 4], 'auto', 2)
    """
    if isinstance(value, str):
        value = _from_text(flag, value)
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)) and all(_is_count(index) and index >= 0 for index in value):
        return list(value)
    if _is_count(value) and value >= -1:
        return "auto" if value == -1 else int(value)
    raise _unreadable(flag, value)


def _from_text(flag: str, text: str) -> Any:
    parts = [part.strip() for part in text.split(",")]
    if text.strip().lower() == "auto":
        return "auto"
    try:
        numbers = [int(part) for part in parts if part]
    except ValueError:
        raise _unreadable(flag, text) from None
    if not numbers:
        raise _unreadable(flag, text)
    return numbers if "," in text else numbers[0]


def _unreadable(flag: str, value: Any) -> OptionError:
    return OptionError(
        f"{flag}={value!r} is neither a number of devices nor indices of devices.",
        remedy=f"Pass a number, -1 or 'auto' for all, a list such as [1, 4], or a string of these as {flag}.",
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _join_shorthands(accelerator: Any, devices: Any, shorthands: dict[str, Any]) -> tuple[Any, Any]:
    """`gpus` and `tpu_cores` stand for an accelerator and its devices; 0 of them asks for nothing."""
    meant = {"gpus": ("gpu", "cuda", "mps"), "tpu_cores": ("tpu",)}
    given = {flag: amount for flag, amount in shorthands.items() if amount not in (None, 0, [])}
    if len(given) > 1:
        raise OptionError(
            f"gpus={given['gpus']!r} and tpu_cores={given['tpu_cores']!r} ask for two accelerators.",
            remedy="Keep the one to train on.",
        )
    for flag, amount in given.items():
        if accelerator not in (None, "auto", *meant[flag]):
            raise OptionError(
                f"{flag}={amount!r} contradicts accelerator={accelerator!r}.",
                remedy=f"Drop one of them; {flag} means `accelerator={meant[flag][0]!r}`.",
            )
        if devices not in (None, amount):
            raise OptionError(
                f"{flag}={amount!r} contradicts devices={devices!r}.",
                remedy=f"Drop one of them; {flag} means `devices` with `accelerator={meant[flag][0]!r}`.",
            )
        return accelerator if accelerator in meant[flag] else meant[flag][0], amount
    return accelerator, devices


def accelerator_name(accelerator: Any) -> Any:
    """The name of an accelerator, given as name or object; an object of the user's own stays itself.

    Raises:
        OptionError: It is unknown, or an object of another copy of Lightning.
    """
    if accelerator is None:
        return None
    if isinstance(accelerator, str):
        return _known_name(accelerator.lower())
    if is_from_lightning(accelerator) and type(accelerator).__name__ in _NAMES:
        return _NAMES[type(accelerator).__name__]
    if isinstance(accelerator, fabric_module("accelerators").Accelerator) and not _is_trainers(accelerator):
        return accelerator
    counts = isinstance(accelerator, (int, list, tuple))
    hint = (
        f"Did you mean `devices={accelerator!r}`? The first argument is the accelerator. " if counts else ""
    )
    raise OptionError(
        f"accelerator={accelerator!r} is not an accelerator of Fabric.",
        remedy=f"{hint}Pass one of {', '.join(ACCELERATORS)}, or an object of a class that inherits from "
        f"{fabric_module('accelerators').__name__}.Accelerator.",
    )


def _is_trainers(accelerator: Any) -> bool:
    root = root_of(accelerator, "accelerators", "Accelerator")
    return root in ("lightning.pytorch", "pytorch_lightning")


def _known_name(name: str) -> str:
    registered = fabric_module("accelerators").ACCELERATOR_REGISTRY.available_accelerators()
    if name in ACCELERATORS or name in registered:
        return name
    if name in GONE_ACCELERATORS:
        raise OptionError(
            f"accelerator={name!r}: {GONE_ACCELERATORS[name]}.",
            remedy=f"Use one of {', '.join(ACCELERATORS)}.",
        )
    near = get_close_matches(name, [*ACCELERATORS, *registered], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    if name in fabric_module("strategies").STRATEGY_REGISTRY or name in historical():
        hint = f"It is a strategy: the first argument is the accelerator, so pass `strategy={name!r}`. "
    raise OptionError(
        f"accelerator={name!r} is unknown.", remedy=f"{hint}Use one of {', '.join(ACCELERATORS)}."
    )


def _check_available(accelerator: Any) -> None:
    """Refuse hardware that this machine does not have.

    Raises:
        UnsupportedError: With what it has.
    """
    accelerators = fabric_module("accelerators")
    here = [name for name, cls in _CLASSES.items() if getattr(accelerators, cls).is_available()]
    if accelerator in ("cpu", "auto") or accelerator in here:
        return
    if accelerator == "gpu" and {"cuda", "mps"} & set(here):
        return
    if accelerator == "gpu" or accelerator in _CLASSES:
        raise UnsupportedError(
            f"accelerator={accelerator!r} was asked for, and torch finds none on this machine; it finds "
            f"{', '.join(here)}.",
            remedy="Run on a machine with one, or pass `accelerator='auto'` to take what there is.",
        )


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
    if is_precision(plugin):
        return plugin if _precision_root(plugin) == FABRIC_ROOT else fabric_precision(plugin)
    if root_of(plugin, "plugins.environments", "ClusterEnvironment") is not None:
        return fabric_cluster_environment(plugin)
    if isinstance(plugin, CheckpointIO) or root_of(plugin, "plugins.io", "CheckpointIO") is not None:
        return fabric_checkpoint_io(plugin)
    raise _refused(plugin)


def is_precision(plugin: Any) -> bool:
    """Whether it is a precision plugin."""
    return _precision_root(plugin) is not None


def _precision_root(plugin: Any) -> str | None:
    return root_of(plugin, "plugins.precision", "Precision")


def fabric_cluster_environment(environment: Any) -> Any:
    """The same environment, or one of the Fabric in use that asks it."""
    ours = fabric_module("plugins.environments").ClusterEnvironment
    return environment if isinstance(environment, ours) else _ForeignEnvironment(environment)


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

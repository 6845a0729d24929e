"""From a spec to a strategy object: import the target, deal out the options, pick the adapter.

Apart from `nnx_core.lightning.registration`, which calls it: that module imports no torch, and this one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

from nnx_core.backend import Backend
from nnx_core.errors import OptionError, PluginError
from nnx_core.lightning.namespaces import Namespace, get_namespace
from nnx_core.options import CommonOptions, split_options
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import StrategySpec, import_reference

__all__ = ["build"]


@dataclass(frozen=True, kw_only=True)
class LightningArguments:
    """What Lightning's own strategy constructors take, by Trainer's names."""

    accelerator: Any = None
    parallel_devices: Any = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision_plugin: Any = None


def build(spec: StrategySpec, *, namespace: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """Build the strategy that a spec describes, for one of Lightning's module trees.

    Args:
        spec: The spec to build; its target is a `Backend` class or a strategy class of Lightning's.
        namespace: A key of `nnx_core.lightning.namespaces.NAMESPACES`.
        overrides: Options that take precedence over the spec's own.

    Raises:
        PluginError: The target cannot be imported.
        OptionError: An option is unknown or invalid, or the target belongs to another tree.
    """
    space = get_namespace(namespace)
    target = _target(spec)
    arguments = {**spec.init_params, **(overrides or {})}
    if spec.checkpoint_io is not None:
        arguments.setdefault("checkpoint_io", _checkpoint_io(spec))
    if isinstance(target, type) and issubclass(target, Backend):
        return _build_backend(spec, target, space, arguments)
    return _build_raw(spec, target, space, arguments)


def _target(spec: StrategySpec) -> Callable[..., Any]:
    if not isinstance(spec.target, str):
        return spec.target
    return cast("Callable[..., Any]", import_reference(spec.target, what=f"strategy {spec.name!r}"))


def _checkpoint_io(spec: StrategySpec) -> Any:
    """The spec's own CheckpointIO: an object, or a callable that makes one for each strategy."""
    made = spec.checkpoint_io
    return made() if callable(made) else made


def _build_backend(
    spec: StrategySpec, target: type[Backend[Any]], space: Namespace, arguments: dict[str, Any]
) -> Any:
    lightning, common, options = split_options(
        arguments,
        owner=spec.name,
        schemas=(LightningArguments, CommonOptions, target.Options),
        elsewhere=_strategies_with,
    )
    if space.is_fabric and "precision_plugin" in lightning:
        lightning["precision"] = lightning.pop("precision_plugin")
    return space.strategy_class()(
        target(target.Options(**options)), name=spec.name, common=CommonOptions(**common), **lightning
    )


def _strategies_with(option: str) -> list[str]:
    """Names of the strategies whose plugins declare an option."""
    found = []
    for name in StrategyRegistry.names():
        declared = StrategyRegistry.get(name).options
        with suppress(PluginError):  # `nnx doctor` names it
            schema = import_reference(declared, what=name) if declared else None
            if is_dataclass(schema) and option in {item.name for item in fields(schema)}:
                found.append(name)
    return found


def _build_raw(
    spec: StrategySpec, target: Callable[..., Any], space: Namespace, arguments: dict[str, Any]
) -> Any:
    strategy = target(**arguments)
    if isinstance(strategy, space.base_class()):
        return strategy
    raise OptionError(
        f"strategy {spec.name!r} builds a {type(strategy).__module__}.{type(strategy).__qualname__}, "
        f"which is not a {space.name} strategy.",
        remedy="Use the Trainer or Fabric of the package that the class comes from: `lightning.*` and "
        "`pytorch_lightning` / `lightning_fabric` are separate copies.",
    )

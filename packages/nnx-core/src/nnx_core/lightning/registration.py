"""Register the names of nnx in Lightning's four registries, and build strategies from them.

The registries get every name of `nnx.StrategyRegistry`, of the catalog, and every removed name. The entries
are small factories: a call imports the engine, or raises an error with the remedy for a name that cannot be
used. This module itself imports neither torch nor Lightning, and works on imported modules of Lightning.
`_nnx_autoload` calls it after the import of one, and `StrategyRegistry` calls it after each change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from nnx_core.errors import NnxError, OptionError, PluginError, StrategyNotFoundError
from nnx_core.lightning.namespaces import NAMESPACES, Namespace, get_namespace
from nnx_core.names.catalog import historical, known
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import StrategySpec, import_reference
from nnx_core.options import CommonOptions, split_options

if TYPE_CHECKING:
    from nnx_core.backend import Backend

__all__ = ["build", "explain_missing", "fill"]


# The previous entries of names that nnx overrides at the user's request.
_displaced: dict[tuple[str, str], dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class StrategyFactory:
    """Builds the strategy of a known name, or raises an error with the remedy; Lightning calls it.

    Attributes:
        name: The strategy.
        namespace: The tree of Lightning that calls it.
    """

    name: str
    namespace: str

    def __call__(self, **overrides: Any) -> Any:
        """Build the strategy.

        Raises:
            StrategyNotInstalledError: The catalog knows the name, but its distribution is missing.
            StrategyNotFoundError: The name is removed, its plugin is broken, or it does not support the tree.
        """
        spec, space = StrategyRegistry.get(self.name), NAMESPACES[self.namespace]
        if not _is_offered(spec, space):
            mine, other = ("Fabric", "Trainer") if space.is_fabric else ("Trainer", "Fabric")
            raise StrategyNotFoundError(
                f"the strategy {self.name!r} does not support {mine}.", remedy=f"Use it with {other}."
            )
        return build(spec, namespace=self.namespace, overrides=overrides)


def fill(module_name: str) -> None:
    """Fill the registry of one of Lightning's modules, after its import."""
    space = NAMESPACES[module_name.removesuffix(".strategies")]
    registry = _registry_of(space)
    if registry is not None:
        _update(space, registry)
    if not space.is_fabric:
        from nnx_core.lightning.compat import explain_directories  # torch is imported already

        explain_directories(space.name)


def explain_missing(name: str, registry: Mapping[str, Any]) -> NnxError:
    """Make the error for a name that no registry has.

    Args:
        name: The requested name.
        registry: The registry, whose own names may be suggested, too.
    """
    return StrategyRegistry.explain(
        name, also_known=tuple(key for key, data in registry.items() if not _is_ours(data))
    )


def synchronize() -> None:
    """Add, replace and remove names in every registry that exists."""
    for space, registry in _registries():
        _update(space, registry)


def foreign_owner(name: str) -> str:
    """Return the owner of a name that was registered in Lightning without nnx; empty if there is none."""
    for space, registry in _registries():
        if name in registry and not _is_ours(registry[name]):
            return f"the registry of {space.name}"
    return ""


def _update(space: Namespace, registry: Any) -> None:
    wanted = {*StrategyRegistry.names(), *known(), *historical()}
    for name in [name for name, data in registry.items() if _is_ours(data)]:
        displaced = (space.name, name) in _displaced and not StrategyRegistry.overrides(name)
        if displaced:
            registry[name] = _displaced.pop((space.name, name))
        elif name not in wanted:
            registry.remove(name)
    for name in sorted(wanted):
        _put(space, registry, name)


def _put(space: Namespace, registry: Any, name: str) -> None:
    # `registry.get` would build the strategy.
    present = dict.get(registry, name)
    if present is not None and not _is_ours(present):
        if not StrategyRegistry.overrides(name):
            return
        _displaced[(space.name, name)] = present
    registry.register(name, StrategyFactory(name, space.name), description=_description(name), override=True)


def _description(name: str) -> str:
    if name in StrategyRegistry:
        return StrategyRegistry.get(name).description
    return "no longer exists" if name in historical() else "not installed"


def _is_offered(spec: StrategySpec, space: Namespace) -> bool:
    return spec.capabilities.fabric if space.is_fabric else spec.capabilities.trainer


def _is_ours(data: dict[str, Any]) -> bool:
    return isinstance(data["strategy"], StrategyFactory)


def _registries() -> Iterator[tuple[Namespace, Any]]:
    for space in NAMESPACES.values():
        registry = _registry_of(space)
        if registry is not None:
            yield space, registry


def _registry_of(space: Namespace) -> Any:
    module = sys.modules.get(f"{space.name}.strategies")
    return getattr(module, "STRATEGY_REGISTRY" if space.is_fabric else "StrategyRegistry", None)


@dataclass(frozen=True, kw_only=True)
class LightningArguments:
    """The arguments of Lightning's strategy constructors, by Trainer's names."""

    accelerator: Any = None
    parallel_devices: Any = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision_plugin: Any = None


def build(spec: StrategySpec, *, namespace: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """Build the strategy that a spec describes, for one of Lightning's module trees.

    Args:
        spec: The spec; its target is a `Backend` class or a strategy class of Lightning.
        namespace: A key of `nnx_core.lightning.namespaces.NAMESPACES`.
        overrides: Options that take precedence over the spec's own.

    Raises:
        PluginError: The target cannot be imported.
        OptionError: An option is unknown or invalid, or the target belongs to another tree.
    """
    from nnx_core.backend import Backend  # imports torch

    space = get_namespace(namespace)
    target: Any = spec.target
    if isinstance(target, str):
        target = import_reference(target, what=f"strategy {spec.name!r}")
    arguments = {**spec.init_params, **(overrides or {})}
    io = spec.checkpoint_io
    if io is not None:  # an instance, or a callable that makes one for each strategy
        arguments.setdefault("checkpoint_io", io() if callable(io) else io)
    if isinstance(target, type) and issubclass(target, Backend):
        return _build_backend(spec, target, space, arguments)
    return _build_raw(spec, target, space, arguments)


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
    """Return the names of the strategies whose plugins declare an option."""
    found = []
    for name in StrategyRegistry.names():
        declared = StrategyRegistry.get(name).options
        with suppress(PluginError):  # `nnx doctor` reports it
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


StrategyRegistry.connect(on_change=synchronize, foreign_owner=foreign_owner)

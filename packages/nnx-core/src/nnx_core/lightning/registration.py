"""Keeps Lightning's four registries equal to `nnx.StrategyRegistry`; explains names they do not know.

What is registered there are small factories that import an engine when they are called. This module never
imports Lightning: it works on those of its modules that are imported already. `_nnx_autoload` calls it when
one has just been imported, and `StrategyRegistry`, to which it connects itself, after each change.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nnx_core.errors import NnxError, StrategyNotFoundError
from nnx_core.lightning.namespaces import NAMESPACES, Namespace
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import StrategySpec

__all__ = [
    "ExplainingList",
    "StrategyFactory",
    "fill",
    "make_strategy",
]


# --- better errors --------------------------------------------------------------------------------
# Lightning's Trainer and Fabric ask their registry for the list of names, and test whether the user's
# ``strategy=`` is in it. To them, and to nobody else, the registry hands a list that explains itself when
# something is missing; every other caller gets a plain list. None of Lightning's functions is patched.


# The modules whose connector validates `strategy=`, as of Lightning 2.6.6. Where one is renamed,
# Lightning's own message comes back; a test notices.
_CONNECTORS = frozenset(
    {
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "lightning.fabric.connector",
        "pytorch_lightning.trainer.connectors.accelerator_connector",
        "lightning_fabric.connector",
    }
)


def available_strategies(registry: Any, space: Namespace) -> list[str]:
    """What `registry.available_strategies()` returns, once nnx has filled the registry."""
    asker = sys._getframe(1).f_globals.get("__name__")
    return ExplainingList(registry, space.name) if asker in _CONNECTORS else list(registry)


class ExplainingList(list[str]):
    """The names of a registry; testing for one that it lacks raises an error that says what to do.

    Lightning's own text begins the message, and it stays a ValueError, except that a missing package
    is an ImportError.
    """

    def __init__(self, names: Any = (), namespace: str = "lightning.pytorch") -> None:
        super().__init__(names)
        self.namespace = namespace

    def __contains__(self, value: object) -> bool:
        if super().__contains__(value):
            return True
        error = self._explain(value)
        if error is not None:
            prefix = f"You selected an invalid strategy name: `strategy={value!r}`."
            message = f"{error.message[0].upper()}{error.message[1:]}"
            raise type(error)(f"{prefix} {message}", remedy=error.remedy)
        return False

    def _explain(self, value: object) -> NnxError | None:
        space = NAMESPACES[self.namespace]
        if not isinstance(value, str):
            return _explain_foreign(value, space)
        if value in StrategyRegistry:
            mine, other = ("Fabric", "Trainer") if space.is_fabric else ("Trainer", "Fabric")
            return StrategyNotFoundError(
                f"the strategy {value!r} does not support {mine}.", remedy=f"Use it with {other}."
            )
        # Lightning has lower-cased the user's string, so it cannot find such a name.
        for name in self:
            if name.lower() == value:
                return StrategyNotFoundError(
                    f"it is registered as {name!r}, but Lightning looks names up in lower case.",
                    remedy=f"Register it as {value!r}.",
                )
        return StrategyRegistry.explain(value, also_known=tuple(self))


def _explain_foreign(value: object, space: Namespace) -> NnxError | None:
    """A strategy object of another of Lightning's trees than the one that asks."""
    bases = {name: _base_class(name) for name in NAMESPACES}
    if isinstance(value, bases[space.name] or ()):
        return None
    for name, base in bases.items():
        if base is not None and isinstance(value, base):
            return StrategyNotFoundError(
                f"it is a strategy of {name}, and this is {space.name}: each has its own classes.",
                remedy=f"Import it from {space.name}, or call nnx.strategy(..., namespace={space.name!r}).",
            )
    return None


def _base_class(namespace: str) -> Any:
    return getattr(sys.modules.get(f"{namespace}.strategies"), "Strategy", None)


# --- the registries -------------------------------------------------------------------------------
# Keeps Lightning's four registries equal to `nnx.StrategyRegistry`.
#
# What is registered there are small factories that import an engine when they are called. This module never
# imports Lightning: it works on those of its modules that are imported already. `_nnx_autoload` calls it
# when one has just been imported, and `StrategyRegistry`, to which it connects itself, after each change.


# What the name of a registry was registered with before somebody asked nnx to override it.
_displaced: dict[tuple[str, str], dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class StrategyFactory:
    """What Lightning calls when the user has chosen one of our names.

    Attributes:
        name: The strategy.
        namespace: The tree of Lightning that asks.
    """

    name: str
    namespace: str

    def __call__(self, **overrides: Any) -> Any:
        """Build the strategy."""
        return make_strategy(self.name, namespace=self.namespace, overrides=overrides)


def make_strategy(name: str, *, namespace: str, overrides: dict[str, Any]) -> Any:
    """Build a registered strategy for one of Lightning's trees.

    Raises:
        StrategyNotFoundError: As for `StrategyRegistry.get`.
        OptionError: An option is unknown or not valid.
    """
    from nnx_core.lightning.build import build

    return build(StrategyRegistry.get(name), namespace=namespace, overrides=overrides)


def fill(module_name: str) -> None:
    """Fill the registry of one module of Lightning's, which has just been imported."""
    space = NAMESPACES[module_name.removesuffix(".strategies")]
    registry = _registry_of(space)
    if registry is not None:
        _update(space, registry)
    if not space.is_fabric:
        from nnx_core.lightning.compat import explain_directories  # torch is there already

        explain_directories(space.name)


def synchronize() -> None:
    """Add, replace and remove names in every registry that exists."""
    for space, registry in _registries():
        _update(space, registry)


def foreign_owner(name: str) -> str:
    """Who has put a name into a registry of Lightning's without nnx; empty when nobody has."""
    for space, registry in _registries():
        if name in registry and not _is_ours(registry[name]):
            return f"the registry of {space.name}"
    return ""


def _update(space: Namespace, registry: Any) -> None:
    wanted = {name: StrategyRegistry.get(name) for name in StrategyRegistry.names()}
    for name in [name for name, data in registry.items() if _is_ours(data) and name not in wanted]:
        registry.remove(name)
        if (space.name, name) in _displaced:
            registry[name] = _displaced.pop((space.name, name))
    for spec in wanted.values():
        if _is_offered(spec, space):
            _put(space, registry, spec)
    registry.available_strategies = functools.partial(available_strategies, registry, space)


def _put(space: Namespace, registry: Any, spec: StrategySpec) -> None:
    # `registry.get` would build the strategy.
    present = dict.get(registry, spec.name)
    if present is not None and not _is_ours(present):
        if not StrategyRegistry.overrides(spec.name):
            return
        _displaced[(space.name, spec.name)] = present
    registry.register(
        spec.name, StrategyFactory(spec.name, space.name), description=spec.description, override=True
    )


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


StrategyRegistry.connect(on_change=synchronize, foreign_owner=foreign_owner)

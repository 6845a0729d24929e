"""Every strategy by name: those of installed plugins, those registered in this process, and the catalog.

`StrategyRegistry` is the one object of its kind. Its names appear at once in all of Lightning's
registries that are imported, and in the others when they are: `nnx_core.lightning.registration` connects
itself. Nothing here imports torch, Lightning or an engine, and nothing is built here (see `nnx.strategy`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnx_core.errors import NnxError, PluginError, StrategyNotFoundError, StrategyNotInstalledError
from nnx_core.names.catalog import CatalogEntry, historical, known
from nnx_core.names.discovery import inventory, refresh
from nnx_core.names.plugins import Plugin
from nnx_core.names.spec import LIGHTNING_NAMES, Capabilities, StrategySpec

__all__ = ["Registry", "StrategyRegistry"]


# Why, and what to do about it. Reads the catalog and what discovery found; changes nothing, raises nothing.


# How much more alike, of 1, such a name has to be to go before one that can be used.
_TO_INSTALL, _PAST = 0.1, 0.2


def explain(name: str, *, usable: Sequence[str]) -> NnxError:
    """Return the error for a name that is not usable.

    Args:
        name: The requested name.
        usable: The usable names.

    Example:
        >>> explain("fsdp_native", usable=["fsdp_auto"]).remedy
        "Use 'fsdp_auto' instead."
    """
    if name in historical():
        return _explain_historical(name, usable)
    if name in known():
        return _explain_catalogued(known()[name])
    return _explain_unknown(name, usable)


def _explain_historical(name: str, usable: Sequence[str]) -> NnxError:
    old = historical()[name]
    remedy = f"Use {old.successor!r} instead."
    remedy += _how_to_get(old.successor, usable)
    remedy += f" {old.how}" if old.how else ""
    return StrategyNotFoundError(f"the strategy {name!r} no longer exists; it was {old.was}.", remedy=remedy)


def _explain_catalogued(entry: CatalogEntry) -> NnxError:
    plugins = [plugin for plugin in inventory().plugins if plugin.distribution == entry.distribution]
    if not plugins:
        return StrategyNotInstalledError(
            f"the strategy {entry.name!r} is provided by the package {entry.distribution}, "
            "which is not installed.",
            remedy=f"Run `{entry.install}`.",
        )
    return _explain_unusable(entry.name, plugins[0])


def _explain_unusable(name: str, plugin: Plugin) -> NnxError:
    """Return the error for an installed distribution that does not provide the name."""
    start = f"the strategy {name!r} is provided by {plugin.distribution}"
    if plugin.status == "disabled":
        return StrategyNotFoundError(
            f"{start}, which is switched off here.", remedy="Change NNX_DISABLE_PLUGINS or NNX_LOAD_PLUGINS."
        )
    for problem in inventory().problems:
        concerned = plugin.status == "broken" or repr(name) in problem.detail
        if problem.plugin == plugin.name and problem.distribution == plugin.owner and concerned:
            return StrategyNotFoundError(
                f"{start}, but the installed {plugin.owner} cannot be used: {problem.detail}",
                remedy=problem.remedy,
            )
    return StrategyNotFoundError(
        f"{start}, but not by the installed version {plugin.version}, or it was removed in this process.",
        remedy=f"Run `pip install --upgrade {plugin.distribution}`.",
    )


def _how_to_get(name: str, usable: Sequence[str]) -> str:
    installed = {plugin.distribution for plugin in inventory().plugins}
    if name in usable or name not in known() or known()[name].distribution in installed:
        return ""
    return f" It comes with `{known()[name].install}`."


def _explain_unknown(name: str, usable: Sequence[str]) -> NnxError:
    near = _nearest(name.lower(), usable)
    remedy = f"Did you mean {near[0]!r}?" if near else "Run `nnx list` to see the names."
    remedy += _how_to_get(near[0], usable) if near else ""
    broken = [problem.distribution for problem in inventory().problems if problem.kind != "collision"]
    if broken:
        remedy += f" Some plugins could not be loaded ({', '.join(sorted(set(broken)))}): see `nnx doctor`."
    return StrategyNotFoundError(f"no strategy is called {name!r}.", remedy=remedy)


def _nearest(name: str, usable: Sequence[str]) -> list[str]:
    """Return similar names, the best first; names that are not usable must be more similar."""
    from difflib import SequenceMatcher, get_close_matches

    def score(found: str) -> float:
        likeness = SequenceMatcher(None, found, name).ratio()
        if found in usable:
            return likeness
        return likeness - (_PAST if found in historical() else _TO_INSTALL if found in known() else 0)

    candidates = sorted({*usable, *known(), *historical(), *LIGHTNING_NAMES})
    return sorted(get_close_matches(name, candidates, n=3), key=score, reverse=True)


_HERE = "this process"


class Registry:
    """Looks up strategies by name, and registers new ones.

    Example:
        >>> StrategyRegistry.register("my_ddp", "lightning.pytorch.strategies:DDPStrategy", static_graph=True)
        >>> StrategyRegistry.get("my_ddp").init_params
        {'static_graph': True}
        >>> StrategyRegistry.remove("my_ddp")
        >>> "my_ddp" in StrategyRegistry
        False
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._local: dict[str, StrategySpec] = {}
        self._overriding: set[str] = set()
        self._removed: set[str] = set()
        self._on_change: list[Callable[[], None]] = []
        self._foreign_owners: list[Callable[[str], str]] = []

    def register(
        self,
        name: str,
        target: str | type[Any],
        *,
        description: str = "",
        override: bool = False,
        checkpoint_io: Any = None,
        capabilities: Capabilities | None = None,
        **init_params: Any,
    ) -> None:
        """Add a strategy to this process, and to all registries of Lightning.

        Args:
            name: Lower case letters, digits and underscores, beginning with a letter.
            target: A `Backend` class, a `Strategy` class of Lightning, or ``"pkg.module:Class"``.
            description: One line of description.
            override: Take the name even from a plugin or from Lightning itself.
            checkpoint_io: A CheckpointIO of Lightning's, or a callable without arguments that makes
                one for each strategy; by default the strategy has its own.
            capabilities: The capabilities that it promises; by default those that most strategies have.
            **init_params: Keyword arguments that the target always gets.

        Raises:
            PluginError: The name is not valid, or taken; nothing has been registered then.
        """
        spec = StrategySpec(
            name,
            target,
            description=description,
            checkpoint_io=checkpoint_io,
            capabilities=capabilities or Capabilities(),
            init_params=init_params,
        )
        with self._lock:
            if not override and (owner := self._owner_of_taken(name)):
                raise PluginError(
                    f"the strategy {name!r} cannot be registered: {owner} already provides that name.",
                    remedy="Choose another name, or pass override=True.",
                )
            self._local[name] = spec
            if override:
                self._overriding.add(name)
            self.synchronize()

    def get(self, name: str) -> StrategySpec:
        """Return the spec of a strategy.

        Raises:
            StrategyNotInstalledError: The catalog knows the name, but its distribution is missing.
            StrategyNotFoundError: The name is unknown, historical, or its plugin is broken.
        """
        found = self._specs().get(name)
        if found is None:
            raise self.explain(name)
        return found

    def names(self) -> list[str]:
        """Return all usable names, sorted; without Lightning's own."""
        return sorted(self._specs())

    def owner(self, name: str) -> str:
        """Return the origin of a name: a distribution with its version, or this process."""
        self.get(name)
        return _HERE if name in self._local else inventory().owners[name]

    def describe(self, name: str) -> str:
        """Describe a strategy and its use in a few lines.

        Raises:
            StrategyNotFoundError: Raised as by `get`.
        """
        spec = self.get(name)
        lines = [
            f"{name}: {spec.description or 'no description'}",
            f"use when: {spec.use_when}" if spec.use_when else "",
            f"provided by: {self.owner(name)} ({spec.reference})",
            f"docs: {spec.docs_url}" if spec.docs_url else "",
        ]
        return "\n".join(line for line in lines if line)

    def remove(self, name: str) -> None:
        """Remove a strategy from this process, and restore the displaced entries of Lightning's registries.

        Raises:
            StrategyNotFoundError: Raised as by `get`.
        """
        with self._lock:
            self.get(name)
            self._local.pop(name, None)
            self._overriding.discard(name)
            self._removed.add(name)
            self.synchronize()

    def explain(self, name: str, *, also_known: tuple[str, ...] = ()) -> NnxError:
        """Return the error for a name that cannot be used, with the reason and the remedy.

        Args:
            name: The requested name.
            also_known: Further names to suggest, such as those of a Lightning registry.
        """
        return explain(name, usable=(*self.names(), *also_known))

    def synchronize(self) -> None:
        """Update other lists of these names, such as Lightning's registries."""
        for synchronize in self._on_change:
            synchronize()

    def refresh(self) -> None:
        """Discover plugins again, for example after `pip install` in a running notebook.

        Modules that are imported already are not imported again.
        """
        refresh()
        self.synchronize()

    def connect(self, *, on_change: Callable[[], None], foreign_owner: Callable[[str], str]) -> None:
        """Keep another registry, such as Lightning's, up to date with these names.

        Args:
            on_change: Updates the other registry; called after every change.
            foreign_owner: Returns the owner of a name in the other registry that nnx did not register; or "".
        """
        self._on_change.append(on_change)
        self._foreign_owners.append(foreign_owner)

    def overrides(self, name: str) -> bool:
        """Return True if the name was registered with ``override=True``."""
        return name in self._overriding

    def __contains__(self, name: object) -> bool:
        return name in self._specs()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._specs())

    def __repr__(self) -> str:
        return f"<StrategyRegistry: {', '.join(self.names()) or 'no strategies'}>"

    def _specs(self) -> dict[str, StrategySpec]:
        installed = inventory().specs.items()
        return {name: spec for name, spec in installed if name not in self._removed} | self._local

    def _owner_of_taken(self, name: str) -> str:
        if name in self._specs():
            return self.owner(name)
        if name in LIGHTNING_NAMES:
            return "Lightning itself"
        return next(filter(None, (owner_of(name) for owner_of in self._foreign_owners)), "")


StrategyRegistry = Registry()

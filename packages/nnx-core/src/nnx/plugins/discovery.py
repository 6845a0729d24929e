"""Finding plugins: one guarded loop over the installed entry points of the group ``nnx``.

Each plugin is loaded, registered and called under a guard of its own, so that a broken one becomes a
`Problem` and changes nothing for the others. The result is computed once per process.
This module never imports an engine, and never talks to Lightning (see `nnx.lightning.registration`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from nnx.errors import NnxError, PluginError
from nnx.plugins import hookspecs
from nnx.plugins.problem import Problem
from nnx.spec import API_VERSION, LIGHTNING_NAMES, CheckpointFormatSpec, StrategySpec

__all__ = ["Inventory", "Plugin", "checkpoint_formats", "inventory", "refresh"]

GROUP = "nnx"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed entry point.

    Attributes:
        name: Name of the entry point.
        distribution: Name of the installed package that declares it.
        version: Version of that package.
        status: ``ok``, ``broken`` or ``disabled`` (by an environment variable, before import).
        strategies: The names that it provides, without those that were refused.
    """

    name: str
    distribution: str
    version: str
    status: str
    strategies: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """Distribution and version, as shown to the user."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(slots=True)
class Inventory:
    """Everything that one round of discovery found.

    Attributes:
        specs: The strategies, by name.
        owners: Which distribution and version each name comes from.
        plugins: Every entry point, in the order in which it was visited.
        problems: What went wrong, in the same order.
    """

    specs: dict[str, StrategySpec] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _manager: pluggy.PluginManager = field(default_factory=lambda: _new_manager(), repr=False)


class _Refused(Exception):
    """Ends one plugin's turn; carries what its `Problem` says."""

    def __init__(self, kind: str, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.remedy = kind, detail, remedy


_lock = threading.RLock()
_found: Inventory | None = None


def inventory() -> Inventory:
    """What is installed; discovered at the first call, then remembered.

    Raises:
        PluginError: ``NNX_STRICT_PLUGINS=1`` is set and a plugin has a problem.
    """
    global _found  # noqa: PLW0603 - the one result per process
    with _lock:
        if _found is None:
            _found = _discover(entry_points(group=GROUP))
        if _found.problems and os.environ.get("NNX_STRICT_PLUGINS") == "1":
            raise PluginError(
                "; ".join(str(problem) for problem in _found.problems),
                remedy="Mend or remove the plugin, or unset NNX_STRICT_PLUGINS.",
            )
        return _found


def refresh() -> Inventory:
    """Look again, for example after `pip install` in a running notebook.

    Modules that are already imported are not imported anew. Lightning's registries follow.
    """
    global _found  # noqa: PLW0603 - the one result per process
    with _lock:
        _found = None
        found = inventory()
    from nnx.registry import StrategyRegistry

    StrategyRegistry.synchronize()
    return found


def checkpoint_formats() -> dict[str, CheckpointFormatSpec]:
    """The checkpoint formats of all plugins, by name; a failing plugin adds a `Problem`."""
    found = inventory()
    formats: dict[str, CheckpointFormatSpec] = {}
    for plugin in [plugin for plugin in found.plugins if plugin.status == "ok"]:
        try:
            for spec in _call(found._manager, plugin, "nnx_checkpoint_formats", CheckpointFormatSpec):
                formats.setdefault(spec.name, spec)
        except _Refused as refused:
            problem = _problem(plugin, refused)
            if problem not in found.problems:
                found.problems.append(problem)
    return formats


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _discover(found: Iterable[EntryPoint]) -> Inventory:
    result = Inventory()
    allowed, denied = _names_in("NNX_LOAD_PLUGINS"), _names_in("NNX_DISABLE_PLUGINS")
    entries = sorted(found, key=lambda entry: (_normal(_origin(entry)[0]), entry.name, entry.value))
    for entry in entries:
        distribution, version = _origin(entry)
        names = {_normal(entry.name), _normal(distribution)}
        if names & denied or (allowed and not names & allowed):
            result.plugins.append(Plugin(entry.name, distribution, version, "disabled"))
            continue
        plugin = Plugin(entry.name, distribution, version, "ok")
        try:
            plugin = _admit(result, plugin, _load(result._manager, entry, plugin))
        except _Refused as refused:
            result.problems.append(_problem(plugin, refused))
            plugin = replace(plugin, status="broken")
        result.plugins.append(plugin)
    known = {_normal(name) for plugin in result.plugins for name in (plugin.name, plugin.distribution)}
    result.problems += [_not_installed(name) for name in sorted(allowed - known)]
    return result


def _load(manager: pluggy.PluginManager, entry: EntryPoint, plugin: Plugin) -> list[StrategySpec]:
    """Import and call one plugin; afterwards it is registered whole or not at all."""
    key = _key(plugin)
    try:
        module = _guarded("import", plugin, entry.load)
        _guarded("hook", plugin, lambda: manager.register(module, name=key))
        _check_hooks(manager, module)
        return _call(manager, plugin, "nnx_strategies", StrategySpec)
    except BaseException:
        if manager.has_plugin(key):
            manager.unregister(name=key)
        raise


def _check_hooks(manager: pluggy.PluginManager, module: Any) -> None:
    """Refuse a plugin that implements nothing, or a hook that this version does not call."""
    callers = manager.get_hookcallers(module) or []
    unknown = sorted(
        caller.name
        for caller in callers
        if not caller.has_spec()
        and any(impl.plugin is module and not impl.optionalhook for impl in caller.get_hookimpls())
    )
    if unknown:
        raise _Refused(
            "api",
            f"it implements {', '.join(unknown)}, which nnx {_dotted(API_VERSION)} does not have.",
            "Check the spelling, or run `pip install --upgrade nnx-core`.",
        )
    if not callers:
        raise _Refused(
            "result",
            "it implements no hook of nnx.",
            "Decorate its function `nnx_strategies` with nnx.hookimpl, or remove the entry point.",
        )


def _call(manager: pluggy.PluginManager, plugin: Plugin, hook: str, wanted: type[Any]) -> list[Any]:
    """Call one hook of one plugin, and accept nothing but a list of valid specs."""
    key = _key(plugin)
    others = [module for name, module in manager.list_name_plugin() if name != key and module is not None]
    caller = manager.subset_hook_caller(hook, remove_plugins=others)
    answers = _guarded("hook", plugin, caller)
    specs = answers[0] if answers else []
    if not isinstance(specs, (list, tuple)) or not all(isinstance(spec, wanted) for spec in specs):
        raise _Refused(
            "result",
            f"{hook}() returned {_short(specs)}: expected a list of {wanted.__name__}.",
            "Report this to the authors of the plugin.",
        )
    for spec in specs:
        _check_spec(spec)
    return list(specs)


def _check_spec(spec: StrategySpec | CheckpointFormatSpec) -> None:
    major, minor = spec.api_version
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        older = (major, minor) < API_VERSION
        raise _Refused(
            "api",
            f"{spec.name!r} is written for API {major}.{minor} of nnx; this is {_dotted(API_VERSION)}.",
            "Upgrade the plugin." if older else "Run `pip install --upgrade nnx-core`.",
        )
    if not isinstance(spec.target, str):
        raise _Refused(
            "result",
            f"{spec.name!r} declares the class {spec.target!r} as its target.",
            "Declare 'pkg.module:Class' instead, so that listing does not import the engine.",
        )


def _admit(result: Inventory, plugin: Plugin, specs: list[StrategySpec]) -> Plugin:
    """Take over the names that are free; the first distribution by name keeps a name."""
    admitted = []
    for spec in specs:
        if spec.name in LIGHTNING_NAMES:
            result.problems.append(_taken(plugin, spec.name, "Lightning itself"))
        elif spec.name in result.specs:
            result.problems.append(_taken(plugin, spec.name, result.owners[spec.name]))
        else:
            result.specs[spec.name] = spec
            result.owners[spec.name] = plugin.owner
            admitted.append(spec.name)
    return replace(plugin, strategies=tuple(admitted))


def _taken(plugin: Plugin, name: str, owner: str) -> Problem:
    return Problem(
        "collision",
        plugin.name,
        plugin.owner,
        f"its strategy {name!r} is not available: {owner} already provides that name.",
        f"Uninstall one of the two, or set NNX_DISABLE_PLUGINS={plugin.name}.",
    )


def _guarded(kind: str, plugin: Plugin, action: Callable[[], Any]) -> Any:
    """Run the plugin's code; whatever it raises, an exit of the process included, is its problem."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except NnxError as error:
        raise _Refused(kind, error.message, error.remedy) from error
    except BaseException as error:
        remedy = f"Reinstall or upgrade {plugin.distribution}, or set NNX_DISABLE_PLUGINS={plugin.name}."
        raise _Refused(kind, f"{type(error).__name__}: {error}.", remedy) from error


def _problem(plugin: Plugin, refused: _Refused) -> Problem:
    return Problem(refused.kind, plugin.name, plugin.owner, refused.detail, refused.remedy)


def _not_installed(name: str) -> Problem:
    detail = f"NNX_LOAD_PLUGINS names {name!r}, but no plugin or distribution of that name is installed."
    return Problem("selection", name, "", detail, f"Run `pip install {name}`, or correct the variable.")


def _names_in(variable: str) -> set[str]:
    return {_normal(name) for name in os.environ.get(variable, "").split(",") if name.strip()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _origin(entry: EntryPoint) -> tuple[str, str]:
    distribution = entry.dist
    return (distribution.name, distribution.version) if distribution is not None else ("unknown", "")


def _key(plugin: Plugin) -> str:
    return f"{plugin.distribution}:{plugin.name}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Discover plugins."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

import pluggy

from nnx_core.errors import PluginError
from nnx_core.names.catalog import known
from nnx_core.names.plugins import (
    GROUP,
    Plugin,
    Problem,
    RefusedError,
    Status,
    _call,
    _turn,
    load,
    new_manager,
)
from nnx_core.names.spec import LIGHTNING_NAMES, CheckpointFormatSpec, LauncherSpec, StrategySpec

Declared = TypeVar("Declared", CheckpointFormatSpec, LauncherSpec)

Visited = tuple[EntryPoint, Plugin]
"""An entry point, and its metadata before the import."""


Ask = Callable[[Sequence[Visited]], Iterable[list[StrategySpec] | RefusedError]]


@dataclass(slots=True)
class Inventory:
    """The result of a discovery.

    Attributes:
        specs: The strategies, by name.
        owners: The distribution and version of each name.
        plugins: Every entry point, in the order of visits.
        problems: The problems, in the same order.
    """

    specs: dict[str, StrategySpec] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _manager: pluggy.PluginManager = field(default_factory=new_manager, repr=False)


class _State:
    """The one result per process, and the lock around making it."""

    lock = threading.RLock()
    found: Inventory | None = None
    unfinished: Inventory | None = None
    ask: Ask | None = None
    """Reads plugins outside of this process, see `nnx_core.names.plugin_processes`; None for this process."""


def inventory() -> Inventory:
    """Return the installed plugins; discovered at the first call, then cached.

    Raises:
        PluginError: ``NNX_STRICT_PLUGINS=1`` is set and a plugin has a problem.
    """
    with _State.lock:
        if _State.unfinished is not None:
            # A plugin's own module may call this during its import.
            return _State.unfinished
        if _State.found is None:
            _State.found = _discover(entry_points(group=GROUP))
        if _State.found.problems and os.environ.get("NNX_STRICT_PLUGINS") == "1":
            raise PluginError(
                "; ".join(str(problem) for problem in _State.found.problems),
                remedy="Mend or remove the plugin, or unset NNX_STRICT_PLUGINS.",
            )
        return _State.found


def refresh() -> Inventory:
    """Discover plugins again; `StrategyRegistry.refresh` also updates Lightning's registries."""
    with _State.lock:
        _State.found = None
        importlib.invalidate_caches()
        return inventory()


def checkpoint_formats() -> dict[str, CheckpointFormatSpec]:
    """Return the checkpoint formats of all plugins, by name; a failing plugin adds a `Problem`."""
    return _declared("nnx_checkpoint_formats", CheckpointFormatSpec)


def launchers() -> dict[str, LauncherSpec]:
    """Return the launchers of all plugins, by name; a failing plugin adds a `Problem`."""
    return _declared("nnx_launchers", LauncherSpec)


def _declared(hook: str, wanted: type[Declared]) -> dict[str, Declared]:
    """Return the plugins' answers to a hook, by name; the first distribution by name keeps a name."""
    found = inventory()
    specs: dict[str, Declared] = {}
    for plugin in [plugin for plugin in found.plugins if plugin.status == "ok"]:
        try:
            with _turn():
                for spec in _call(found._manager, plugin, hook, wanted):
                    specs.setdefault(spec.name, spec)
        except RefusedError as refused:
            problem = _problem(plugin, refused)
            if problem not in found.problems:
                found.problems.append(problem)
    return specs


def _discover(found: Iterable[EntryPoint]) -> Inventory:
    result = _State.unfinished = Inventory()
    try:
        _visit_all(result, found)
    finally:
        _State.unfinished = None
    return result


def _visit_all(result: Inventory, found: Iterable[EntryPoint]) -> None:
    allowed, denied = _names_in("NNX_LOAD_PLUGINS"), _names_in("NNX_DISABLE_PLUGINS")
    entries = sorted(found, key=lambda entry: (_normal(_origin(entry)[0]), entry.name, entry.value))
    visited: list[tuple[EntryPoint, Plugin]] = []
    for entry in entries:
        distribution, version = _origin(entry)
        names = {_normal(entry.name), _normal(distribution)}
        switched_off = names & denied or (allowed and not names & allowed)
        twice = any((entry.name, distribution) == (seen.name, seen.distribution) for _, seen in visited)
        status: Status = "disabled" if switched_off else "broken" if twice else "ok"
        visited.append((entry, Plugin(entry.name, distribution, version, status)))
    answers = _answers(result._manager, [pair for pair in visited if pair[1].status == "ok"])
    for _, plugin in visited:
        if plugin.status != "ok":
            result.plugins.append(plugin)
            if plugin.status == "broken":
                result.problems.append(_declared_twice(plugin))
            continue
        specs = next(answers)
        if isinstance(specs, RefusedError):
            result.problems.append(_problem(plugin, specs))
            result.plugins.append(replace(plugin, status="broken"))
        else:
            result.plugins.append(_admit(result, plugin, specs))
    known = {_normal(name) for plugin in result.plugins for name in (plugin.name, plugin.distribution)}
    result.problems += [_not_installed(name) for name in sorted(allowed - known)]


def _answers(
    manager: pluggy.PluginManager, visited: Sequence[Visited]
) -> Iterator[list[StrategySpec] | RefusedError]:
    """Return each plugin's strategies, or the reason for its refusal."""
    if _State.ask is not None:
        yield from _State.ask(visited)
        return
    for entry, plugin in visited:
        try:
            yield load(manager, entry, plugin)
        except RefusedError as refused:
            yield refused


def _declared_twice(plugin: Plugin) -> Problem:
    return Problem(
        "collision",
        plugin.name,
        plugin.owner,
        f"{plugin.distribution} declares this entry point twice.",
        "Report this to the authors of the plugin.",
    )


def _admit(result: Inventory, plugin: Plugin, specs: list[StrategySpec]) -> Plugin:
    """Add the free names of a plugin; the first distribution by name gets a name outside of the catalog."""
    admitted = []
    for spec in specs:
        entry = known().get(spec.name)
        if spec.name in LIGHTNING_NAMES:
            result.problems.append(_taken(plugin, spec.name, "Lightning itself"))
        elif entry is not None and _normal(entry.distribution) != _normal(plugin.distribution):
            result.problems.append(_taken(plugin, spec.name, f"{entry.distribution}, by nnx's catalog,"))
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


def _problem(plugin: Plugin, refused: RefusedError) -> Problem:
    return Problem(refused.kind, plugin.name, plugin.owner, refused.detail, refused.remedy)


def _not_installed(name: str) -> Problem:
    detail = f"NNX_LOAD_PLUGINS names {name!r}, but no plugin or distribution of that name is installed."
    return Problem("selection", name, "", detail, f"Run `pip install {name}`, or correct the variable.")


def _names_in(variable: str) -> set[str]:
    return {_normal(name) for name in os.environ.get(variable, "").split(",") if name.strip()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _origin(entry: EntryPoint) -> tuple[str, str]:
    """Return name and version of the distribution, which a damaged installation may lack."""
    try:
        return entry.dist.name or "unknown", entry.dist.version or ""  # type: ignore[union-attr]
    except Exception:
        return "unknown", ""

"""Plugins: the hooks that they may implement, the calls of these hooks, and the problems of each plugin.

    from nnx_core import StrategySpec, hookimpl

    @hookimpl
    def nnx_strategies():
        return [StrategySpec("mine", "my_package.backend:MyBackend")]

A distribution declares such a module as an entry point of the group ``nnx``. Each plugin is loaded,
registered and called under a guard of its own, so that a broken one becomes a `Problem` and changes nothing
for the others. Results are kept for the life of the process. This module never imports an engine, and
never talks to Lightning (see `nnx_core.lightning.registration`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeVar

import pluggy

from nnx_core.errors import NnxError
from nnx_core.names.spec import API_VERSION, CheckpointFormatSpec, LauncherSpec, StrategySpec

__all__ = [
    "Plugin",
    "Problem",
    "hookimpl",
]

GROUP = "nnx"
_PROJECT = "nnx"
_LONGEST_TEXT = 1000

hookimpl = pluggy.HookimplMarker(_PROJECT)
"""Mark a function of the plugin's module as the implementation of the hook of the same name."""
_hookspec = pluggy.HookspecMarker(_PROJECT)


class Hooks:
    """The hooks that a plugin may implement. Each is optional, takes no arguments and returns data."""

    @_hookspec
    def nnx_strategies(self) -> list[StrategySpec]:  # type: ignore[empty-body]
        """The strategies that this plugin provides. Called once; must not import torch."""

    @_hookspec
    def nnx_checkpoint_formats(self) -> list[CheckpointFormatSpec]:  # type: ignore[empty-body]
        """The foreign checkpoint formats that this plugin can read or write. Called when one is needed."""

    @_hookspec
    def nnx_launchers(self) -> list[LauncherSpec]:  # type: ignore[empty-body]
        """The launchers that this plugin provides. Called when one is requested."""


Status = Literal["ok", "broken", "disabled"]
ProblemKind = Literal["import", "hook", "result", "api", "collision", "selection"]


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
    status: Status
    strategies: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """Distribution and version, as shown to the user."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason why a plugin, or one of its names, is not available.

    Attributes:
        kind: ``import`` (its module cannot be loaded), ``hook`` (a hook raised or is unknown),
            ``result`` (a hook returned other objects than specs), ``api`` (written for another
            version of nnx), ``collision`` (the name is taken) or ``selection`` (``NNX_LOAD_PLUGINS``
            names a plugin that is not installed).
        plugin: Name of its entry point.
        distribution: The installed package and version that declare it.
        detail: Says what happened.
        remedy: Says what the user can do.
    """

    kind: ProblemKind
    plugin: str
    distribution: str
    detail: str
    remedy: str

    def __str__(self) -> str:
        owner = f" of {self.distribution}" if self.distribution else ""
        return f"plugin {self.plugin!r}{owner}: {self.detail} {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """This record as plain data for JSON."""
        return asdict(self)


class RefusedError(Exception):
    """Refuses a plugin; carries the attributes of its `Problem`."""

    def __init__(self, kind: ProblemKind, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.remedy = kind, detail, remedy


class EngineImportError(NnxError, ImportError):
    """The module of a plugin's entry point imports an engine, which only the target's module may do."""


class _Barrier:
    """Prevents imports of engines while a plugin's code runs, and restores the list of importers.

    An engine would make listing slow. It would also break Lightning: plugins are loaded while Lightning is
    being imported, and importing more of it out of turn leaves it damaged. Importers that a plugin adds stay,
    but are asked last; one that takes others away is refused.
    """

    engines = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric"})

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in self.engines and threading.get_ident() == self._thread:
            raise EngineImportError(
                f"it imports {fullname} as soon as it is loaded.",
                remedy="Its authors should declare targets as text, and import engines in those modules.",
            )

    def __enter__(self) -> None:
        self._list, self._before = sys.meta_path, [*sys.meta_path]
        sys.meta_path.insert(0, self)

    def __exit__(self, kind: object, *_: object) -> None:
        found = sys.meta_path if isinstance(sys.meta_path, list) else []
        kept = [entry for entry in found if any(entry is old for old in self._before)]
        added = [entry for entry in found if entry is not self and not any(entry is old for old in kept)]
        sys.meta_path = self._list
        sys.meta_path[:] = self._before if kind else self._before + added
        if kind is None and list(map(id, kept)) != list(map(id, self._before)):
            raise RefusedError(
                "import",
                "it takes importers out of sys.meta_path, which other packages need.",
                "Report this to the authors of the plugin.",
            )


def new_manager() -> pluggy.PluginManager:
    """Return a plugin manager with the hooks of nnx and without plugins."""
    manager = pluggy.PluginManager(_PROJECT)
    manager.add_hookspecs(Hooks)
    return manager


def load(manager: pluggy.PluginManager, entry: EntryPoint, plugin: Plugin) -> list[StrategySpec]:
    """Import and call one plugin; register it completely or not at all.

    Raises:
        RefusedError: The plugin has a problem.
    """
    key = _key(plugin)
    try:
        with _turn():
            module = _guarded("import", plugin, entry.load)
            _guarded("hook", plugin, lambda: manager.register(module, name=key))
            _check_hooks(manager, module)
            return _call(manager, plugin, "nnx_strategies", StrategySpec)
    except BaseException:
        if manager.has_plugin(key):
            manager.unregister(name=key)
        raise


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Run a plugin's code without engines, and keep its output out of a command's answer."""
    with _Barrier(), contextlib.redirect_stdout(sys.stderr):
        yield


def _call(manager: pluggy.PluginManager, plugin: Plugin, hook: str, wanted: type[Any]) -> list[Any]:
    """Call one hook of one plugin, and accept only a list of valid specs."""
    key = _key(plugin)
    others = [module for name, module in manager.list_name_plugin() if name != key and module is not None]
    caller = manager.subset_hook_caller(hook, remove_plugins=others)
    answers = _guarded("hook", plugin, caller)
    implemented = any(key == impl.plugin_name for impl in getattr(manager.hook, hook).get_hookimpls())
    # pluggy leaves None out of the answers, and a forgotten `return` would pass for an empty list.
    specs = answers[0] if answers else None if implemented else []
    if not isinstance(specs, (list, tuple)) or not all(isinstance(spec, wanted) for spec in specs):
        raise RefusedError(
            "result",
            f"{hook}() returned {_short(specs)}: expected a list of {wanted.__name__}.",
            "Report this to the authors of the plugin.",
        )
    for spec in specs:
        _check_spec(spec)
    return list(specs)


def _check_hooks(manager: pluggy.PluginManager, module: Any) -> None:
    """Refuse a plugin without hooks, or with a hook that this version does not call."""
    callers = manager.get_hookcallers(module) or []
    unknown = sorted(
        caller.name
        for caller in callers
        if not caller.has_spec()
        and any(impl.plugin is module and not impl.optionalhook for impl in caller.get_hookimpls())
    )
    if unknown:
        raise RefusedError(
            "api",
            f"it implements {', '.join(unknown)}, which nnx {_dotted(API_VERSION)} does not have.",
            "Check the spelling, or run `pip install --upgrade nnx-core`.",
        )
    if not callers:
        raise RefusedError(
            "result",
            "it implements no hook of nnx.",
            "Decorate its function `nnx_strategies` with nnx.hookimpl, or remove the entry point.",
        )


def _check_spec(spec: StrategySpec | CheckpointFormatSpec | LauncherSpec) -> None:
    major, minor = spec.api_version
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        older = (major, minor) < API_VERSION
        raise RefusedError(
            "api",
            f"{spec.name!r} is written for API {major}.{minor} of nnx; this is {_dotted(API_VERSION)}.",
            "Upgrade the plugin." if older else "Run `pip install --upgrade nnx-core`.",
        )
    texts = {key: getattr(spec, key, "") for key in ("description", "use_when", "docs_url")}
    for key, text in texts.items():
        if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
            seen = f"{len(text)} characters" if isinstance(text, str) else _short(text)
            raise RefusedError(
                "result",
                f"{spec.name!r} declares a {key} of {seen}: expected text of at most {_LONGEST_TEXT}.",
                "Report this to the authors of the plugin.",
            )
    if not isinstance(spec.target, str):
        raise RefusedError(
            "result",
            f"{spec.name!r} declares the class {spec.target!r} as its target.",
            "Declare 'pkg.module:Class' instead, so that listing does not import the engine.",
        )


def _guarded(kind: ProblemKind, plugin: Plugin, action: Callable[[], Any]) -> Any:
    """Run the plugin's code; convert every error, also an exit of the process, to a problem."""
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except NnxError as error:
        raise RefusedError(kind, error.message, error.remedy) from error
    except BaseException as error:
        remedy = f"Reinstall or upgrade {plugin.distribution}, or set NNX_DISABLE_PLUGINS={plugin.name}."
        raise RefusedError(kind, f"{type(error).__name__}: {_text(error)}.", remedy) from error


def _text(error: BaseException) -> str:
    """Return the text of an error, if it has one."""
    try:
        return _cut(str(error), _LONGEST_TEXT)
    except BaseException:  # of the plugin's own `__str__`
        return "(its message cannot be shown)"


def _key(plugin: Plugin) -> str:
    return f"{plugin.distribution}:{plugin.name}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _short(value: object) -> str:
    try:
        return _cut(repr(value), 80)
    except BaseException:  # of the plugin's own `__repr__`
        return f"a {type(value).__name__} that cannot be shown"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


Declared = TypeVar("Declared", CheckpointFormatSpec, LauncherSpec)

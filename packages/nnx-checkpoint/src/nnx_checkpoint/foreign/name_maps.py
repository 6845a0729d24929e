"""Map the names of a module's tensors to the names in a Hugging Face directory, and back.

A map is data: a list of rules, each with a pattern for the name in the module and one for the name in the
directory. ``*`` stands for one part of a name between dots, ``**`` for any number of parts. The first rule
that fits a name decides. A rule with null on one side leaves out the names that fit its other side::

    [["net.head.weight", "lm_head.weight"], ["net.**", "model.**"], ["loss.**", null]]

Maps are in files, in options, in ``name_maps.json`` of this package (names in old directories of the hub), or
in entry points of the group ``nnx_checkpoint.name_maps``: functions that return maps by name. A map is used
for each directory whose ``model_type`` is its name, unless another one is given.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from nnx_base.errors import CheckpointError

__all__ = ["NameMap", "name_map", "registered_map"]

log = logging.getLogger("nnx.checkpoint")

GROUP = "nnx_checkpoint.name_maps"

_WILDCARD = re.compile(r"\*\*|\*")
_GROUPS = {"*": r"([^.]+)", "**": r"(.+)"}

Side = Literal["module", "directory"]


@dataclass(frozen=True)
class _Rule:
    """A pattern for each side; None leaves out what fits the other side."""

    module: str | None
    directory: str | None

    @cached_property
    def _patterns(self) -> dict[Side, re.Pattern[str]]:
        sides: dict[Side, str | None] = {"module": self.module, "directory": self.directory}
        return {side: _compiled(pattern) for side, pattern in sides.items() if pattern is not None}

    def translate(self, name: str, source: Side) -> tuple[bool, str | None]:
        """Return True and the name on the other side (None: left out), or False if the name does not fit."""
        pattern = self._patterns.get(source)
        found = pattern.fullmatch(name) if pattern else None
        if found is None:
            return False, None
        other = self.directory if source == "module" else self.module
        parts = iter(found.groups())
        return True, None if other is None else _WILDCARD.sub(lambda _: next(parts), other)


def _compiled(pattern: str) -> re.Pattern[str]:
    literals, wildcards = _WILDCARD.split(pattern), _WILDCARD.findall(pattern)
    text = "".join(
        re.escape(literal) + _GROUPS.get(wildcard, "")
        for literal, wildcard in zip(literals, [*wildcards, ""], strict=True)
    )
    return re.compile(text)


@dataclass(frozen=True)
class NameMap:
    """A list of rules.

    Attributes:
        rules: The rules in order.
        source: The file or name of the map, used in messages.

    Example:
        >>> names = NameMap.of([["net.h.*.w", "model.layers.*.weight"], ["loss.**", None]], "an example")
        >>> names.to_directory(["net.h.3.w", "loss.scale"])
        {'net.h.3.w': 'model.layers.3.weight'}
        >>> names.to_module(["model.layers.3.weight"])
        {'model.layers.3.weight': 'net.h.3.w'}
    """

    rules: tuple[_Rule, ...]
    source: str

    @classmethod
    def of(cls, rules: Any, source: str) -> NameMap:
        """Check a list of pairs.

        Raises:
            CheckpointError: It is no list of pairs, or the two sides of a rule have different wildcards.
        """
        if not isinstance(rules, (list, tuple)) or not rules:
            raise _malformed(source, f"it is {type(rules).__name__} {rules!r:.40}")
        return cls(tuple(_rule(rule, source) for rule in rules), source)

    @property
    def data(self) -> list[list[str | None]]:
        """The rules as plain data."""
        return [[rule.module, rule.directory] for rule in self.rules]

    def to_directory(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name in the directory of each name in a module, except of those that a rule leaves out.

        Raises:
            CheckpointError: No rule fits a name, two names get the same one, or the way back differs.
        """
        made = self._translated(names, "module")
        back = {name: self._one(stored, "directory") for name, stored in made.items()}
        wrong = [name for name, found in back.items() if found != name]
        if wrong:
            raise CheckpointError(
                f"the map of names {self.source} cannot be undone: '{wrong[0]}' becomes '{made[wrong[0]]}', "
                f"which becomes {back[wrong[0]]!r}.",
                remedy="Put the more special rules first, and use every wildcard on both sides.",
            )
        return made

    def to_module(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name in the module of each name in a directory, except of those that a rule leaves out.

        Raises:
            CheckpointError: No rule fits a name, or two names get the same one.
        """
        return self._translated(names, "directory")

    def _one(self, name: str, source: Side) -> str | None:
        """Return the name on the other side, None to leave it out; raise `LookupError` without a rule."""
        for rule in self.rules:
            fits, other = rule.translate(name, source)
            if fits:
                return other
        raise LookupError(name)

    def _translated(self, names: Iterable[str], source: Side) -> dict[str, str]:
        made: dict[str, str] = {}
        left: list[str] = []
        origin: dict[str, str] = {}
        for name in names:
            try:
                other = self._one(name, source)
            except LookupError:
                left.append(name)
                continue
            if other is None:
                continue
            if other in origin:
                raise CheckpointError(
                    f"the map of names {self.source} gives '{other}' to two tensors, "
                    f"'{origin[other]}' and '{name}'.",
                    remedy="Give each tensor a name of its own, or leave one out with a rule "
                    f"{_example(name, source)}.",
                )
            origin[other] = name
            made[name] = other
        if left:
            raise CheckpointError(
                f"the map of names {self.source} has no rule for {_shown(left)}.",
                remedy=f"Add a rule for each, or leave it out with {_example(left[0], source)}.",
            )
        return made


def _example(name: str, source: Side) -> str:
    return json.dumps([name, None] if source == "module" else [None, name])


def _shown(names: list[str], limit: int = 6) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _rule(rule: Any, source: str) -> _Rule:
    if (
        not isinstance(rule, (list, tuple))
        or len(rule) != 2
        or not all(side is None or (isinstance(side, str) and side) for side in rule)
        or tuple(rule) == (None, None)
    ):
        raise _malformed(source, f"{rule!r:.80} is no rule")
    module, directory = rule
    if None not in (module, directory) and _WILDCARD.findall(module) != _WILDCARD.findall(directory):
        raise _malformed(source, f"the sides of {list(rule)} have different wildcards")
    return _Rule(module, directory)


def _malformed(source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the map of names {source} is malformed: {why}.",
        remedy="Write a list of rules [MODULE, DIRECTORY], each a pattern with * and ** or null.",
    )


def name_map(given: Any) -> NameMap:
    """Return the map of the option ``names``: rules, the path of a JSON file, or a registered name.

    Raises:
        CheckpointError: There is no such file or name, or the map is malformed.
    """
    if isinstance(given, NameMap):
        return given
    if not isinstance(given, (str, Path)):
        return NameMap.of(given, "in `names`")
    path = Path(given)
    if path.suffix == ".json":
        try:
            return NameMap.of(json.loads(path.read_bytes()), f"'{path}'")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the map of names '{path}' cannot be read: {error}.", remedy="Check the path and its JSON."
            ) from error
    found = registered_map(str(given))
    if found is None:
        raise CheckpointError(
            f"there is no map of names {str(given)!r}.",
            remedy=f"Pass the path of a .json file, or one of {', '.join(sorted(_maps()))}.",
        )
    return found


def registered_map(name: str) -> NameMap | None:
    """Return the map that this package or a plugin has under a name; None if there is none."""
    found = _maps().get(name)
    return None if found is None else NameMap.of(found, repr(name))


def is_built_in(name: str) -> bool:
    """Return True for a map of this package: it knows old names, and changes no new ones."""
    return name in _built_in()


def _maps() -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for provide in _providers():
        try:
            found = {**provide(), **found}
        except Exception as error:  # a broken plugin must not break conversion
            log.warning("Ignoring the maps of names of %r: %s", provide.__module__, error)
    return {**found, **_built_in()}


@cache
def _built_in() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(
        (files("nnx_checkpoint.foreign") / "name_maps.json").read_text(encoding="utf-8")
    )
    return loaded


@cache
def _providers() -> list[Callable[[], Mapping[str, Any]]]:
    found = []
    for entry in entry_points(group=GROUP):
        try:
            found.append(entry.load())
        except Exception as error:
            log.warning("Ignoring the maps of names of %r: %s", entry.name, error)
    return found

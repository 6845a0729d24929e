"""Implement ``nnx list`` and ``nnx show``: list strategies, and print the declarations of one.

The output comes from specs, the catalog and docstrings, without an import of torch. Only `nnx show` imports
the module that declares the options of a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import formatannotation
from typing import Any, Literal

from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import (
    print_error,
    print_json,
    print_line,
    print_note,
    print_pairs,
    print_text,
)
from nnx_core.errors import PluginError
from nnx_core.names.catalog import CatalogEntry, Tier, historical, known
from nnx_core.names.discovery import inventory
from nnx_core.names.plugins import Problem
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import LIGHTNING_NAMES, Capabilities, StrategySpec, import_reference, name_remarks
from nnx_core.options import CommonOptions

__all__ = [
    "entries",
    "note_problems",
    "options_of",
    "run_list",
    "run_show",
]


NotUsable = Literal["not installed", "disabled", "broken", "missing"]
"""The status of an unusable strategy; ``missing`` if the installed version of its package lacks it."""

LONGEST = 24
"""Names up to this length align the column of descriptions; a longer one moves its own to the right."""


class Registered(TypedDict):
    """The declarations of a strategy that can be used now.

    Attributes:
        provided_by: The distribution with its version, or this process.
        target: The class as ``pkg.module:Class``.
        init_params: Keyword arguments that the target always gets.
        option_of: The strategy of which this name is only an option, or empty.
    """

    name: str
    status: Literal["installed"]
    provided_by: str
    target: str
    init_params: dict[str, Any]
    description: str
    use_when: str
    docs_url: str
    capabilities: Capabilities
    api_version: tuple[int, int]
    option_of: str


class Usable(Registered):
    """A strategy that can be used now.

    Attributes:
        options: The dataclass of its options as ``pkg.module:Dataclass``, or empty.
    """

    options: str


class Catalogued(TypedDict):
    """A strategy of the catalog that cannot be used here.

    Attributes:
        status: The reason; ``missing`` means that the installed version of its package lacks it.
        provided_by: The distribution.
        capabilities: The capabilities that strategies do not have by default, and it has.
        lacks: The capabilities that strategies have by default, and it lacks.
        replaces: Discontinued distributions whose names it took over.
        install: The command that installs it.
    """

    name: str
    status: NotUsable
    provided_by: str
    tier: Tier
    description: str
    use_when: str
    accelerators: list[str]
    capabilities: list[str]
    lacks: list[str]
    replaces: list[str]
    install: str
    docs_url: str


class Past(TypedDict):
    """A removed name.

    Attributes:
        until: The last minor version of Lightning that had it, or empty.
        successor: The name to use today.
        how: A sentence about other necessary changes, or empty.
        package: The package that provided it outside Lightning, or empty.
    """

    name: str
    status: Literal["historical"]
    provided_by: Literal[""]
    description: str
    was: str
    until: str
    successor: str
    how: str
    package: str
    docs_url: str


def entries(*, everything: bool) -> list[dict[str, Any]]:
    """Return the usable strategies; with `everything` also those of the catalog and removed names."""
    found = [usable(name) for name in StrategyRegistry]
    if everything:
        found += [catalogued(name) for name in sorted(known()) if name not in StrategyRegistry]
        found += [past(name) for name in sorted(historical()) if name not in StrategyRegistry]
    return found


def usable(name: str) -> dict[str, Any]:
    """Return the spec of a registered strategy."""
    spec = StrategyRegistry.get(name)
    return {**spec.as_dict(), "status": "installed", "provided_by": StrategyRegistry.owner(name)}


def catalogued(name: str) -> dict[str, Any]:
    """Return the entry of a strategy of the catalog that is not available here."""
    entry = known()[name]
    found: Catalogued = {
        "name": name,
        "status": _status(entry),
        "provided_by": entry.distribution,
        "tier": entry.tier,
        "description": entry.summary,
        "use_when": entry.use_when,
        "accelerators": list(entry.accelerators),
        "capabilities": list(entry.capabilities),
        "lacks": list(entry.lacks),
        "replaces": list(entry.replaces),
        "install": entry.install,
        "docs_url": entry.docs,
    }
    return dict(found)


def past(name: str) -> dict[str, Any]:
    """Return the entry of a removed name."""
    old = historical()[name]
    found: Past = {
        "name": name,
        "status": "historical",
        "provided_by": "",
        "description": f"use {old.successor}; it was {old.was}",
        "was": old.was,
        "until": old.until,
        "successor": old.successor,
        "how": old.how,
        "package": old.distribution,
        "docs_url": old.url,
    }
    return dict(found)


def _status(entry: CatalogEntry) -> NotUsable:
    """Return the reason why a name of the catalog cannot be used."""
    plugins = [plugin for plugin in inventory().plugins if plugin.distribution == entry.distribution]
    if not plugins:
        return "not installed"
    status = plugins[0].status
    return "missing" if status == "ok" else status


class Listing(TypedDict):
    """The output of ``nnx list --json``."""

    strategies: list[Usable | Catalogued | Past]
    problems: list[Problem]


def run_list(*, everything: bool, as_json: bool) -> int:
    """Print the usable strategies, or all with `everything`, and a note about broken plugins.

    Without `everything` the text leaves out names that are options of another; JSON has them always.
    """
    rows = entries(everything=everything)
    if as_json:
        problems = [problem.as_dict() for problem in inventory().problems]
        print_json({"strategies": rows, "problems": problems})
        return 0
    folded = {} if everything else _folded(rows)
    rows = [row for row in rows if row["name"] not in folded]
    if rows:
        width = max((len(row["name"]) for row in rows if len(row["name"]) <= LONGEST), default=0)
        for title, group in _by_package(rows).items():
            print_text(f"\n{title}" if title != _title(rows[0]) else title)
            for row in group:
                more = list(folded.values()).count(row["name"])
                note = f" ({more} more with --all)" if more else ""
                print_line(f"  {row['name']:{width}}  {row['description']}{note}")
    else:
        print_note("No strategy is installed. `nnx list --all` shows what could be.")
    note_problems()
    return 0


def _folded(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the names that are options of another name in the rows, with that name."""
    names = {row["name"] for row in rows}
    return {row["name"]: row["option_of"] for row in rows if row["option_of"] in names}


def _by_package(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the rows by package, under a title that names a fault of the package."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_title(row), []).append(row)
    return groups


def _title(row: dict[str, Any]) -> str:
    status, owner = row["status"], row["provided_by"]
    if status == "historical":
        return "removed names"
    if status == "installed":
        return str(owner)
    return f"{owner} ({status}: {row['install'] if status == 'not installed' else 'run `nnx doctor`'})"


def note_problems() -> None:
    """Print a note that names the unusable plugins."""
    problems = inventory().problems
    for problem in problems:
        print_note(f"problem: plugin {problem.plugin!r}: {problem.detail}")
    if problems:
        print_note(f"{len(problems)} problem(s) with plugins: run `nnx doctor`.")


class Option(TypedDict):
    """An option of a strategy, all as text."""

    name: str
    type: str
    default: str
    help: str


class ShownUsable(Registered):
    """A strategy that can be used now.

    Attributes:
        options: The options that ``nnx.strategy(NAME, ...)`` takes.
        remarks: Sentences about the effects of Lightning's rules for strategy names on this one.
    """

    options: list[Option]
    remarks: list[str]


class ShownCatalogued(Catalogued):
    """A strategy of the catalog that cannot be used here."""

    explanation: str
    remedy: str


class ShownPast(Past):
    """A removed name."""

    explanation: str
    remedy: str


class OfLightning(TypedDict):
    """One of Lightning's own strategies."""

    name: str
    status: Literal["installed"]
    provided_by: Literal["Lightning itself"]
    description: str
    docs_url: str


Shown = ShownUsable | ShownCatalogued | ShownPast | OfLightning
"""The output of ``nnx show --json``."""


def run_show(name: str, *, as_json: bool) -> int:
    """Print one strategy; return 1 if its plugin is broken, 2 if the name is unknown."""
    if name in StrategyRegistry:
        return _show_installed(StrategyRegistry.get(name), as_json=as_json)
    if name in LIGHTNING_NAMES and name not in historical():
        facts = {"name": name, "status": "installed", "provided_by": "Lightning itself"}
        page = "https://lightning.ai/docs/pytorch/stable/extensions/strategy.html"
        return _show_facts(
            {**facts, "description": "a strategy of Lightning's own", "docs_url": page}, as_json
        )
    error = StrategyRegistry.explain(name)
    if name not in historical() and name not in known():
        print_error(error)
        return 2
    facts = past(name) if name in historical() else catalogued(name)
    _show_facts({**facts, "explanation": error.message, "remedy": error.remedy}, as_json)
    return 1 if facts["status"] in ("broken", "missing") else 0


def options_of(spec: StrategySpec) -> list[dict[str, str]]:
    """Return the options of a strategy, from dataclasses whose modules do not import torch.

    Raises:
        PluginError: The options are declared, but cannot be imported or are no dataclass.
    """
    if not spec.options:
        return []
    schema = import_reference(spec.options, what=f"the options of strategy {spec.name!r}")
    if not is_dataclass(schema):
        raise PluginError(
            f"strategy {spec.name!r} declares options={spec.options!r}, which is not a dataclass.",
            remedy="Report this to the authors of the plugin.",
        )
    own = [_option(item, spec) for item in fields(schema)]
    names = {option["name"] for option in own}
    return own + [_option(item, spec) for item in fields(CommonOptions) if item.name not in names]


def _show_installed(spec: StrategySpec, *, as_json: bool) -> int:
    options, remarks = options_of(spec), name_remarks(spec.name)
    if as_json:
        print_json({**usable(spec.name), "options": options, "remarks": remarks})
        return 0
    print_pairs(
        [
            ("name", spec.name),
            ("description", spec.description),
            ("use when", spec.use_when),
            ("provided by", StrategyRegistry.owner(spec.name)),
            ("docs", spec.docs_url),
            *(("remark", remark) for remark in remarks),
            ("check it", f"nnx conformance {spec.name}"),
        ]
    )
    if options:
        print_text("\nOptions")
    for option in options:
        print_line(f"  {option['name']}: {option['type']} = {option['default']}", wrapped=4)
        print_line(f"    {option['help']}", wrapped=4)
    _print_capabilities(spec.capabilities)
    return 0


def _print_capabilities(capabilities: Capabilities) -> None:
    """Print accelerators, precisions, and the capabilities that differ from the default."""
    values = capabilities.as_dict()
    print_text("\nCapabilities")
    print_line(
        f"  runs on {_as_text(values['accelerators'])}, precision {_as_text(values['precisions'])}", wrapped=4
    )
    for item in fields(Capabilities):
        value, usual = values[item.name], item.default
        if isinstance(value, bool) and value != usual:
            print_line(f"  {'can' if value else 'cannot'}: {item.name} ({_help(item)})", wrapped=4)
    if capabilities.refuses:
        print_line(f"  unsupported (an error names the remedy): {', '.join(capabilities.refuses)}", wrapped=4)
    print_text("  all other capabilities: default; --json lists every capability")


def _show_facts(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print_json(facts)
        return 0
    # The explanation and the remedy contain these facts.
    repeated = ("install", "how", "was", "successor") if "remedy" in facts else ()
    shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items()}
    print_pairs([(name.replace("_", " "), value) for name, value in shown.items() if name not in repeated])
    return 0


def _option(item: Field[Any], spec: StrategySpec) -> dict[str, str]:
    choices = item.metadata.get("choices", ())
    return {
        "name": item.name,
        "type": " | ".join(map(repr, choices)) if choices else _type(item),
        "default": _default(item, spec),
        "help": _help(item),
    }


def _type(item: Field[Any]) -> str:
    return item.type if isinstance(item.type, str) else formatannotation(item.type)


def _default(item: Field[Any], spec: StrategySpec) -> str:
    if item.name in spec.init_params:
        return repr(spec.init_params[item.name])
    if item.default is not MISSING:
        return repr(item.default)
    return repr(item.default_factory()) if item.default_factory is not MISSING else "required"


def _help(item: Field[Any]) -> str:
    return str(item.metadata.get("help", ""))


def _as_text(value: bool | list[str]) -> str:
    return ", ".join(value) if isinstance(value, list) else "yes" if value else "no"

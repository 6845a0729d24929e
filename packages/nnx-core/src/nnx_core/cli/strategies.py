"""``nnx list``, ``nnx show`` and ``nnx search``: which strategies there are, and which one fits.

Everything comes from specs, the catalog and docstrings; torch is not imported. Only the options of one
strategy are looked up where it is shown, which imports the module that declares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from inspect import formatannotation
from typing import Any

from nnx_checkpoint.cli.output import (
    print_error,
    print_json,
    print_note,
    print_pairs,
    print_table,
    print_text,
)
from nnx_core.catalog import CatalogEntry, historical, known
from nnx_core.errors import PluginError
from nnx_core.options import CommonOptions
from nnx_core.plugins import inventory
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import LIGHTNING_NAMES, Capabilities, StrategySpec, import_reference, name_remarks

__all__ = [
    "options_of",
    "run_list",
    "run_search",
    "run_show",
]


# --- what is known of all strategies --------------------------------------------------------------
# What `nnx list`, `nnx show` and `nnx search` know of a name, as plain data: one dict for each strategy.
#
# Its ``status`` is ``installed``, ``not installed``, ``disabled``, ``broken``, ``missing`` (the installed
# version of its package lacks it) or ``historical``. Reads specs and the catalog; imports no engine.


def entries(*, everything: bool) -> list[dict[str, Any]]:
    """The strategies that can be used; with `everything` also those that could be or once could."""
    found = [usable(name) for name in StrategyRegistry]
    if everything:
        found += [catalogued(name) for name in sorted(known()) if name not in StrategyRegistry]
        found += [past(name) for name in sorted(historical()) if name not in StrategyRegistry]
    return found


def usable(name: str) -> dict[str, Any]:
    """A strategy that is registered: its whole spec."""
    spec = StrategyRegistry.get(name)
    return {**spec.as_dict(), "status": "installed", "provided_by": StrategyRegistry.owner(name)}


def catalogued(name: str) -> dict[str, Any]:
    """A strategy that a package of the catalog provides, but not here."""
    entry = known()[name]
    return {
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


def past(name: str) -> dict[str, Any]:
    """A name that nothing provides any more."""
    old = historical()[name]
    return {
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


def _status(entry: CatalogEntry) -> str:
    """Why a name of the catalog cannot be used."""
    plugins = [plugin for plugin in inventory().plugins if plugin.distribution == entry.distribution]
    if not plugins:
        return "not installed"
    return plugins[0].status if plugins[0].status != "ok" else "missing"


# --- nnx list -------------------------------------------------------------------------------------
# ``nnx list``: the names that can be used, and with ``--all`` those that could be or once could.


def run_list(*, everything: bool, as_json: bool) -> int:
    """Print the list; a broken plugin is mentioned, and is `nnx doctor`'s matter."""
    rows = entries(everything=everything)
    if as_json:
        problems = [problem.as_dict() for problem in inventory().problems]
        print_json({"strategies": rows, "problems": problems})
        return 0
    if rows:
        print_table(
            ("name", "status", "provided by", "description"),
            [[row["name"], row["status"], row["provided_by"], row["description"]] for row in rows],
        )
    else:
        print_note("No strategy is installed. `nnx list --all` shows what could be.")
    note_problems()
    return 0


def note_problems() -> None:
    """Name the plugins that cannot be used, beside the answer."""
    problems = inventory().problems
    for problem in problems:
        print_note(f"problem: plugin {problem.plugin!r}: {problem.detail}")
    if problems:
        print_note(f"{len(problems)} problem(s) with plugins: run `nnx doctor`.")


# --- nnx show -------------------------------------------------------------------------------------
# ``nnx show NAME``: everything that is declared about one strategy, without importing its engine.


def run_show(name: str, *, as_json: bool) -> int:
    """Print one strategy; 1 where its plugin is broken, 2 where nothing is known of the name."""
    if name in StrategyRegistry:
        return _show_installed(StrategyRegistry.get(name), as_json=as_json)
    if name in LIGHTNING_NAMES and name not in historical():
        return _show_facts({"name": name, "status": "installed", "provided_by": "Lightning itself"}, as_json)
    error = StrategyRegistry.explain(name)
    if name not in historical() and name not in known():
        print_error(error)
        return 2
    facts = past(name) if name in historical() else catalogued(name)
    _show_facts({**facts, "explanation": error.message, "remedy": error.remedy}, as_json)
    return 1 if facts["status"] in ("broken", "missing") else 0


def options_of(spec: StrategySpec) -> list[dict[str, str]]:
    """The options of a strategy, from dataclasses whose modules do not import torch.

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
            ("target", spec.reference),
            ("docs", spec.docs_url),
            *(("remark", remark) for remark in remarks),
            ("check it", f"nnx conformance {spec.name}"),
        ]
    )
    print_text("")
    capabilities = spec.capabilities.as_dict()
    rows = [[item.name, _as_text(capabilities[item.name]), _help(item)] for item in fields(Capabilities)]
    print_table(("capability", "value", "meaning"), rows)
    if options:
        print_text("")
        print_table(("option", "type", "default", "meaning"), [list(option.values()) for option in options])
    return 0


def _show_facts(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print_json(facts)
        return 0
    # The explanation and the remedy say these in sentences.
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


# --- nnx search -----------------------------------------------------------------------------------
# ``nnx search WORD...``: which strategy fits, among the installed, the known and those of the past.
#
# Every word has to occur in what is known of a strategy: its name, its package, what it can do, what it is
# and when to use it. Names count more than texts, and what is installed goes before what is not.


# What a word is worth by the place where it occurs.
_ASKED_FOR, _WHOLE_NAME, _NAME, _PACKAGE, _CAPABILITY, _TEXT = 100, 50, 40, 25, 12, 8
# A part of a word is worth this part of the whole.
_PART = 0.6
_INSTALLED = 5
_OTHER_PLACES = 0.1
_SHORTEST_PART = 3
_IGNORED = frozenset(
    {"a", "an", "and", "for", "i", "in", "is", "it", "my", "of", "on", "or", "the", "to", "with"}
)


@dataclass(frozen=True, slots=True)
class Hit:
    """A strategy that was found.

    Attributes:
        score: Says how well it fits.
        entry: The entry that describes it.
    """

    score: float
    entry: dict[str, Any]

    @property
    def action(self) -> str:
        """How to get it, or what to use in its place."""
        status = self.entry["status"]
        if status == "historical":
            return f"use {self.entry['successor']}"
        if status == "not installed":
            return str(self.entry["install"])
        return "" if status == "installed" else "nnx doctor"

    @property
    def description(self) -> str:
        """What it is; of a name of the past, what it was."""
        was = self.entry.get("was", "")
        return f"it was {was}" if was else str(self.entry["description"])

    def as_dict(self) -> dict[str, Any]:
        """This hit as plain data for JSON."""
        keys = ("name", "status", "provided_by", "description", "use_when", "install", "successor", "how")
        return {"score": self.score, "action": self.action, **{key: self.entry.get(key, "") for key in keys}}


def run_search(words: Sequence[str], *, as_json: bool) -> int:
    """Print what was found; 1 if nothing was."""
    asked = _words(" ".join(words), parts=False)
    everything = entries(everything=True) + [_lightnings(name) for name in sorted(LIGHTNING_NAMES & {*asked})]
    hits = rank(everything, asked)
    suggestions = [] if hits else _suggestions(everything, asked)
    if as_json:
        results = [hit.as_dict() for hit in hits]
        print_json({"words": asked, "results": results, "suggestions": suggestions})
    elif hits:
        print_table(
            ("name", "status", "to get it", "description"),
            [[hit.entry["name"], hit.entry["status"], hit.action, hit.description] for hit in hits],
        )
    else:
        _print_nothing(asked, suggestions)
    if not as_json:
        note_problems()
    return 0 if hits else 1


def rank(found: Sequence[dict[str, Any]], words: Sequence[str]) -> list[Hit]:
    """The entries in which every word occurs, the best first.

    Example:
        >>> tiny = {"name": "tiny", "status": "installed", "provided_by": "x", "description": "a small one"}
        >>> [hit.entry["name"] for hit in rank([tiny], ["small"])]
        ['tiny']
        >>> rank([tiny], ["small", "fast"])
        []
    """
    hits = []
    for entry in found:
        places = list(_places(entry))
        scores = [_score(word, places) for word in words]
        if scores and all(scores):
            whole = _ASKED_FOR * ("_".join(words) == entry["name"])
            hits.append(Hit(round(whole + sum(scores), 1), entry))
    return sorted(hits, key=_order)


def _order(hit: Hit) -> tuple[bool, bool, float, str]:
    """The very name that was asked for goes first, names of the past go last."""
    status = hit.entry["status"]
    worth = hit.score + _INSTALLED * (status == "installed")
    return hit.score < _ASKED_FOR, status == "historical", -worth, hit.entry["name"]


def _places(entry: dict[str, Any]) -> Iterator[tuple[int, set[str]]]:
    """Where words may occur, each place with its worth."""
    old = known()[entry["name"]].replaces if entry["name"] in known() else ()
    texts = ("was",) if entry["status"] == "historical" else ("description", "use_when")
    yield _WHOLE_NAME, {entry["name"]}
    yield _NAME, set(_words(entry["name"]))
    yield _PACKAGE, set(_words(" ".join([entry["provided_by"], entry.get("package", ""), *old])))
    yield _CAPABILITY, set(_words(" ".join(_abilities(entry))))
    yield _TEXT, set(_words(" ".join(entry.get(key, "") for key in texts)))


def _abilities(entry: dict[str, Any]) -> list[str]:
    """What sets it apart from strategies in general, and the devices it runs on."""
    declared = entry.get("capabilities", [])
    if not isinstance(declared, dict):
        return [*declared, *entry.get("accelerators", [])]
    special = [item.name for item in fields(Capabilities) if item.default is False and declared[item.name]]
    return special + list(declared["accelerators"])


def _score(word: str, places: Sequence[tuple[int, set[str]]]) -> float:
    """The worth of the best place and a little of the others; 0 where the word does not occur."""
    scores = [worth * max((_likeness(word, text) for text in texts), default=0.0) for worth, texts in places]
    return max(scores) + _OTHER_PLACES * (sum(scores) - max(scores))


def _likeness(word: str, text: str) -> float:
    if word == text:
        return 1.0
    shorter, longer = sorted((word, text), key=len)
    if len(shorter) < _SHORTEST_PART:
        return 0.0
    if longer.startswith(shorter):
        # `shard` finds `shards` and `sharded`; `optimizers` finds `optimizer`, but not `opt`.
        return _PART if shorter == word or len(longer) - len(shorter) <= 2 else 0.0
    return _PART / 2 if shorter == word and word in longer else 0.0


def _lightnings(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "status": "installed",
        "provided_by": "Lightning itself",
        "description": "a strategy of Lightning's own",
    }


def _suggestions(found: Sequence[dict[str, Any]], words: Sequence[str]) -> list[str]:
    """Words that exist, in place of those that occur nowhere."""
    from difflib import get_close_matches

    vocabulary = {text for entry in found for _, texts in _places(entry) for text in texts} | LIGHTNING_NAMES
    unknown = [word for word in words if not rank(found, [word])]
    return [
        match for word in unknown for match in get_close_matches(word, sorted(vocabulary), n=2, cutoff=0.7)
    ]


def _print_nothing(words: Sequence[str], suggestions: Sequence[str]) -> None:
    print_note(f"Nothing is known of {' '.join(map(repr, words)) or 'that'}.")
    if suggestions:
        print_note(f"Did you mean {' or '.join(map(repr, suggestions))}?")
    elif len(words) > 1:
        print_note("Every word has to match: try fewer of them.")
    else:
        print_note("`nnx list --all` shows every name.")


def _words(text: str, *, parts: bool = True) -> list[str]:
    """Lower case words in order, without those that say nothing; with `parts` also the parts of names."""
    found = re.findall(r"[a-z0-9_]+", text.lower())
    if parts:
        found += [part for word in found for part in word.split("_")]
    return list(dict.fromkeys(word for word in found if word and word not in _IGNORED))

"""``nnx search WORD...``: which strategy fits, among the installed, the known and those of the past.

Every word has to occur in what is known of a strategy: its name, its package, what it can do, what it is
and when to use it. Names count more than texts, and what is installed goes before what is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nnx_checkpoint.cli.output import print_json, print_note, print_table
from nnx_core.catalog import known
from nnx_core.cli.entries import entries
from nnx_core.cli.listing import note_problems
from nnx_core.spec import LIGHTNING_NAMES, Capabilities

__all__ = ["Hit", "rank", "run"]

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
        score: How well it fits.
        entry: What is known of it.
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


def run(words: Sequence[str], *, as_json: bool) -> int:
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

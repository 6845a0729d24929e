"""``nnx search WORD...``: find strategies, among the installed, the known and the removed ones.

The search reads a strategy's name, package, capabilities, description and use. An
answer needs not have every word: each counts as much as it is rare, in names more than in texts, and by
other words for the same thing (`SYNONYMS`). Pages of the documentation are found by what they are about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import print_json, print_line, print_note
from nnx_core.cli.strategies import entries, note_problems
from nnx_core.names.catalog import known
from nnx_core.names.spec import LIGHTNING_NAMES, Capabilities

__all__ = ["run_search"]

# What a word is worth by the place where it occurs.
_ASKED_FOR, _WHOLE_NAME, _NAME, _PACKAGE, _CAPABILITY, _TEXT = 1000, 50, 40, 25, 12, 8
# The weights of a match of a part of a word, and of a synonym, relative to that of the word.
_PART, _SYNONYM = 0.6, 0.9
_OTHER_PLACES, _INSTALLED = 0.1, 0.15
_SHORTEST_PART = 3
_MOST, _LEAST, _PAST = 8, 0.15, 1.5
"""The number of printed answers; their smallest score, relative to the best one; and the factor by which a
removed name must exceed that to come first."""
_IGNORED = frozenset(
    """
    a an and any are as at be but by can do does for from get has have how i if in into is it its me more my
    no not of on only or our own run than that the then there this to too train training use used using very
    want what when which with without you your model models parallelism parallel
    """.split()  # noqa: SIM905 - a list of words is for reading
)
SYNONYMS: Mapping[str, Sequence[str]] = {
    "oom": ("fit", "memory"),
    "out": ("fit",),
    "larger": ("fit",),
    "bigger": ("fit",),
    "small": ("short",),
    "vram": ("memory", "fit"),
    "ram": ("memory",),
    "gpu": ("device", "devices"),
    "single": ("one",),
    "gpus": ("devices", "device"),
    "cpu": ("host",),
    "network": ("links", "nodes"),
    "interconnect": ("links",),
    "ethernet": ("links",),
    "bandwidth": ("links",),
    "cluster": ("nodes", "slurm"),
    "machines": ("nodes",),
    "multinode": ("nodes",),
    "llm": ("fit", "large"),
    "language": ("fit", "large"),
    "huge": ("large", "fit"),
    "big": ("large", "fit"),
    "megatron": ("tensor_parallel",),
    "tp": ("tensor_parallel",),
    "auto": ("chosen",),
    "automatic": ("chosen",),
    "automatically": ("chosen",),
    "gradient": ("activation_checkpointing",),
    "recompute": ("activation_checkpointing",),
    "gemini": ("colossalai",),
    "budget": ("offload",),
    "zero1": ("nnx_deepspeed_1",),
    "zero2": ("nnx_deepspeed_2",),
    "zero3": ("nnx_deepspeed_3",),
    "stage": ("zero", "stages"),
    "hf": ("huggingface",),
    "finetune": ("lora",),
    "finetuning": ("lora",),
    "wandb": ("logging",),
    "continue": ("resume",),
    "restart": ("resume",),
    "export": ("convert",),
}
_MEMORY = {"memory", "oom", "vram", "fit", "fits", "larger", "bigger"}
_SAVES = {"shards_parameters", "shards_gradients", "shards_optimizer", "offload", "tensor_parallel"}
"""The capabilities of a strategy that answer a question about memory."""
PAGES = {
    "docs/backends/nnscaler.md": "sequence and tensor parallelism by a planner, plans, units of ranks",
    "docs/checkpoints.md": "checkpoints: save and resume, in the background, to S3 or a cloud, weights only",
    "docs/choosing.md": "choosing a strategy: memory estimate, speed, global batch size, steps of an epoch",
    "docs/conformance.md": "test whether a strategy is correct: conformance",
    "docs/formats.md": "convert and merge checkpoints: single file, safetensors, DCP, DeepSpeed, nnScaler",
    "docs/errors.md": "errors by their text, and their remedies: troubleshooting",
    "docs/limits.md": "limits: FP8, context and expert parallelism, CUDA untested, Windows, macOS and MPS",
    "docs/lite.md": "a loop of your own in plain PyTorch: Lite",
    "docs/migration/index.md": "migrate from DeepSpeed, FSDP, ColossalAI, fairscale, nnScaler, LightningLite",
    "docs/optimizers.md": "optimizers: Muon, LAMB, Shampoo, SOAP, SAM, Adam, gradient clipping",
    "docs/options.md": "every option of every strategy: mixed precision, timeout, compile",
    "docs/recipes.md": "recipes: Huggingface, LoRA, vision, GAN, notebook, TensorBoard logging, MFU, SLURM",
    "docs/start/index.md": "getting started: a tutorial",
    "docs/security.md": "security: untrusted checkpoints, pickle, trust",
    "docs/diff.md": "compare two runs: first step and tensor that differ, and the kind of fault",
    "docs/divergence.md": "detect and debug ranks that differ or diverge, checksums",
    "docs/writing-a-backend.md": "write a plugin: a strategy or an engine of your own",
}
"""Pages of the documentation, and their subjects."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A found strategy or page.

    Attributes:
        score: The score of the match.
        entry: The entry that describes it.
    """

    score: float
    entry: dict[str, Any]

    @property
    def action(self) -> str:
        """The way to install it, or the name to use instead."""
        status = self.entry["status"]
        if status == "historical":
            return f"use {self.entry['successor']}"
        if status == "not installed":
            return str(self.entry["install"])
        return "" if status in ("installed", "page") else "nnx doctor"

    @property
    def description(self) -> str:
        """Its description; for a removed name, its former meaning."""
        was = self.entry.get("was", "")
        return f"it was {was}" if was else str(self.entry["description"])

    def as_dict(self) -> dict[str, Any]:
        """This hit as plain data for JSON."""
        keys = ("name", "status", "provided_by", "description", "use_when", "install", "successor", "how")
        return {"score": self.score, "action": self.action, **{key: self.entry.get(key, "") for key in keys}}


class SearchResult(TypedDict):
    """A strategy or a page of the documentation.

    Attributes:
        score: The score of the match; larger is better.
        action: The way to install it, or the name to use instead; empty if it can be used.
    """

    score: float
    action: str
    name: str
    status: Literal["installed", "not installed", "disabled", "broken", "missing", "historical", "page"]
    provided_by: str
    description: str
    use_when: str
    install: str
    successor: str
    how: str


class Found(TypedDict):
    """The output of ``nnx search --json``.

    Attributes:
        words: The searched words, without filler words.
        results: The best first, removed names last.
        suggestions: The words to try if nothing was found.
    """

    words: list[str]
    results: list[SearchResult]
    suggestions: list[str]


def run_search(words: Sequence[str], *, as_json: bool) -> int:
    """Print the results; return 1 if there are none."""
    asked = _words(" ".join(words), parts=False)
    lightnings = [
        _outside(name, "Lightning itself", "a strategy of Lightning's own") for name in LIGHTNING_NAMES
    ]
    pages = [_outside(name, "the documentation", text, status="page") for name, text in PAGES.items()]
    everything = [
        *entries(everything=True),
        *(entry for entry in lightnings if entry["name"] in asked),
        *pages,
    ]
    hits = rank(everything, asked)
    suggestions = [] if hits else _suggestions(everything, asked)
    if as_json:
        results = [hit.as_dict() for hit in hits]
        print_json({"words": asked, "results": results, "suggestions": suggestions})
        return 0 if hits else 1
    width = max((len(hit.entry["name"]) for hit in hits), default=0)
    for hit in hits:
        how = f"({hit.action}) " if hit.action else ""
        print_line(f"{hit.entry['name']:{width}}  {how}{hit.description}")
    if not hits:
        _print_nothing(asked, suggestions)
    note_problems()
    return 0 if hits else 1


def rank(found: Sequence[dict[str, Any]], words: Sequence[str]) -> list[Hit]:
    """Return the matching entries, the best first.

    Args:
        found: Entries of the form of `nnx list`.
        words: The words of the question, in lower case.

    Example:
        >>> tiny = {"name": "tiny", "status": "installed", "provided_by": "x", "description": "a small one"}
        >>> [hit.entry["name"] for hit in rank([tiny], ["small", "fast"])]
        ['tiny']
        >>> rank([tiny], ["fast"])
        []
    """
    if _MEMORY & {*words}:
        found = [entry for entry in found if entry["status"] == "page" or _SAVES & {*_abilities(entry)}]
    places = [list(_places(entry)) for entry in found]
    scores = [[_score(word, of_entry) for of_entry in places] for word in words]
    rarity = [math.log(1 + len(found) / max(1, sum(map(bool, of_word)))) for of_word in scores]
    hits = []
    for number, entry in enumerate(found):
        worth = sum(rare * of_word[number] for rare, of_word in zip(rarity, scores, strict=True))
        if worth and "_".join(words) == entry["name"]:
            worth += _ASKED_FOR
        if worth:
            hits.append(Hit(round(worth * (1 + _INSTALLED * (entry["status"] == "installed")), 1), entry))
    usual = [hit for hit in hits if hit.score < _ASKED_FOR]
    today = [hit for hit in usual if hit.entry["status"] != "historical"]
    best = max((hit.score for hit in today or usual), default=0.0)

    def order(hit: Hit) -> tuple[bool, float, str]:
        """Sort removed names last, unless they match far better."""
        return hit.entry["status"] == "historical" and hit.score < _PAST * best, -hit.score, hit.entry["name"]

    return sorted((hit for hit in hits if hit.score >= _LEAST * best), key=order)[:_MOST]


def _places(entry: dict[str, Any]) -> Iterator[tuple[int, set[str]]]:
    """Yield the texts of an entry as sets of words, each with its weight."""
    if entry["status"] == "page":
        yield _CAPABILITY, set(_words(entry["description"]))
        return
    old = known()[entry["name"]].replaces if entry["name"] in known() else ()
    texts = ("was",) if entry["status"] == "historical" else ("description", "use_when")
    yield _WHOLE_NAME, {entry["name"]}
    yield _NAME, set(_words(entry["name"]))
    yield _PACKAGE, set(_words(" ".join([entry["provided_by"], entry.get("package", ""), *old])))
    yield _CAPABILITY, set(_words(" ".join(_abilities(entry))))
    yield _TEXT, set(_words(" ".join(entry.get(key, "") for key in texts)))


def _abilities(entry: dict[str, Any]) -> list[str]:
    """Return its special capabilities, and the devices it runs on."""
    declared = entry.get("capabilities", [])
    if not isinstance(declared, dict):
        return [*declared, *entry.get("accelerators", [])]
    special = [item.name for item in fields(Capabilities) if item.default is False and declared[item.name]]
    return special + list(declared["accelerators"])


def _score(word: str, places: Sequence[tuple[int, set[str]]]) -> float:
    """Return the weight of the best match and a fraction of the others; 0 without word or synonym."""
    meant = [(word, 1.0), *((other, _SYNONYM) for other in SYNONYMS.get(word, ()))]
    scores = [
        worth * max((part * _likeness(one, text) for one, part in meant for text in texts), default=0.0)
        for worth, texts in places
    ]
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


def _outside(name: str, owner: str, text: str, *, status: str = "installed") -> dict[str, Any]:
    return {"name": name, "status": status, "provided_by": owner, "description": text}


def _suggestions(found: Sequence[dict[str, Any]], words: Sequence[str]) -> list[str]:
    """Return existing words for those that occur nowhere."""
    from difflib import get_close_matches

    vocabulary = {text for entry in found for _, texts in _places(entry) for text in texts} | LIGHTNING_NAMES
    return [match for word in words for match in get_close_matches(word, sorted(vocabulary), n=2, cutoff=0.7)]


def _print_nothing(words: Sequence[str], suggestions: Sequence[str]) -> None:
    print_note(f"Nothing is known of {' '.join(map(repr, words)) or 'that'}.")
    if suggestions:
        print_note(f"Did you mean {' or '.join(map(repr, suggestions))}?")
    else:
        print_note("`nnx list --all` shows every name.")


def _words(text: str, *, parts: bool = True) -> list[str]:
    """Return lower case words in order, without filler words; with `parts` also the words inside names."""
    found = re.findall(r"[a-z0-9_]+", text.lower())
    if parts:
        found += [part for word in found for part in word.split("_")]
    return list(dict.fromkeys(word for word in found if word and word not in _IGNORED))

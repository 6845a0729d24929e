"""Changes of a checkpoint's structure, and the hypothesis strategy that generates them.

An edit gives its place by numbers, counted in the file at hand, so that every edit applies to every
checkpoint and can be written down.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from fuzz.documents import Document, Packed, parse
from fuzz.pickles import Made, Pairs, Stored, Tup, dump_pickle

__all__ = ["Case", "Edit", "Special", "apply", "cases"]

Special = tuple[str, str]
"""The replacement of a file: a link and its target, a pipe, or a directory."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change.

    Attributes:
        kind: The kind of edit; see `TREE_EDITS`, `FILE_EDITS` and `TEXT_EDITS`.
        file: The file that is changed, by number.
        where: The place in it, by number.
        other: Another place or file, by number.
        value: The new value.
    """

    kind: str
    file: int
    where: int = 0
    other: int = 0
    value: Any = None


@dataclass(frozen=True, slots=True)
class Case:
    """Some edits of one of the samples of a format."""

    sample: int
    edits: tuple[Edit, ...]
    signed: bool = True


TREE_EDITS = (
    "replace",
    "replace",
    "nudge",
    "nudge",
    "delete",
    "duplicate",
    "swap",
    "share",
    "rename",
    "wrap",
    "laugh",
    "many",
    "collide",
)
_LAST = ("laugh", "many", "collide")
"""Edits that make a tree too large for any later edit."""
FILE_EDITS = (
    "remove",
    "link",
    "pipe",
    "directory",
    "exchange",
    "copy",
    "cut",
    "append",
    "flip",
    "splice",
    "widen",
)
TEXT_EDITS = ("twice", "mark", "utf16", "nan", "nested", "number", "comment")

_NUMBERS = [-1, 0, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**58, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), 10**400]
_TEXTS = [
    "",
    "x",
    "../x",
    "..",
    "/etc/passwd",
    "a" * 300,
    "\x1b]0;t\x07",
    "\0",
    "__metadata__",
    "nan",
    "\ud800",
]
_TEXTS += [
    "F32",
    "F64",
    "I8",
    "float32",
    "int64",
    "complex64",
    "bfloat16",
    "BOOL",
    "0",
    "-1",
    "model.a",
    "a/b",
]
_FLOATS = [float("nan"), float("inf"), -0.0, 0.5, 1e308]
_VALUES = st.one_of(
    st.sampled_from(_NUMBERS),
    st.integers(-3, 20),
    st.sampled_from(_TEXTS),
    st.sampled_from(_FLOATS),
    st.sampled_from(
        [None, True, False, [], [[]], {}, {"$": "tensor", "name": "x"}, [1] * 100, b"", b"\x80\x02N."]
    ),
)
_PLACES = st.integers(0, 1 << 16)
_EDITS = st.builds(
    Edit,
    kind=st.sampled_from([*TREE_EDITS * 3, *FILE_EDITS, *TEXT_EDITS]),
    file=_PLACES,
    where=_PLACES,
    other=_PLACES,
    value=_VALUES,
)
cases = st.builds(
    Case,
    sample=st.integers(0, 7),
    edits=st.lists(_EDITS, min_size=1, max_size=3).map(tuple),
    signed=st.sampled_from([True] * 9 + [False]),
)
"""Cases of any format."""


def apply(edits: tuple[Edit, ...], before: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, Special]]:
    """Change files.

    Returns:
        The files, and the replacements of some.
    """
    files, special = dict(before), {}
    documents: dict[str, Document | None] = {}
    for edit in sorted(edits, key=lambda edit: edit.kind in _LAST):
        names = sorted(files)
        if not names:
            break
        name = names[edit.file % len(names)]
        if edit.kind in FILE_EDITS and edit.kind in _ON_FILES:
            files[name] = _dump(documents.pop(name, None), files[name])
            special |= _ON_FILES[edit.kind](files, name, names[edit.other % len(names)]) or {}
            continue
        if edit.kind in TREE_EDITS:
            if name not in documents:
                documents[name] = _parsed(name, files[name])
            found = documents[name]
            if found is not None:
                _edit_tree(found, edit)
                if edit.kind in _LAST:
                    break
                continue
        raw = _dump(documents.pop(name, None), files[name])
        files[name] = _TEXT.get(edit.kind, _flip)(raw, edit)
    return {name: _dump(documents.get(name), raw) for name, raw in files.items()}, special


def _parsed(name: str, raw: bytes) -> Document | None:
    try:
        return parse(name, raw)
    except Exception:  # an edit before made it something else
        return None


def _dump(document: Document | None, raw: bytes) -> bytes:
    return raw if document is None else document.dump()


# --- trees ----------------------------------------------------------------------------------------


def _slots(tree: Any, shares: bool, seen: set[int]) -> Iterator[tuple[Any, Any, bool]]:
    """Yield every place in a tree: a container, a key or position in it, and True if it may share objects.

    JSON has no references, so shared objects are written twice.
    """
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, Made):
        for part in (tree.args, tree.items, tree.values, vars(tree), *tree.items):
            yield from _slots(part, shares, seen)
    elif isinstance(tree, Stored):
        yield from _slots(tree.pid, shares, seen)
    elif isinstance(tree, Packed):
        yield from _slots(tree[0], tree.write is dump_pickle, seen)
    elif isinstance(tree, (dict, list)):
        for key in [*(tree if isinstance(tree, dict) else range(len(tree)))]:
            yield tree, key, shares
            yield from _slots(tree[key], shares, seen)


def _edit_tree(document: Document, edit: Edit) -> None:
    slots = list(_slots(document.tree, isinstance(document.tree, Made), set()))
    if not slots:
        return
    holder, key, shares = slots[edit.where % len(slots)]
    other, other_key, _ = slots[edit.other % len(slots)]
    if edit.kind == "replace":
        holder[key] = edit.value
    elif edit.kind == "nudge":
        holder[key] = _nudged(holder[key], edit.other)
    elif edit.kind == "delete":
        del holder[key]
    elif edit.kind == "duplicate" and isinstance(holder, dict):
        holder[f"{key}.more"] = holder[key]
    elif edit.kind == "duplicate":
        holder.insert(key, holder[key])
    elif edit.kind == "swap":
        holder[key], other[other_key] = other[other_key], holder[key]
    elif edit.kind == "share":
        holder[key] = other[other_key]
    elif edit.kind == "rename" and isinstance(holder, dict):
        value = holder.pop(key)
        holder[edit.value if isinstance(edit.value, (str, int)) else other_key] = value
    elif edit.kind == "wrap":
        holder[key] = [holder[key]] if edit.other % 2 else {"x": holder[key]}
    elif edit.kind == "laugh" and shares:
        tree: Any = [0]
        for _ in range(40):
            tree = [tree, tree]
        holder[key] = tree
    elif edit.kind == "many":
        holder[key] = _many(holder[key], edit.other)
    elif edit.kind == "collide":
        holder[key] = _colliding(edit.other, in_pickle=shares)


_MANY = 5_000
_PRIME = (1 << 61) - 1


def _many(value: Any, number: int) -> Any:
    """A list of thousands, such as of boxes that follow each other, or a dict of as many."""
    if isinstance(value, dict) and value:
        name, item = list(value.items())[number % len(value)]
        return {**value, **{f"{name}.{i}": item for i in range(_MANY)}}
    item = value[number % len(value)] if isinstance(value, list) and value else value
    made = [_moved(item, i * (number % 3)) for i in range(_MANY)]
    return made if number % 2 else (value if isinstance(value, list) else []) + made


def _moved(item: Any, distance: int) -> Any:
    """The same with its first number moved, such as the offset of a box."""
    if isinstance(item, int) and not isinstance(item, bool):
        return item + distance
    if isinstance(item, list) and type(item) in (list, Tup) and item:
        return type(item)([_moved(item[0], distance), *item[1:]])
    return item


def _colliding(number: int, *, in_pickle: bool) -> Any:
    """A dict or a set of thousands of keys that all have one hash, which nothing computes here."""
    numbers = [i * _PRIME + 1 for i in range(_MANY)]
    inside = number % 3 == 1
    if in_pickle:
        keys = [Tup([i, "a"]) for i in numbers] if inside else numbers
        made = type("Made", (Made,), {"symbol": ("__builtin__", "set")})(keys)
        if number % 2:
            made = type("Made", (Made,), {"symbol": ("collections", "OrderedDict")})()
            made.items = Pairs((key, 0) for key in keys)
        return made
    found: list[Any] = [{"$": "tuple", "items": [i, "a"]} for i in numbers] if inside else numbers
    if number % 3 == 2:
        found = [{"$": "complex", "value": [-1000003.0 * i, float(i)]} for i in range(1, _MANY)]
    if number % 2:
        return {"$": "dict", "items": [[key, 0] for key in found]}
    return {"$": "set", "items": found}


def _nudged(value: Any, number: int) -> Any:
    """Something close by."""
    steps = (1, -1, 2, 8, 4096, -8)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 if number % 7 == 0 else value + steps[number % len(steps)]
    if isinstance(value, str):
        return value[: number % (len(value) + 1)] if number % 2 else f"{value}{number % 10}"
    if isinstance(value, bytes) and value:
        at = number % len(value)
        return value[:at] + (bytes([value[at] ^ 255]) + value[at + 1 :] if number % 2 else b"")
    if isinstance(value, list) and len(value) > 1:
        return type(value)(reversed(value)) if not isinstance(value, Packed) else value
    return [value]


# --- files ----------------------------------------------------------------------------------------


def _remove(files: dict[str, bytes], name: str, other: str) -> None:
    del files[name]


def _exchange(files: dict[str, bytes], name: str, other: str) -> None:
    files[name], files[other] = files[other], files[name]


def _copy(files: dict[str, bytes], name: str, other: str) -> None:
    files[name] = files[other]


def _placed(kind: str) -> Callable[[dict[str, bytes], str, str], dict[str, Special]]:
    def place(files: dict[str, bytes], name: str, other: str) -> dict[str, Special]:
        return {name: (kind, other)}

    return place


_ON_FILES: dict[str, Callable[[dict[str, bytes], str, str], dict[str, Special] | None]] = {
    "remove": _remove,
    "exchange": _exchange,
    "copy": _copy,
    "link": _placed("link"),
    "pipe": _placed("pipe"),
    "directory": _placed("directory"),
}


def _flip(raw: bytes, edit: Edit) -> bytes:
    at = edit.where % (len(raw) or 1)
    return raw[:at] + bytes([(raw[at] if raw else 0) ^ (1 << edit.other % 8)]) + raw[at + 1 :]


def _splice(raw: bytes, edit: Edit) -> bytes:
    a, b = edit.where % (len(raw) + 1), edit.other % (len(raw) + 1)
    return raw[:a] + raw[b : b + 64] + raw[a:]


def _twice(raw: bytes, edit: Edit) -> bytes:
    """An object with a key twice."""
    text = raw.decode("latin-1")
    at = [i for i, letter in enumerate(text) if letter == "{"]
    if not at:
        return raw + raw
    start = at[edit.where % len(at)]
    key = text[start + 1 : start + 200].lstrip().partition(":")[0] or '""'
    return f"{text[: start + 1]}{key}: {json.dumps(str(edit.value))}, {text[start + 1 :]}".encode("latin-1")


def _digits(raw: bytes, edit: Edit, text: bytes) -> bytes:
    """Another text in place of some number."""
    found = list(re.finditer(rb"(?<=[ \[,:])\d+(?=[,\]}\s])", raw))
    if not found:
        return raw + text
    match = found[edit.where % len(found)]
    return raw[: match.start()] + text + raw[match.end() :]


_TEXT: dict[str, Callable[[bytes, Edit], bytes]] = {
    "cut": lambda raw, edit: raw[: edit.where % (len(raw) + 1)],
    "append": lambda raw, edit: raw + raw[: edit.where % 5000],
    "flip": _flip,
    "splice": _splice,
    "widen": lambda raw, edit: raw + bytes(edit.where),
    "twice": _twice,
    "mark": lambda raw, edit: b"\xef\xbb\xbf" + raw,
    "utf16": lambda raw, edit: raw.decode("latin-1").encode("utf-16"),
    "nan": lambda raw, edit: _digits(raw, edit, [b"NaN", b"Infinity", b"-Infinity"][edit.other % 3]),
    "nested": lambda raw, edit: _digits(raw, edit, b"[" * 50_000 + b"]" * 50_000),
    "number": lambda raw, edit: _digits(
        raw, edit, [b"1e400", b"9" * 5000, b"-0", b"1.0", b"1e2"][edit.other % 5]
    ),
    "comment": lambda raw, edit: raw.rstrip() + b" // x",
}

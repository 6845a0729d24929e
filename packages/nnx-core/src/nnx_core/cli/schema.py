"""``nnx schema COMMAND``: print the JSON Schema of a command's output with ``--json``.

A schema is derived from the classes of the output: dataclasses, and TypedDicts beside the code that
prints them. It allows no key that they do not name, and takes its descriptions from their docstrings.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints

from nnx_checkpoint.cli.output import print_error, print_table, print_text
from nnx_checkpoint.format.declaration import import_reference
from nnx_core.errors import OptionError

_CHECKPOINTS = "nnx_checkpoint.cli"
_COMMANDS = {
    "choose": ("[--fit one ...] --json", "nnx_core.cli.choose:Chosen"),
    "ckpt convert": ("SRC DST --json", f"{_CHECKPOINTS}.files:Written"),
    "ckpt diff": (
        "LEFT RIGHT --json; exit code 1 where same is false",
        f"{_CHECKPOINTS}.verification:Differences",
    ),
    "ckpt gc": ("DIR --json", f"{_CHECKPOINTS}.files:Collection"),
    "ckpt inspect": ("PATH --json", f"{_CHECKPOINTS}.inspection:Inspection"),
    "ckpt ls": ("PATH --json", f"{_CHECKPOINTS}.files:Listing"),
    "ckpt merge": ("SRC... DST --json", f"{_CHECKPOINTS}.files:Written"),
    "ckpt verify": (
        "PATH --json; exit code 1 where whole is false",
        f"{_CHECKPOINTS}.verification:Verification",
    ),
    "conformance": (
        "NAME --json; exit code 1 where ok is false. With --list, the checks",
        "nnx_conformance.report:Printed",
    ),
    "diff": (
        "SCRIPT --a SIDE --b SIDE --json; exit code 1 where same is false",
        "nnx_conformance.diff.report:DiffReport",
    ),
    "doctor": ("[--strict] --json; exit code 1 where ok is false", "nnx_core.cli.doctor:Diagnosis"),
    "list": ("[--all] --json", "nnx_core.cli.strategies:Listing"),
    "new": ("PATH --json", "nnx_core.cli.new:Printed"),
    "plan": ("module:Class --json; exit code 1 where no strategy fits", "nnx_core.cli.plan:Planned"),
    "search": ("WORD... --json; exit code 1 where results is empty", "nnx_core.cli.search:Found"),
    "show": ("NAME --json", "nnx_core.cli.strategies:Shown"),
}
"""The usage of each command, and the class of its output."""

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: ""}


def documented() -> list[str]:
    """Return the commands that print JSON, of the installed distributions.

    Example:
        >>> documented()[:2]
        ['choose', 'ckpt convert']
    """
    return [
        name
        for name, (_, reference) in _COMMANDS.items()
        if find_spec(reference.partition(".")[0]) is not None
    ]


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema of the output of one of the `documented` commands."""
    usage, reference = _COMMANDS[command]
    definitions: dict[str, Any] = {}
    shape = _shape(import_reference(reference, what=f"what `nnx {command}` prints"), definitions)
    if "$ref" in shape:
        shape = definitions.pop(shape["$ref"].rpartition("/")[2])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"nnx {command} {usage}",
        **shape,
        **({"$defs": definitions} if definitions else {}),
    }


def run(words: Sequence[str]) -> int:
    """Print the schema of a command, or the list of schemas; return 2 if there is none."""
    names, command = documented(), " ".join(words).removeprefix("nnx ")
    if not command:
        print_table(("command", "schema"), [[f"nnx {name}", f"nnx schema {name}"] for name in names])
        return 0
    if command not in names:
        remedy = f"Choose one of {', '.join(map(repr, names))}."
        print_error(OptionError(f"there is no schema of {command!r}.", remedy=remedy))
        return 2
    print_text(json.dumps(schema_of(command), indent=1))
    return 0


def _shape(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; schemas of classes go into `definitions`, with references to them."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]} if _PLAIN[kind] else {}
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin is not None:
        return _composed(origin, arguments, definitions)
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # so that a class may hold itself
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _composed(origin: Any, arguments: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a union, of a list or tuple, or of a dict with text as keys."""
    shapes = [_shape(argument, definitions) for argument in arguments if argument is not ...]
    if origin in (Union, UnionType):
        if all(shape.keys() == {"type"} for shape in shapes):
            return {"type": [shape["type"] for shape in shapes]}
        return {"oneOf": shapes}
    if origin in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": shapes[1]} if shapes[1] else {})}
    is_fixed = origin is tuple and ... not in arguments
    bounds = {"minItems": len(shapes), "maxItems": len(shapes)} if is_fixed else {}
    return {"type": "array", "items": shapes[0], **bounds}


def _object(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass or a TypedDict."""
    hints, meanings = get_type_hints(kind, include_extras=True), _meanings(kind)
    if is_dataclass(kind):
        hints = {item.name: hints[item.name] for item in fields(kind)}
    optional = {name: get_args(hint)[0] for name, hint in hints.items() if _may_be_absent(hint)}
    properties = {name: _shape(hint, definitions) for name, hint in {**hints, **optional}.items()}
    for name in properties.keys() & meanings.keys():
        properties[name] = {**properties[name], "description": meanings[name]}
    return {
        "type": "object",
        "required": [name for name in hints if name not in optional],
        "additionalProperties": False,
        "properties": properties,
        "description": (inspect.getdoc(kind) or "").partition("\n")[0],
    }


def _may_be_absent(hint: Any) -> bool:
    origin: Any = get_origin(hint)
    return origin is NotRequired


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Return the docs of attributes from a class, its bases, or the fields' ``help``."""
    found: dict[str, str] = {}
    for base in getattr(kind, "__orig_bases__", ()):
        found |= _meanings(base)
    section = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", section, re.MULTILINE):
        found[name] = " ".join(text.split())
    if is_dataclass(kind):
        found |= {item.name: item.metadata["help"] for item in fields(kind) if "help" in item.metadata}
    return found

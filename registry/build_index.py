"""Build the catalog that nnx-core ships from the files in ``registry/plugins``.

    python registry/build_index.py            writes packages/nnx-core/src/nnx/_catalog.json
    python registry/build_index.py --check    exit code 1 where that file is stale

Each file is checked against ``schema.json``, of which `violations` understands the keywords that we
use. Needs Python 3.11 for its TOML reader; nothing that is installed runs this.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INDEX = HERE.parent / "packages" / "nnx-core" / "src" / "nnx" / "_catalog.json"
# Successors may be Lightning's own names.
LIGHTNING_SUCCESSORS = {"auto", "ddp", "xla", "xla_debug"}


def build(folder: Path = HERE / "plugins") -> str:
    """The text of the index: one list of distributions, and one of historical names.

    Raises:
        ValueError: A file does not follow the schema, or two files claim one name.
    """
    plugins: list[dict[str, Any]] = []
    historical: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.toml")):
        content = _read(path)
        if content["tier"] == "historical":
            historical += content["strategies"]
        else:
            plugins.append(content)
    _check_names(plugins, historical)
    index = {
        "format": 1,
        "plugins": plugins,
        "historical": sorted(historical, key=lambda old: str(old["name"])),
    }
    return json.dumps(index, indent=1) + "\n"


def violations(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """Where a value breaks a JSON Schema made of the keywords handled here."""
    kinds = {"object": dict, "array": list, "string": str}
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        yield f"{where or 'the file'} is not of type {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}, not {schema['const']!r}"
    if isinstance(value, str):
        yield from _text_violations(value, schema, where)
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where} has too few items"
        for position, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{where}[{position}]")
    if isinstance(value, dict):
        yield from _object_violations(value, schema, where)
    if "if" in schema:
        branch = "else" if any(violations(value, schema["if"], where)) else "then"
        yield from violations(value, schema.get(branch, {}), where)


def _text_violations(value: str, schema: dict[str, Any], where: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", sys.maxsize):
        yield f"{where} has {len(value)} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where} is {value!r}, which does not match {schema['pattern']}"


def _object_violations(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", []):
        if name not in value:
            yield f"{where or 'the file'} lacks {name!r}"
    for name, item in value.items():
        if name in known:
            yield from violations(item, known[name], f"{where}.{name}".lstrip("."))
        elif schema.get("additionalProperties", True) is False:
            yield f"{where or 'the file'} has an unknown key {name!r}"


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    content = tomllib.loads(path.read_text(encoding="utf-8"))
    schema = json.loads((HERE / "schema.json").read_text(encoding="utf-8"))
    found = list(violations(content, schema))
    if content.get("tier") != "historical" and content.get("distribution") != path.stem:
        found.append("the file is not named after its distribution")
    if found:
        raise ValueError(f"{path}: {'; '.join(found)}")
    return content


def _check_names(plugins: list[dict[str, Any]], historical: list[dict[str, Any]]) -> None:
    names = [str(entry["name"]) for plugin in plugins for entry in plugin["strategies"]]
    every = names + [str(old["name"]) for old in historical]
    if twice := sorted({name for name in every if every.count(name) > 1}):
        raise ValueError(f"these names are claimed twice: {', '.join(twice)}")
    for old in historical:
        if old["successor"] not in {*names, *LIGHTNING_SUCCESSORS}:
            raise ValueError(f"{old['name']}: its successor {old['successor']!r} does not exist")


def main(arguments: list[str]) -> int:
    """Write the index, or with ``--check`` compare it."""
    text = build()
    if arguments == ["--check"]:
        fresh = INDEX.is_file() and INDEX.read_text(encoding="utf-8") == text
        print("the catalog is up to date" if fresh else "stale: run python registry/build_index.py")  # noqa: T201
        return 0 if fresh else 1
    INDEX.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

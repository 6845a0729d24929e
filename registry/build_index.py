"""Build what is made from ``registry/plugins``: the index that nnx-core ships, and a page of the docs.

    python registry/build_index.py            writes nnx/catalog/index.json and docs/catalog.md
    python registry/build_index.py --check    exit code 1 where one of them is stale

Each file is checked against ``schema.json``. Needs Python 3.11 for its TOML reader, and jsonschema; nothing
that is installed runs this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INDEX = HERE.parent / "packages" / "nnx-core" / "src" / "nnx_core" / "catalog" / "index.json"
PAGE = HERE.parent / "docs" / "catalog.md"
# Successors may be Lightning's own names.
LIGHTNING_SUCCESSORS = {"auto", "ddp", "xla", "xla_debug"}
TIERS = {
    "official": "Ours",
    "community": "Of others",
    "example": "Examples",
}


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
            package = {key: content[key] for key in ("distribution", "url") if key in content}
            historical += [old | package for old in content["strategies"]]
        else:
            plugins.append(content)
    _check_names(plugins, historical)
    index = {
        "format": 2,
        "plugins": plugins,
        "historical": sorted(historical, key=lambda old: str(old["name"])),
    }
    return json.dumps(index, indent=1) + "\n"


def page(index: str) -> str:
    """The page of the docs that shows an index."""
    content = json.loads(index)
    lines = [
        "# Catalog",
        "",
        "<!-- Written by registry/build_index.py from registry/plugins: edit those files instead. -->",
        "",
        "Every strategy that nnx knows of, installed or not. `nnx search WORD` searches it, `nnx show NAME`",
        "shows one: see [Command line](command-line.md). To add a plugin, add a file to",
        "`registry/plugins` in the repository. Being listed is no endorsement.",
    ]
    for tier, title in TIERS.items():
        plugins = [plugin for plugin in content["plugins"] if plugin["tier"] == tier]
        lines += ["", f"## {title}"] * bool(plugins)
        for plugin in plugins:
            lines += _plugin_section(plugin)
    return "\n".join([*lines, *_history_section(content["historical"])]) + "\n"


def _plugin_section(plugin: dict[str, Any]) -> list[str]:
    more = ""
    if "docs" in plugin:
        more += f" [More]({plugin['docs'].removeprefix('docs/')})."
    if "url" in plugin:
        more += f" [Its home]({plugin['url']})."
    if "replaces" in plugin:
        more += f" It takes the place of {', '.join(plugin['replaces'])}."
    install = plugin.get("install", f"pip install {plugin['distribution']}")
    return [
        "",
        f"### {plugin['distribution']}",
        "",
        f"{plugin['summary']}. `{install}`; plugin API {plugin['api']}.{more}",
        "",
        "| strategy | what it is | use it when | runs on |",
        "|---|---|---|---|",
        *(
            f"| `{entry['name']}` | {entry['summary']} | {entry['use_when']} "
            f"| {', '.join(entry.get('accelerators', []))} |"
            for entry in plugin["strategies"]
        ),
    ]


def _history_section(historical: list[dict[str, Any]]) -> list[str]:
    return [
        "",
        "## Names of the past",
        "",
        "Old scripts still have these. Nothing gives them to the Lightning of today; Trainer and Fabric say",
        "what this table says.",
        "",
        "| name | what it was | last in Lightning | use | what else changes |",
        "|---|---|---|---|---|",
        *(
            f"| `{old['name']}` | {old['was']} | {old.get('until', '')} | `{old['successor']}` "
            f"| {old.get('how', '')} |"
            for old in historical
        ),
    ]


def _read(path: Path) -> dict[str, Any]:
    import tomllib
    from jsonschema import Draft202012Validator

    content = tomllib.loads(path.read_text(encoding="utf-8"))
    schema = json.loads((HERE / "schema.json").read_text(encoding="utf-8"))
    found = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(content)
    ]
    if content.get("distribution", path.stem) != path.stem:
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
    """Write the index and the page, or with ``--check`` compare them."""
    text = build()
    made = {INDEX: text, PAGE: page(text)}
    if arguments == ["--check"]:
        stale = [path for path, text in made.items() if not path.is_file() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.name} is stale: run python registry/build_index.py")  # noqa: T201
        return int(bool(stale))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

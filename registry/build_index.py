"""Build the catalog: the index that nnx-core ships, and a page of the docs.

    python registry/build_index.py            writes nnx_core/names/catalog.json and docs/catalog.md
    python registry/build_index.py --check    exit code 1 where one of them is stale

The plugins of this repository are described by their own specs and by their pyproject.toml; those of others,
and removed names, by the files in ``registry/plugins``. Each entry is checked against ``schema.json``.
Needs Python 3.11 for its TOML reader, jsonschema, and the plugins of this repository installed; nothing that
is installed runs this.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from nnx_core.names.spec import Capabilities, StrategySpec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
INDEX = ROOT / "packages" / "nnx-core" / "src" / "nnx_core" / "names" / "catalog.json"
PAGE = ROOT / "docs" / "catalog.md"
# Successors may be Lightning's own names.
LIGHTNING_SUCCESSORS = {"auto", "ddp", "xla", "xla_debug"}
TIERS = {
    "official": "Ours",
    "community": "Of others",
    "example": "Examples",
}


def build(folder: Path = HERE / "plugins") -> str:
    """The text of the index: one list of distributions, and one of historical names.

    Args:
        folder: The directory with the files of others' plugins and of historical names.

    Raises:
        ValueError: An entry does not follow the schema, or two claim one name.
    """
    plugins = _ours()
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
        "plugins": sorted(plugins, key=lambda plugin: str(plugin["distribution"])),
        "historical": sorted(historical, key=lambda old: str(old["name"])),
    }
    return json.dumps(index, indent=1) + "\n"


def page(index: str) -> str:
    """The page of the docs that shows an index."""
    content = json.loads(index)
    lines = [
        "# Catalog",
        "",
        "<!-- Written by registry/build_index.py from the plugins' specs and from registry/plugins. -->",
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
        more += f" It replaces {', '.join(plugin['replaces'])}."
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
        "## Removed names",
        "",
        "Old scripts may use these names, which the current Lightning does not have. Trainer and Fabric",
        "raise an error with the replacement from this table.",
        "",
        "| name | what it was | last in Lightning | use | what else changes |",
        "|---|---|---|---|---|",
        *(
            f"| `{old['name']}` | {old['was']} | {old.get('until', '')} | `{old['successor']}` "
            f"| {old.get('how', '')} |"
            for old in historical
        ),
    ]


# --- the plugins of this repository ---------------------------------------------------------------


def _ours() -> list[dict[str, Any]]:
    """Return the catalog entries of this repository's plugins that have strategies."""
    paths = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]
    projects = [(path.parent, _toml(path)) for path in paths]
    return [
        _of_project(folder, project)
        for folder, project in projects
        if any(hasattr(module, "nnx_strategies") for module in _modules(project))
    ]


def _modules(project: dict[str, Any]) -> list[Any]:
    return [
        import_module(name) for name in project["project"].get("entry-points", {}).get("nnx", {}).values()
    ]


def _of_project(folder: Path, project: dict[str, Any]) -> dict[str, Any]:
    about, is_example = project["project"], folder.parent.name == "examples"
    specs: list[StrategySpec] = [spec for module in _modules(project) for spec in module.nnx_strategies()]
    (api,) = {".".join(map(str, spec.api_version)) for spec in specs}
    (docs,) = {spec.docs_url for spec in specs}
    content = {
        "distribution": about["name"],
        "tier": "example" if is_example else "official",
        "summary": about["description"],
        "api": api,
        "docs": docs,
        "install": f"pip install -e {folder.relative_to(ROOT)}" if is_example else "",
        "replaces": project["tool"].get("nnx", {}).get("replaces", []),
        "strategies": [_strategy(spec) for spec in specs],
    }
    content = {key: value for key, value in content.items() if value}
    _check(content, source=folder)
    return content


def _strategy(spec: StrategySpec) -> dict[str, Any]:
    """Return a spec's entry in the catalog, with the flags that differ from the defaults."""
    values = spec.capabilities.as_dict()
    unusual = {
        item.name: value
        for item in fields(Capabilities)
        if isinstance(value := values[item.name], bool) and value != item.default
    }
    entry = {
        "name": spec.name,
        "summary": spec.description,
        "use_when": spec.use_when,
        "accelerators": values["accelerators"],
        "capabilities": [name for name, can in unusual.items() if can],
        "lacks": [name for name, can in unusual.items() if not can],
    }
    return {key: value for key, value in entry.items() if value}


# --- files ----------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    content = _toml(path)
    _check(content, source=path)
    if content.get("distribution", path.stem) != path.stem:
        raise ValueError(f"{path}: the file is not named after its distribution")
    return content


def _toml(path: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(path.read_text(encoding="utf-8"))


def _check(content: dict[str, Any], *, source: Path) -> None:
    from jsonschema import Draft202012Validator

    schema = json.loads((HERE / "schema.json").read_text(encoding="utf-8"))
    found = [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(content)
    ]
    if found:
        raise ValueError(f"{source}: {'; '.join(found)}")


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

"""The catalog: strategies of every known distribution, installed or not, and successors of removed names.

It is built from ``registry/`` of the repository, and shipped as ``catalog.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Tier = Literal["official", "community", "example"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A strategy of a distribution.

    Attributes:
        name: The strategy.
        distribution: The distribution to install to get it.
        tier: ``official``, ``community`` or ``example``.
        summary: One sentence of description.
        use_when: When to choose it.
        install: The command that installs it.
        api: The version of the plugin API that it was written for.
        accelerators: Devices it runs on.
        capabilities: The capabilities that strategies do not have by default.
        lacks: The capabilities that strategies have by default and it lacks.
        docs: Its page in the documentation, or its home.
        replaces: Discontinued distributions whose names it took over.
    """

    name: str
    distribution: str
    tier: Tier
    summary: str
    use_when: str
    install: str
    api: str
    accelerators: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    docs: str = ""
    replaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoricalName:
    """A removed name.

    Attributes:
        name: The name in old scripts.
        was: Its former meaning.
        successor: The name to use today.
        how: A sentence about other necessary changes.
        until: The last minor version of Lightning that had it, where that is known.
        distribution: The package that provided it outside Lightning, if there was one.
        url: The home of that package.
    """

    name: str
    was: str
    successor: str
    how: str = ""
    until: str = ""
    distribution: str = ""
    url: str = ""


@cache
def _index() -> tuple[dict[str, CatalogEntry], dict[str, HistoricalName]]:
    text = Path(__file__).with_name("catalog.json").read_text(encoding="utf-8")
    content = json.loads(text)
    entries: dict[str, CatalogEntry] = {}
    for plugin in content["plugins"]:
        common: dict[str, Any] = {
            "distribution": plugin["distribution"],
            "tier": plugin["tier"],
            "install": plugin.get("install", f"pip install {plugin['distribution']}"),
            "api": plugin["api"],
            "docs": plugin.get("docs", plugin.get("url", "")),
            "replaces": tuple(plugin.get("replaces", ())),
        }
        for strategy in plugin["strategies"]:
            values: dict[str, Any] = {
                key: tuple(v) if isinstance(v, list) else v for key, v in strategy.items()
            }
            entries[strategy["name"]] = CatalogEntry(**common, **values)
    return entries, {old["name"]: HistoricalName(**old) for old in content["historical"]}


def known() -> dict[str, CatalogEntry]:
    """Return every strategy of the catalog by name, installed or not.

    Example:
        >>> known()["fsdp_auto"].install
        'pip install nnx-fsdp'
    """
    return _index()[0]


def historical() -> dict[str, HistoricalName]:
    """Return the removed names.

    Example:
        >>> historical()["ddp_sharded"].successor
        'fsdp_auto'
    """
    return _index()[1]

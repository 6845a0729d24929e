"""The catalog of known strategies: who provides a name that is not installed, and what old names became.

Built from ``registry/`` and shipped as data. This module only reads it. What to say to a user who
asks for such a name is decided in `nnx.registry`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["CatalogEntry", "HistoricalName", "historical", "known"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A strategy that some distribution provides.

    Attributes:
        name: The strategy.
        distribution: What to install to get it.
        tier: ``official`` or ``community``.
        summary: What it is.
        use_when: When to choose it.
    """

    name: str
    distribution: str
    tier: str
    summary: str
    use_when: str


@dataclass(frozen=True, slots=True)
class HistoricalName:
    """A name that nothing provides any more.

    Attributes:
        name: What old scripts write.
        was: What it stood for.
        successor: The name to use today.
    """

    name: str
    was: str
    successor: str


@cache
def _index() -> tuple[dict[str, CatalogEntry], dict[str, HistoricalName]]:
    text = Path(__file__).with_name("_catalog.json").read_text(encoding="utf-8")
    content = json.loads(text)
    entries = {
        entry["name"]: CatalogEntry(distribution=plugin["distribution"], tier=plugin["tier"], **entry)
        for plugin in content["plugins"]
        for entry in plugin["strategies"]
    }
    return entries, {old["name"]: HistoricalName(**old) for old in content["historical"]}


def known() -> dict[str, CatalogEntry]:
    """Every strategy of the catalog by name, installed or not.

    Example:
        >>> known()["fsdp_auto"].distribution
        'nnx-fsdp'
    """
    return _index()[0]


def historical() -> dict[str, HistoricalName]:
    """Names of the past, by name.

    Example:
        >>> historical()["ddp_sharded"].successor
        'fsdp_auto'
    """
    return _index()[1]

"""What `nnx list`, `nnx show` and `nnx search` know of a name, as plain data: one dict for each strategy.

Its ``status`` is ``installed``, ``not installed``, ``disabled``, ``broken``, ``missing`` (the installed
version of its package lacks it) or ``historical``. Reads specs and the catalog; imports no engine.
"""

from __future__ import annotations

from typing import Any

from nnx_core.catalog import CatalogEntry, historical, known
from nnx_core.plugins import inventory
from nnx_core.registry import StrategyRegistry

__all__ = ["catalogued", "entries", "past", "usable"]


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

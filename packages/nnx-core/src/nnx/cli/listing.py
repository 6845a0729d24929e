"""``nnx list``: the names that can be used, and with ``--all`` those that could be or once could."""

from __future__ import annotations

from typing import Any

from nnx.catalog import historical, known
from nnx.cli.output import print_json, print_note, print_table
from nnx.plugins import inventory
from nnx.registry import StrategyRegistry

__all__ = ["catalog_status", "run"]


def run(*, everything: bool, as_json: bool) -> int:
    """Print the list; a broken plugin is mentioned, and is `nnx doctor`'s matter."""
    rows = _installed() + (_from_catalog() + _from_history() if everything else [])
    problems = inventory().problems
    if as_json:
        print_json({"strategies": rows, "problems": [problem.as_dict() for problem in problems]})
        return 0
    if rows:
        print_table(
            ("name", "status", "provided by", "description"),
            [[row["name"], row["status"], row["provided_by"], row["description"]] for row in rows],
        )
    else:
        print_note("No strategy is installed. `nnx list --all` shows what could be.")
    if problems:
        print_note(f"{len(problems)} problem(s) with plugins: run `nnx doctor`.")
    return 0


def catalog_status(name: str) -> str:
    """Why a name of the catalog cannot be used: not installed, disabled, broken or missing."""
    distribution = known()[name].distribution
    plugins = [plugin for plugin in inventory().plugins if plugin.distribution == distribution]
    if not plugins:
        return "not installed"
    return plugins[0].status if plugins[0].status != "ok" else "missing"


def _installed() -> list[dict[str, Any]]:
    return [
        {
            **StrategyRegistry.get(name).as_dict(),
            "status": "installed",
            "provided_by": StrategyRegistry.owner(name),
        }
        for name in StrategyRegistry
    ]


def _from_catalog() -> list[dict[str, Any]]:
    return [
        {
            "name": entry.name,
            "status": catalog_status(entry.name),
            "provided_by": entry.distribution,
            "description": entry.summary,
            "use_when": entry.use_when,
        }
        for name, entry in sorted(known().items())
        if name not in StrategyRegistry
    ]


def _from_history() -> list[dict[str, Any]]:
    return [
        {
            "name": old.name,
            "status": "historical",
            "provided_by": "",
            "description": f"use {old.successor}; it was {old.was}",
            "successor": old.successor,
        }
        for name, old in sorted(historical().items())
        if name not in StrategyRegistry
    ]

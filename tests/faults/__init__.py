"""Strategies that are broken on purpose, each in one way, and the check that has to catch each.

One module for each group of checks. A fault is a `Backend` or a Lightning strategy with one promise
broken; `test_planted_faults.py` sees that its check fails and that others do not.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from nnx_conformance.check import GROUPS
from nnx_conformance.subject import Subject

__all__ = ["Fault", "all_faults"]

EVERYTHING = ("*",)
"""For faults after which hardly anything is right."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One broken strategy.

    Attributes:
        name: What is wrong with it, in a few words; unique.
        target: ``"faults.module:Class"``.
        caught_by: Name of the check that has to fail.
        also: Checks that rightly fail too; `EVERYTHING` for a wide fault.
        imports: Modules that register `target`, where that is a name, for faults that declare capabilities.
    """

    name: str
    target: str
    caught_by: str
    also: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether all checks that fail are named."""
        return self.also != EVERYTHING

    def subject(self) -> Subject:
        """The broken strategy."""
        return Subject(self.target, imports=self.imports)


def all_faults() -> list[Fault]:
    """The faults of every group."""
    modules = [importlib.import_module(f"faults.{group}") for group in GROUPS]
    return [fault for module in modules for fault in module.FAULTS]

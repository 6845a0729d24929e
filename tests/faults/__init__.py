"""Strategies that are broken on purpose, each in one way, and the check that has to catch each.

One module for each group of checks. A fault is a `Backend` or a Lightning strategy with one promise
broken; `test_planted_faults.py` sees that its check fails and that others do not.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from nnx_conformance.check import GROUPS
from nnx_conformance.subject import Subject
from nnx_core.names.spec import Capabilities

__all__ = ["DECLARED", "EVERYTHING", "Fault", "all_faults", "fault", "name_of"]

EVERYTHING = ("*",)
"""For faults after which hardly anything is right."""

DECLARED: dict[type, Capabilities] = {}
"""What broken strategies declare, where that is not the default; `registered` registers them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One broken strategy.

    Attributes:
        name: What is wrong with it, in a few words; unique.
        target: ``"faults.module:Class"``.
        caught_by: Name of the check that has to fail.
        also: Checks that rightly fail too; `EVERYTHING` for a wide fault.
        imports: Modules that register `target`, where that is a name.
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


def fault(name: str, broken: type, caught_by: str, *also: str) -> Fault:
    """The fault that a class has."""
    declared = broken in DECLARED
    return Fault(
        name=name,
        target=name_of(broken) if declared else f"{broken.__module__}:{broken.__name__}",
        caught_by=caught_by,
        also=also,
        imports=("faults.registered",) if declared else (),
    )


def name_of(broken: type) -> str:
    """The name under which `registered` registers a broken strategy."""
    return f"broken_{broken.__name__.lower()}"


def all_faults() -> list[Fault]:
    """The faults of every group."""
    modules = [importlib.import_module(f"faults.{group}") for group in GROUPS]
    return [fault for module in modules for fault in module.FAULTS]

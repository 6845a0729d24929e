"""Deliberately broken strategies, each with one fault, and the check that must catch the fault.

Each group of checks has a module. A fault is a `Backend` or a Lightning strategy with one broken promise;
`test_planted_faults.py` tests that its check fails and that other checks pass.

"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from nnx_conformance.check import GROUPS
from nnx_conformance.subject import Subject
from nnx_core.names.spec import Capabilities

__all__ = ["DECLARED", "EVERYTHING", "Fault", "all_faults", "fault", "name_of"]

EVERYTHING = ("*",)
"""For faults that break nearly every check."""

DECLARED: dict[type, Capabilities] = {}
"""Non-default capabilities of broken strategies, which `registered` registers."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One broken strategy.

    Attributes:
        name: A short, unique description of the fault.
        target: ``"faults.module:Class"``.
        caught_by: Name of the check that must fail.
        also: Other checks that rightly fail; `EVERYTHING` for a wide fault.
        imports: Modules that register `target`, if that is a name.

    """

    name: str
    target: str
    caught_by: str
    also: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """True if `also` names all other failing checks."""
        return self.also != EVERYTHING

    def subject(self) -> Subject:
        """Return the broken strategy."""
        return Subject(self.target, imports=self.imports)


def fault(name: str, broken: type, caught_by: str, *also: str) -> Fault:
    """Return the fault of a class."""
    declared = broken in DECLARED
    return Fault(
        name=name,
        target=name_of(broken) if declared else f"{broken.__module__}:{broken.__name__}",
        caught_by=caught_by,
        also=also,
        imports=("faults.registered",) if declared else (),
    )


def name_of(broken: type) -> str:
    """Return the name under which `registered` registers a broken strategy."""
    return f"broken_{broken.__name__.lower()}"


def all_faults() -> list[Fault]:
    """Return the faults of every group."""
    modules = [importlib.import_module(f"faults.{group}") for group in GROUPS]
    return [fault for module in modules for fault in module.FAULTS]

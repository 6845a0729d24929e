"""The selection of tests by markers: `quick` marks the cases that the default run leaves out as `full`.

The default run is ``-m "not full"`` in the settings of the monorepo; ``-m full`` runs the others, and
``-m ""`` all. A run that names a test by its node id runs it, whether or not it is marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nnx_conformance.check import Check

__all__ = ["DEFAULT", "MARKERS", "Quick", "mark_full", "select_named"]

DEFAULT = "not full"
"""The value of ``-m`` in the settings of the monorepo."""
MARKERS = (
    "full: the default run leaves the test or case out; `nox -s full` runs it",
    "quick(every=1, first=0): the default run tries every n-th case of the test, from the given one on",
    "quick(checks=(), groups=(), adapter=False): the default run tries these checks of a conformance class",
    "nodes: the test runs on several nodes, simulated on this machine; `nox -s nodes` runs it",
    "slow: `nox -s nodes` leaves the test or case out",
)


@dataclass(frozen=True, kw_only=True)
class Quick:
    """The arguments of the marker `quick`: the cases of a test, or the checks of a class, that are tried.

    Attributes:
        every: The default run tries every n-th case. Cases that are marked `full` by hand do not count.
        first: The number of the first of these cases.
        checks: Names of checks.
        groups: Names of groups, or of modules of checks, whose checks are all tried but those of the adapter.
        adapter: True if the checks of the adapter are tried too (`Check.of_adapter`).
    """

    every: int = 1
    first: int = 0
    checks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    adapter: bool = False

    def has_case(self, number: int) -> bool:
        """Whether the default run tries a case, by its number."""
        return number % self.every == self.first

    def has_check(self, check: Check) -> bool:
        """Whether the default run tries a check."""
        if check.name in self.checks:
            return True
        if check.of_adapter:
            return self.adapter
        return not {check.group, check.module}.isdisjoint(self.groups)


def mark_full(items: Iterable[pytest.Item]) -> None:
    """Mark the cases as `full` that a marker `quick` leaves out."""
    numbers: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("quick")
        if marker is None or item.get_closest_marker("full"):
            continue
        quick, test = Quick(**marker.kwargs), item.nodeid.partition("[")[0]
        if quick.every > 1:
            is_tried = quick.has_case(numbers[test])
            numbers[test] += 1
        else:
            is_tried = quick.has_check(item.callspec.params["check"])  # type: ignore[attr-defined]
        if not is_tried:
            item.add_marker("full")


def select_named(config: pytest.Config) -> None:
    """Lift the default selection from a run that names tests by their node ids."""
    if config.option.markexpr == DEFAULT and any("::" in argument for argument in config.args):
        config.option.markexpr = ""

"""The conformance suite is tested with strategies that are broken on purpose.

The check that names a fault has to catch it, and one other check of the group must not fail because of a
narrow fault; `fault_table.py` runs all checks. README's command runs one fault for each group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faults import Fault, all_faults
from nnx_conformance.check import Reference, all_checks
from nnx_conformance.pool import WorkerPool
from nnx_conformance.runner import Session

CHECKS = {check.name: check for check in all_checks()}
FAULTS = {fault.name: fault for fault in all_faults()}
NEIGHBOURS = 1
"""Other checks of the same group that must not fail because of a narrow fault; `fault_table.py` tries all."""


def cases() -> list[Any]:
    """Return all faults, but for the first cheap narrow one of each group of checks marked `full`."""
    groups: set[str] = set()
    found = []
    for fault in FAULTS.values():
        group = CHECKS[fault.caught_by].group
        is_cheap = CHECKS[fault.caught_by].module != "lifecycle.launch"  # whose checks start processes
        is_first = fault.is_narrow and is_cheap and group not in groups
        found.append(pytest.param(fault, id=fault.name, marks=() if is_first else pytest.mark.full))
        if is_first:
            groups.add(group)
    return found


@pytest.fixture(scope="module")
def reference(pool: WorkerPool) -> Reference:
    return Reference(pool)


@pytest.mark.parametrize("fault", cases())
def test_the_fault_is_caught_by_the_check_that_names_it(
    pool: WorkerPool, reference: Reference, fault: Fault, tmp_path: Path
) -> None:
    session = Session(fault.subject(), pool=pool, reference=reference)

    def verdict(name: str) -> tuple[str, str]:
        directory = tmp_path / name
        directory.mkdir()
        result = session.try_check(CHECKS[name], directory)
        return result.verdict, result.detail

    assert verdict(fault.caught_by)[0] == "failed"
    for neighbour in neighbours(fault):
        found, detail = verdict(neighbour)
        assert found != "failed", f"{neighbour}: {detail}"


def neighbours(fault: Fault) -> list[str]:
    """The checks that follow the fault's own in its group, in a circle."""
    if not fault.is_narrow:
        return []
    group = [check for check in CHECKS.values() if check.group == CHECKS[fault.caught_by].group]
    start = [check.name for check in group].index(fault.caught_by)
    around = [check.name for check in group[start + 1 :] + group[:start] if not check.full]
    return [name for name in around if name not in fault.also][:NEIGHBOURS]


def test_every_fault_names_checks_that_exist() -> None:
    assert len(FAULTS) == len(all_faults()), "two faults have one name"
    for fault in FAULTS.values():
        named = {fault.caught_by, *fault.also} - {"*"}
        assert named <= CHECKS.keys(), fault

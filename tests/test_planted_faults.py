"""The conformance suite is tested with strategies that are broken on purpose.

Every fault has to be caught by the check that names it; those in habits take turns. Whether a narrow fault
fails no other check is tried on one check of its group, by a quarter of the faults. With
NNX_MATRIX=full all are tried on everything.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from faults import Fault, all_faults
from nnx.testing.conformance import Session, all_checks
from nnx.testing.conformance.bench import Reference
from nnx.testing.pool import WorkerPool

CHECKS = {check.name: check for check in all_checks()}
FAULTS = {fault.name: fault for fault in all_faults()}
FULL = os.environ.get("NNX_MATRIX") == "full"
NEIGHBOURS = 1
"""Other checks of the same group that must not fail because of a narrow fault; `fault_table.py` tries all."""
TURNS = 1 if FULL else 4
"""Of so many faults one is tried on its neighbours, and of so many strategies with a bad habit one at all."""


def tried(fault: Fault) -> bool:
    """Whether it is this fault's turn; all habits of one strategy have it together, as they share a job."""
    is_habit = CHECKS[fault.caught_by].group == "habits"
    return not (is_habit and zlib.crc32(fault.target.encode()) % TURNS)


@pytest.fixture(scope="module")
def reference(pool: WorkerPool) -> Reference:
    return Reference(pool)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_the_fault_is_caught_by_the_check_that_names_it(
    pool: WorkerPool, reference: Reference, fault: Fault, tmp_path: Path
) -> None:
    if not tried(fault):
        pytest.skip("its turn comes with NNX_MATRIX=full")
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
    if not fault.is_narrow or zlib.crc32(fault.name.encode()) % TURNS:
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

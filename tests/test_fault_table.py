"""The table of planted faults shows the caught ones, the missed ones, and other failing checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fault_table
from fault_table import CHECKS, FAST, FaultRunner, examine, to_try, unbroken
from faults import EVERYTHING, Fault
from nnx_conformance import Subject
from nnx_conformance.pool import WorkerPool

SUMMED = Fault(name="summed", target="jobs.conformance_names:SumsGradients", caught_by="losses_float32")
TRIED = ["losses_float32", "sgd_momentum", "rank_properties"]
TINY = Subject("nnx_tiny.backend:TinyBackend")


@pytest.fixture
def runner(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> FaultRunner:
    """A runner with only three checks in the fast profile."""
    monkeypatch.setattr(fault_table, "FAST", TRIED)
    return FaultRunner(pool)


def test_a_fault_is_in_the_class_that_it_changes() -> None:
    assert unbroken(SUMMED) == TINY.strategy


def test_a_narrow_fault_is_tried_on_everything_and_a_wide_one_on_its_own_check() -> None:
    assert set(to_try(SUMMED, wide=False, own_group=False)) == set(FAST)
    assert to_try(SUMMED, wide=False, own_group=False)[0] == SUMMED.caught_by
    own = to_try(SUMMED, wide=False, own_group=True)
    assert own[0] == SUMMED.caught_by
    assert set(own) == {name for name in FAST if CHECKS[name].group == "numbers"}
    wide = replace(SUMMED, also=EVERYTHING)
    assert to_try(wide, wide=False, own_group=False) == [SUMMED.caught_by]
    assert set(to_try(wide, wide=True, own_group=False)) == set(FAST)


def test_a_narrow_fault_fails_what_it_names_and_nothing_else(runner: FaultRunner) -> None:
    row, is_right = examine(runner, replace(SUMMED, also=("sgd_momentum",)), TRIED)
    assert is_right
    assert row.startswith("| summed | TinyBackend | losses_float32 | sgd_momentum |  | ")
    assert runner.healthy == {TINY: set()}


@pytest.mark.full
def test_what_a_narrow_fault_fails_besides_is_marked(runner: FaultRunner) -> None:
    row, is_right = examine(runner, SUMMED, TRIED)
    assert not is_right
    assert row.startswith("| summed | TinyBackend | losses_float32 | nothing | **sgd_momentum** | ")


@pytest.mark.full
def test_what_fails_without_the_fault_too_does_not_count(runner: FaultRunner) -> None:
    runner.healthy[TINY] = {"sgd_momentum"}
    row, is_right = examine(runner, SUMMED, TRIED)
    assert is_right
    assert row.startswith("| summed | TinyBackend | losses_float32 | nothing |  | ")


@pytest.mark.full
def test_a_fault_that_nothing_catches_is_marked(runner: FaultRunner) -> None:
    missed = replace(SUMMED, caught_by="rank_properties", also=EVERYTHING)
    row, is_right = examine(runner, missed, TRIED)
    assert not is_right
    assert row.startswith("| summed | TinyBackend | rank_properties **NOT CAUGHT** | (wide) |  | ")

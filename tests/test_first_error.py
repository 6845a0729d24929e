"""The first error is the one that is raised, for each engine, also with planted faults in its clean-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.first_error_jobs import lose_it, lose_it_carelessly, reset_in_vain
from nnx_base.clean_up import CleanUp, clean_up, clean_up_after_error
from nnx_conformance.checks.lifecycle.errors import MESSAGE
from nnx_conformance.pool import WorkerPool
from nnx_conformance.subject import Subject

UNITS = {"min_num_params": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp_auto": UNITS,
    "nnscaler_zero": {},
    "nnscaler_tp": {},
    "nnx_deepspeed_2": {},
    "nnx_deepspeed_3": {},
    "colossalai": UNITS,
    "fairscale_fsdp": {},
    "fairscale_sharded": {},
}
FIRST = f"RuntimeError: {MESSAGE}"


def engines() -> list[Any]:
    """All of them, of which a default run tries the first."""
    return [
        pytest.param(name, marks=pytest.mark.full if number else ()) for number, name in enumerate(ENGINES)
    ]


@pytest.mark.parametrize("strategy", engines())
def test_teardown_that_cannot_gather_keeps_the_first_error(
    pool: WorkerPool, strategy: str, tmp_path: Path
) -> None:
    subject = Subject(strategy, ENGINES[strategy])
    careful, careless = tmp_path / "careful", tmp_path / "careless"
    careful.mkdir()
    careless.mkdir()
    endings = pool.run(lose_it, subject, str(careful), "training_step")
    assert [ending.error for ending in endings] == [FIRST] * 2
    endings = pool.run(lose_it_carelessly, subject, str(careless), "training_step", False)
    assert not any(ending.error.startswith(FIRST) for ending in endings), "the planted fault has no effect"


@pytest.mark.full
def test_freeing_gathered_weights_keeps_the_first_error(pool: WorkerPool, tmp_path: Path) -> None:
    subject = Subject("nnscaler_zero")
    endings = pool.run(lose_it_carelessly, subject, str(tmp_path), "training_step", True)
    assert not any(ending.error.startswith(FIRST) for ending in endings), "the planted fault has no effect"


def test_a_reset_of_fsdp2_that_fails_keeps_the_first_error(pool: WorkerPool, tmp_path: Path) -> None:
    subject = Subject("fsdp_auto", UNITS)
    for careless, expected in ((False, FIRST), (True, "AttributeError: no such order")):
        meeting = tmp_path / str(careless)
        meeting.mkdir()
        endings = pool.run(reset_in_vain, subject, str(meeting), careless)
        assert [ending.error for ending in endings] == [expected] * 2


def test_every_action_of_a_clean_up_is_tried() -> None:
    done: list[str] = []
    cleaning = CleanUp()
    cleaning.run("one", lambda: done.append("one"))
    cleaning.run("two", lambda: 1 / 0)
    cleaning.run("three", lambda: done.append("three"))
    with pytest.raises(ZeroDivisionError):
        cleaning.finish()
    assert done == ["one", "three"]


def test_errors_of_clean_up_become_notes_of_the_first_error() -> None:
    done: list[str] = []
    with (
        pytest.raises(KeyError) as raised,
        clean_up("freeing", lambda: 1 / 0, lambda: done.append("freed")),
        clean_up_after_error("resetting", lambda: {}["order"]),
    ):
        raise KeyError("bad sample 17")
    assert done == ["freed"]
    notes = getattr(raised.value, "__notes__", [])  # Python 3.10 logs them
    assert not notes or ("resetting failed" in notes[0] and "freeing failed" in notes[1])


def test_an_error_of_clean_up_alone_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), clean_up("freeing", lambda: 1 / 0):
        pass


def test_recovery_runs_after_an_error_only() -> None:
    done: list[str] = []
    with clean_up_after_error("resetting", lambda: done.append("reset")):
        pass
    assert done == []

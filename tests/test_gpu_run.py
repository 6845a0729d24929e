"""The run on a GPU writes each result at once, and ends in time; a dry run tests its steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"))
    import steps

    yield steps
    del sys.modules["steps"]


def test_a_case_that_fails_leaves_the_others_their_turn(steps, capfd) -> None:
    def run(case: str) -> dict[str, Any]:
        if case != "good":
            raise ValueError("it broke")
        return {"figure": 1}

    with pytest.raises(steps.FailedError, match=r"^failed: bad$"):
        steps.each(["bad", "others", "good"], run, may_fail=["others"])
    lines = [json.loads(line.removeprefix(steps.RESULT)) for line in capfd.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == ["bad", "others", "good"]
    assert lines[0]["error"] == lines[1]["error"] == "ValueError: it broke"
    assert lines[2]["figure"] == 1


def test_a_run_on_a_card_ends_in_time_and_names_what_it_left_out(steps, monkeypatch) -> None:
    now, limits, written = 0.0, [], []

    def run_step(name: str, machine: Any, limit: float, write: Any) -> dict[str, Any]:
        nonlocal now
        now += limit
        limits.append(limit)
        return {"step": name, "ok": name != "first"}

    monkeypatch.setattr(
        steps, "STEPS", {name: steps.Step(None, 100, 0) for name in ("first", "second", "third")}
    )
    monkeypatch.setattr(steps, "run_step", run_step)
    monkeypatch.setattr(steps.time, "monotonic", lambda: now)
    card = steps.Machine("cuda", layers=1, width=1, batch=1, context=1)
    verdict = steps.run_steps(list(steps.STEPS), card, 190, written.append)
    assert verdict == "failed: first; no time for third"
    assert limits == [100, 190 - 100 - steps.TO_END]
    assert written[-1] == {"step": "third", "left out": "no time is left"}

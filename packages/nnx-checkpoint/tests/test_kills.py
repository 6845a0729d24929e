"""After a save is killed, the path has the complete old checkpoint or the complete new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnx_test_helpers.repository import from_repository

SCRIPT = from_repository(__file__, "benchmarks/kill_saves.py")


def run(*arguments: str, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--directory", str(path), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.full
@pytest.mark.parametrize("mode", [[], ["--async"]], ids=["waiting", "in the background"])
def test_kills_at_random_moments_lose_nothing(tmp_path: Path, mode: list[str]) -> None:
    kills = int(os.environ.get("NNX_KILLS", "12"))
    result = run("--kills", str(kills), *mode, path=tmp_path)
    assert result["kills"] == kills
    assert result["saves"] > kills


@pytest.mark.parametrize(
    ("mode", "stride"),
    [
        pytest.param([], 2, id="waiting"),
        pytest.param([], 1, id="waiting, every operation", marks=pytest.mark.full),
        pytest.param(["--async"], 1, id="in the background", marks=pytest.mark.full),
    ],
)
def test_a_kill_before_any_file_operation_loses_nothing(tmp_path: Path, mode: list[str], stride: int) -> None:
    result = run("--every-step", f"--stride={stride}", *mode, path=tmp_path)
    assert result["steps"] > 20
    # Both outcomes occur, so the commit itself was among the steps.
    assert result["old"] > 10 // stride
    assert result["new"] > 3 // stride


@pytest.mark.full
@pytest.mark.parametrize(("how", "count"), [("TERM", 3), ("STOP", 1)])
def test_a_saver_that_is_ended_or_stopped_loses_nothing_and_keeps_nobody(
    tmp_path: Path, how: str, count: int
) -> None:
    result = run("--kills", str(count), "--signal", how, path=tmp_path)
    assert result["kills"] == count

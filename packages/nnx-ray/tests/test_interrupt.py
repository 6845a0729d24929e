"""Ctrl-C in a script ends every process, and the cluster that the script started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import sys
from pathlib import Path
import nnx
from jobs.ray_jobs import Account
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import make_trainer

class Mine(Account):
    "A class of the script itself travels, too."

task = Task(steps=10_000)
account = Mine(Path(sys.argv[1]), seconds=0.05)
trainer = make_trainer(
    Subject("fsdp_auto", options={"launcher": "ray", "address": "local"}),
    task,
    devices=2,
    callbacks=[account],
)
trainer.fit(task.module())
"""


@pytest.mark.full
def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    tests = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), tests]))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    steps = tmp_path / "steps.jsonl"
    try:
        end = time.monotonic() + 120
        while not steps.exists() or len(steps.read_text().splitlines()) < 3:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.1)
        ranks = [psutil.Process(int((tmp_path / f"rank-{rank}.pid").read_text())) for rank in range(2)]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process in the foreground gets it
        assert process.wait(60) == 1
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert alive == []
    finally:
        process.kill()

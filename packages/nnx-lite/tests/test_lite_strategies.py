"""Lite under Lightning's strategies and `fsdp_auto`: losses of the plain loop, resumes, launching."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.lite_jobs import Training, examples, plain, run_stage, scripted
from nnx_conformance.pool import WorkerPool

STRATEGIES = ["ddp", "fsdp_auto"]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_under_lite_gives_the_losses_of_the_plain_loop_also_when_it_resumes(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    expected = plain(6)
    path = str(tmp_path / "last.ckpt")
    saved = pool.run(scripted, strategy, 2, 3, path, world_size=2)
    for seen in saved:
        assert seen.losses == pytest.approx(expected[:3], abs=1e-6)
    for devices in (1, 3):
        for seen in pool.run(scripted, strategy, devices, 3, None, path, world_size=devices):
            assert (seen.weights, seen.optimizer) == (saved[0].weights, saved[0].optimizer)
            assert seen.losses == pytest.approx(expected[3:], abs=1e-6)
    assert expected[5] < expected[0]


# --- real launching -----------------------------------------------------------------------------------


@pytest.mark.full
def test_a_script_that_uses_lite_starts_its_own_processes(tmp_path: Path) -> None:
    command = [sys.executable, str(examples() / "stage2_lite.py"), "--devices=2", "--strategy=ddp"]
    settings = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = run_stage("stage1_plain", "auto", 1, 2)
    last = " ".join(f"{loss:.6f}" for loss in expected[-3:])
    assert done.stdout.splitlines()[-1] == f"16 steps: {expected[0]:.6f} ... {last}"
    assert "MEMBER: 2/2" in done.stderr


@pytest.mark.full
def test_what_spawned_processes_trained_and_saved_comes_back_and_is_resumed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path, expected = str(tmp_path / "last.ckpt"), plain(4)
    saved = Training(accelerator="cpu", strategy="ddp_spawn", devices=2).run(2, path, None)
    assert saved.losses == pytest.approx(expected[:2], abs=1e-6)
    for seen in pool.run(scripted, "fsdp_auto", 3, 2, None, path, world_size=3):
        assert (seen.weights, seen.optimizer) == (saved.weights, saved.optimizer)
        assert seen.losses == pytest.approx(expected[2:], abs=1e-6)


@pytest.mark.full  # `test_launching.py` of the core tries it under a strategy of nnx
def test_a_process_leaves_its_group_before_the_interpreter_goes_under_a_strategy_of_lightning() -> None:
    script = """
import atexit
import torch.distributed as dist
from torch import nn
from nnx_lite import Lite

atexit.register(lambda: print("in a group at exit:", dist.is_initialized()))
lite = Lite("cpu", "ddp", devices=1)
lite.launch()
lite.setup(nn.Linear(1, 1))
print("in a group:", dist.is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["in a group: True", "in a group at exit: False"]

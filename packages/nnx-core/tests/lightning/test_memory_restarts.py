"""``memory_checkpoint`` under the launchers that restart processes: `nnx run` and torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.repository import from_repository
from nnx_test_helpers.training import Run, train

SCRIPT = str(Path(__file__).parents[1] / "jobs" / "memory_script.py")
PAGE = from_repository(__file__, "docs/memory-checkpoints.md")
COMMAND = next(line for line in PAGE.read_text().splitlines() if line.startswith("nnx run"))
NNX_RUN = ["-m", *COMMAND.replace("--devices 8", "--devices 2").removesuffix(" train.py").split()]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]


@pytest.mark.full
@pytest.mark.parametrize("words", [NNX_RUN, TORCHRUN], ids=["nnx run", "torchrun"])
def test_restarted_processes_resume_from_the_copies_and_leave_nothing(
    pool: WorkerPool, tmp_path: Path, words: list[str]
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if words is TORCHRUN:
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [sys.executable, *words, SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=280, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memory: Resuming after step 6 from the copies in memory of " in done.stderr
    losses = next(line for line in done.stdout.splitlines() if line.startswith("LOSSES "))
    whole = pool.run(train, Run(steps=12, options={"min_num_params": 10**6}), world_size=2)[0].losses
    assert json.loads(losses.removeprefix("LOSSES ")) == pytest.approx(whole[6:], abs=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["killed"]


def test_restarts_on_several_nodes_need_a_rendezvous_that_takes_part_in_them() -> None:
    words = ["--nodes", "2", "--devices", "4", "--option", "master_addr=node0", "--option", "rdzv_id=a"]
    command = [sys.executable, "-m", "nnx", "run", "--on", "torchrun", *words, "--option", "max_restarts=3"]
    done = subprocess.run(
        [*command, "--dry-run", "--", "train.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        *("torchrun", "--nnodes=2", "--nproc-per-node=4", "--max-restarts=3", "--rdzv-id=a"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", "train.py"),
    ]

"""Copies in memory on real nodes: a node vanishes with its memory, and training goes on from the copies."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nodes.laboratory import Laboratory, Node, Run, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.nodes,
    pytest.mark.full,
]

SCRIPT = str(Path(__file__).with_name("train.py"))
STARTUP = str(Path(__file__).parents[1] / "startup")
PAGE = Path(__file__).parents[2] / "docs" / "memory-checkpoints.md"
EVERY, STEPS = 3, 24
JOB = {
    "strategy": "fsdp_auto",
    "steps": STEPS,
    "devices": 1,
    "seconds": 0.3,
    "options": {"memory_checkpoint": EVERY, "timeout": 6},
}


def start(node: Node, nodes: str, **job: Any) -> Run:
    """Start torchrun on a node; it takes new nodes in, and restarts the processes when one is gone."""
    lines = PAGE.read_text().replace("\\\n", "").splitlines()
    command = next(line for line in lines if line.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun"))
    command = command.replace("=2:4", f"={nodes}").replace("per-node=8", "per-node=1")
    conf = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = [*command.removesuffix(" train.py").split()[2:], f"--rdzv-conf={conf}"]
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([STARTUP, os.environ.get("PYTHONPATH", "")])
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    text = json.dumps({**JOB, **job, "nodes": 1})
    return node.start(sys.executable, "-m", "torch.distributed.run", *words, SCRIPT, text, env=env)


def account_of(output: str) -> dict[str, Any]:
    """What a rank reports at the end."""
    line = next(line for line in output.splitlines() if line.startswith("ACCOUNT "))
    found: dict[str, Any] = json.loads(line.removeprefix("ACCOUNT "))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    with Laboratory(1, folder=tmp_path_factory.mktemp("one") / "lab") as lab:
        text = json.dumps({**JOB, "strategy": "auto", "options": {}, "seconds": 0, "nodes": 1})
        run = lab.nodes[0].start(sys.executable, SCRIPT, text, env={"OMP_NUM_THREADS": "1"})
        losses: list[float] = account_of(run.wait(120).output)["losses"]
    return losses


@pytest.mark.parametrize("replaced", [False, True], ids=["a smaller world", "another node"])
def test_a_vanished_node_costs_the_steps_since_the_last_copy(
    tmp_path: Path, alone: list[float], replaced: bool
) -> None:
    nodes = "2" if replaced else "1:2"
    with Laboratory(3, folder=tmp_path / "lab") as lab:
        runs = [start(node, nodes) for node in lab.nodes[:2]]
        runs[0].wait_for(f"STEP {2 * EVERY + 1}\n", 120)
        assert "of node0, node1" in runs[0].output
        if replaced:
            runs.append(start(lab.nodes[2], nodes))
        lab.nodes[1].vanish()
        ended = runs[0].wait(240)
        assert ended.code == 0, ended.output[-3000:]
        assert not lab.nodes[0].do("ls -d /dev/shm/nnx-* 2>/dev/null || true").strip()
    found = re.search(r"Resuming after step (\d+) from the copies in memory of (.*)", ended.output)
    assert found is not None, ended.output[-3000:]
    step = int(found[1])
    begun = max(int(each) for each in re.findall(r"STEP (\d+)", ended.output[: found.start()]))
    assert (begun - 1) - step <= EVERY  # the step that printed last had not ended: it waits for the copy
    account = account_of(ended.output)
    assert account["world"] == (2 if replaced else 1)
    assert account["losses"] == pytest.approx(alone[step:], rel=1e-4)

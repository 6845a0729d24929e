"""Elastic groups on nodes that vanish one after the other, against one undisturbed process."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from nodes.laboratory import Laboratory, Node, Run, why_not

pytest.importorskip("torchft", reason="torchft is not installed")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.nodes,
    pytest.mark.full,
    pytest.mark.timeout(3600),
]

SCRIPT = str(Path(__file__).with_name("elastic.py"))
PORT, NAME = 29611, "laboratory"
STEPS = 100
"""Steps for each kill: a node needs some seconds to start, and the other one trains on."""


def start(node: Node, job: dict[str, Any], *, joins: bool) -> Run:
    """Start the launcher on a node: the first one with the lighthouse, and others that join it."""
    own = f"lighthouse=node0:{PORT}" if joins else f"port={PORT}"
    options = [own, f"run_id={NAME}", "heartbeat_timeout=1.5", "join_timeout=20"]
    return node.start(
        *(sys.executable, "-c", "from nnx_checkpoint.cli.command import main; main()", "run"),
        *("--elastic", "1", "--devices", str(job["devices"])),
        *(word for option in options for word in ("--option", option)),
        *("--", SCRIPT, json.dumps(job)),
        env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def rows_of_steps(folder: Path) -> dict[int, list[list[int]]]:
    """The samples of each committed step, for each number of shares that committed it."""
    shares: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    committed: dict[int, set[int]] = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        last: dict[int, int] = {}
        for line in path.read_text().splitlines():
            each = json.loads(line)
            if "rows" in each:
                index, of = each["share"]
                last[each["step"]] = of
                shares[each["step"], of][index] = each["rows"]
            else:
                committed[each["committed"]].add(last[each["committed"]])
    return {
        step: [sorted(row for share in shares[step, of].values() for row in share) for of in counts]
        for step, counts in committed.items()
    }


@pytest.mark.parametrize(
    ("strategy", "devices", "kills"),
    [
        ("torchft_hsdp", 2, 2),
        pytest.param("torchft_ddp", 1, 20, marks=pytest.mark.slow),
        pytest.param("torchft_hsdp", 2, 20, marks=pytest.mark.slow),
    ],
)
def test_vanished_nodes_cost_no_sample_and_change_no_weight(
    tmp_path: Path, strategy: str, devices: int, kills: int
) -> None:
    steps = STEPS * kills
    with Laboratory(kills + 1, folder=tmp_path / "lab") as lab:
        shared = lab.shared / "run"
        shared.mkdir()
        job = {"folder": str(shared), "steps": steps, "strategy": strategy, "devices": devices}
        job |= {"seconds": 1.5, "options": {"group_timeout": 3.0}}
        first = start(lab.nodes[0], job, joins=False)
        first.wait_for("STEP 1\n", 300)
        for node in lab.nodes[1 : kills + 1]:
            start(node, job, joins=True).wait_for("elastic: healed at step", 300)
            first.wait_for(f"STEP {step_of(first) + 2}\n", 300)
            node.vanish()
        (shared / "go").touch()
        ended = first.wait(300 + 2 * steps)
        assert ended.code == 0, ended.output[-3000:]
        assert len(re.findall(r"groups \(.*-node\d+-0", ended.output)) == kills, ended.output[-3000:]
        alone = lab.shared / "alone"
        alone.mkdir()
        plain = {**job, "folder": str(alone), "strategy": "ddp", "devices": 1, "seconds": 0, "options": {}}
        done = lab.nodes[0].start(sys.executable, SCRIPT, json.dumps(plain)).wait(300)
        assert done.code == 0, done.output[-3000:]
    assert rows_of_steps(shared) == rows_of_steps(alone)
    ours, theirs = torch.load(shared / "node0-0.pt"), torch.load(alone / "alone.pt")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-12


def step_of(run: Run) -> int:
    """The last step that was printed."""
    return int((re.findall(r"STEP (\d+)\n", run.output) or ["0"])[-1])

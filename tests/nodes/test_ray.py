"""Ray in the laboratory: a raylet on each node, with its own address and hostname, and a script on node 0.

Two strategies always run; the cases of the others are marked `slow`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.laboratory import Ended, Laboratory, Node, Run, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.full,
    pytest.mark.nodes,
    pytest.mark.timeout(300),
]

SCRIPT = str(Path(__file__).with_name("ray_train.py"))
STARTUP = str(Path(__file__).parents[1] / "startup")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": STARTUP,
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DS_ACCELERATOR": "cpu",
    # Ray gives up a node that does not answer after 15 s rather than 40, so that tests take less time.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
PORT = 6379
OTHERS = (
    "fsdp_hybrid",
    "nnscaler_deduped",
    "nnscaler_zero",
    "colossalai",
    "nnx_deepspeed_2",
    "fairscale_fsdp",
)
STRATEGIES = [
    pytest.param("ddp", 1),
    pytest.param("fsdp_auto", 2),
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in OTHERS[:2]),
    *(pytest.param(name, 1, marks=pytest.mark.slow) for name in OTHERS[2:]),
]
"""The strategies, each with its number of processes on each node."""


def begin_ray(node: Node, head: Node, cpus: int = 2) -> Run:
    """Start Ray on a node, as its manual says. Its files go to the node's own shared memory."""
    own = [f"--node-ip-address={node.address}", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    if node is head:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false", "--temp-dir=/dev/shm/ray"]
    else:
        where = [f"--address={head.address}:{PORT}"]
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *own]
    return node.start(*words, env=ENVIRONMENT)


def cluster_of(lab: Laboratory) -> None:
    """Start Ray on every node, and wait until it runs."""
    head, *others = lab.nodes
    begin_ray(head, head).wait_for("Ray runtime started", 60)
    for run in [begin_ray(node, head) for node in others]:
        run.wait_for("Ray runtime started", 60)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Two nodes with Ray on both."""
    with Laboratory(2, folder=tmp_path_factory.mktemp("ray") / "lab") as made:
        cluster_of(made)
        yield made


def start(lab: Laboratory, folder: Path, *, steps: int, **job: Any) -> Run:
    """Run the script on node 0."""
    folder.mkdir()
    address = f"{lab.nodes[0].address}:{PORT}"
    text = json.dumps({"folder": str(folder), "address": address, "nodes": 2, "steps": steps, **job})
    return lab.nodes[0].start(sys.executable, SCRIPT, text, env=ENVIRONMENT)


def result_of(ended: Ended) -> tuple[int, str]:
    """The step and the checkpoint that the script knows in the end."""
    assert ended.code == 0, ended.output[-4000:]
    line = next(line for line in ended.output.splitlines() if line.startswith("ENDED "))
    step, path = json.loads(line.removeprefix("ENDED "))
    return step, path


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    """Return the identities of the ranks, by node."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that rank 0 wrote; repeated steps occur again."""
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses_of(folder: Path) -> list[float]:
    """Return the loss of each step; for a repeated step, the last one."""
    found = {line["step"]: line["loss"] for line in steps_of(folder)}
    return [found[step] for step in sorted(found)]


def losses_alone(steps: int) -> list[float]:
    """The losses of one process without a launcher."""
    from nnx_conformance.subject import Subject
    from nnx_conformance.task import Task
    from nnx_conformance.training import make_trainer

    task = Task(steps=steps, clip=0.5, optimizer="adamw")
    module = task.module()
    make_trainer(Subject("fsdp_auto"), task, devices=1).fit(module)
    return module.losses


def wait_for_steps(folder: Path, count: int, run: Run) -> None:
    """Wait until rank 0 has trained this number of steps."""
    end = time.monotonic() + 120
    while len(steps_of(folder)) < count:
        assert run.is_running and time.monotonic() < end, run.output[-4000:]
        time.sleep(0.1)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_ranks_on_a_raylet_of_each_node_train_as_one_process_does(
    strategy: str, devices: int, lab: Laboratory
) -> None:
    folder = lab.shared / strategy
    spread = {"placement": "strict_spread"}
    run = start(lab, folder, steps=4, strategy=strategy, devices=devices, options=spread)
    step, path = result_of(run.wait(180))
    assert step == 4
    assert path == str(folder / "epoch=0-step=4.ckpt") and (folder / path / "manifest.json").is_file()
    assert losses_of(folder) == pytest.approx(losses_alone(4), rel=1e-4)
    ranks = ranks_of(folder)
    assert [(who["node"], who["local"]) for who in ranks] == [
        divmod(rank, devices) for rank in range(2 * devices)
    ]
    hosts = [who["host"] for who in ranks]
    assert hosts[:devices] + hosts[devices:] in (
        ["node0"] * devices + ["node1"] * devices,
        ["node1"] * devices + ["node0"] * devices,
    )


def kill_raylet(node: Node) -> None:
    """Kill a node's raylet; the node itself stays."""
    node.do('for own in /proc/[0-9]*; do [ "$(cat $own/comm)" != raylet ] || kill -9 "${own#/proc/}"; done')


def test_a_killed_raylet_ends_a_run_that_may_not_start_again_with_one_error(lab: Laboratory) -> None:
    folder = lab.shared / "once"
    run = start(lab, folder, steps=300, strategy="fsdp_auto", devices=1, seconds=0.2,
                options={"placement": "strict_spread", "max_failures": 0})  # fmt: skip
    wait_for_steps(folder, 3, run)
    kill_raylet(lab.nodes[1])
    ended = run.wait(90)
    begin_ray(lab.nodes[1], lab.nodes[0]).wait_for("Ray runtime started", 60)
    assert ended.code == 1
    (said,) = re.findall(r"^nnx_core\.errors\.LaunchError: (.*)", ended.output, re.M)
    assert re.match(r"rank \d on node\d .* The run was started 1 times \(max_failures=0\)", said)


@pytest.mark.slow
def test_a_run_goes_on_on_the_node_that_is_left(tmp_path: Path) -> None:
    with Laboratory(2, folder=tmp_path / "lab") as lab:
        cluster_of(lab)
        folder = lab.shared / "run"
        run = start(lab, folder, steps=40, strategy="fsdp_auto", devices=1, seconds=0.2,
                    options={"timeout": 6})  # fmt: skip
        wait_for_steps(folder, 5, run)
        assert sorted(who["host"] for who in ranks_of(folder)) == ["node0", "node1"]
        lab.nodes[1].vanish()
        lost = time.time()
        step, _ = result_of(run.wait(180))
        assert step == 40
        assert [who["host"] for who in ranks_of(folder)] == ["node0", "node0"]
        assert "ray: resuming after step" in run.output
        assert losses_of(folder) == pytest.approx(losses_alone(40), rel=1e-3)
        again = next(line["at"] for line in steps_of(folder) if line["at"] > lost + 3)
        print(f"training again {again - lost:.1f} s after node 1 vanished")

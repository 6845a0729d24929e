"""Guarantees on several nodes, for every engine: the laboratory's nodes run a user's script.

The tests cover the numbers of one process, ranks and shares, checkpoints on a shared disk and on private
ones, messages printed once, and one error on every node when one is lost. README's test command runs one of
them, `nox -s nodes` all.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.laboratory import Ended, Laboratory, Run, why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.nodes]

SCRIPT = str(Path(__file__).with_name("train.py"))
STARTUP = str(Path(__file__).parents[1] / "startup")
DOCS = Path(__file__).parents[2] / "docs"
STRATEGIES = (
    *("ddp", "fsdp_auto", "fsdp_hybrid", "nnscaler_deduped", "nnscaler_zero", "colossalai"),
    *("nnx_deepspeed_2", "fairscale_fsdp"),
)
ON_TWO_DEVICES = ("fsdp_hybrid", "nnscaler_deduped")
"""Strategies that do something else within a node than across."""
STEPS, MORE = 4, 7
TIMEOUT = 6
"""Seconds after which collectives give up, in tests of lost nodes."""


def torchrun(number: int, nodes: int, devices: int) -> tuple[list[str], dict[str, str]]:
    """``torchrun`` on each node."""
    words = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={devices}"]
    return [*words, f"--node-rank={number}", "--master-addr=node0", "--master-port=29500"], {}


def plain(number: int, nodes: int, devices: int) -> tuple[list[str], dict[str, str]]:
    """``MASTER_ADDR`` and ``NODE_RANK`` on each node; Lightning starts the processes of its own."""
    return [], {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "NODE_RANK": str(number)}


def slurm(number: int, nodes: int, devices: int, local: int) -> dict[str, str]:
    """Return the variables that ``srun`` sets for each of its tasks, one for each device."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(nodes * devices),
        "SLURM_NTASKS_PER_NODE": str(devices),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODELIST": f"node[0-{nodes - 1}]",
        "SLURM_PROCID": str(number * devices + local),
        "SLURM_NODEID": str(number),
        "SLURM_LOCALID": str(local),
    }


def start(lab: Laboratory, how: Any = torchrun, *, devices: int = 1, **job: Any) -> list[Run]:
    """Start the script on every node of a laboratory.

    Args:
        lab: The laboratory.
        how: Gives the words before the script, and the environment variables.
        devices: The number of processes on each node.
        **job: The script's job.
    """
    runs = []
    text = json.dumps({"steps": STEPS, "nodes": len(lab.nodes), "devices": devices, **job})
    for node in lab.nodes:
        words, variables = how(node.number, len(lab.nodes), devices)
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": STARTUP, "PYTHONUNBUFFERED": "1", **variables}
        runs.append(node.start(sys.executable, *words, SCRIPT, text, env=variables))
    return runs


def accounts_of(ended: list[Ended]) -> list[dict[str, Any]]:
    """Return the reports of the ranks, in rank order."""
    for number, end in enumerate(ended):
        assert end.code == 0, f"node {number} ended with {end.code}:\n{end.output[-3000:]}"
    lines = [line for end in ended for line in end.output.splitlines() if line.startswith("ACCOUNT ")]
    accounts = [json.loads(line.removeprefix("ACCOUNT ")) for line in lines]
    return sorted(accounts, key=lambda account: account["rank"])


def train(lab: Laboratory, how: Any = torchrun, **job: Any) -> list[dict[str, Any]]:
    """Run the script to its end on every node."""
    return accounts_of([run.wait(120) for run in start(lab, how, **job)])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Two nodes."""
    with Laboratory(2, folder=tmp_path_factory.mktemp("two") / "lab") as lab:
        yield lab


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, two: Laboratory) -> Iterator[Laboratory]:
    """Three other nodes, with the same shared folder."""
    with Laboratory(3, folder=tmp_path_factory.mktemp("three") / "lab") as lab:
        yield lab


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training in one process."""
    with Laboratory(1, folder=tmp_path_factory.mktemp("one") / "lab") as lab:
        return train(lab, plain, strategy="auto", steps=MORE)[0]


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_that_of_one_process_and_resumes_on_other_nodes(
    strategy: str, two: Laboratory, three: Laboratory, alone: dict[str, Any]
) -> None:
    path = str(two.shared / f"{strategy}.ckpt")
    devices = 2 if strategy in ON_TWO_DEVICES else 1
    ranks = train(two, strategy=strategy, devices=devices, save=path)
    assert [(a["rank"], a["node"], a["local"], a["host"]) for a in ranks] == [
        (rank, rank // devices, rank % devices, f"node{rank // devices}") for rank in range(2 * devices)
    ]
    shares = [(a["share"]["rank"], a["share"]["num_replicas"]) for a in ranks]
    count = shares[0][1]
    assert sorted(set(shares)) == [(rank, count) for rank in range(count)]
    assert {a["world"] for a in ranks} == {2 * devices}
    assert {a["device"] for a in ranks} == {"cpu"}
    for account in ranks:
        assert account["losses"] == pytest.approx(alone["losses"][:STEPS], rel=1e-5)
    resumed = train(three, strategy=strategy, steps=MORE, resume=path)
    assert [a["host"] for a in resumed] == ["node0", "node1", "node2"]
    for account in resumed:
        assert account["losses"] == pytest.approx(alone["losses"][STEPS:], rel=1e-4)
        assert account["sums"] == pytest.approx(alone["sums"], rel=1e-4, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("begins", ["torchrun", "MASTER_ADDR="])
def test_the_commands_of_the_page_start_all_processes(
    begins: str, two: Laboratory, alone: dict[str, Any]
) -> None:
    lines = (DOCS / "machines.md").read_text().splitlines()
    command = next(line for line in lines if line.startswith(begins))
    job = json.dumps({"strategy": "fsdp_auto", "steps": STEPS, "nodes": 2, "devices": 2})
    command = command.replace("train.py", f"{SCRIPT} {shlex.quote(job)}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    runs = [
        node.start(
            *("sh", "-c", re.sub(r"(node-rank|NODE_RANK)=0", rf"\1={node.number}", command)),
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": STARTUP, "PATH": path},
        )
        for node in two.nodes
    ]
    ranks = accounts_of([run.wait(120) for run in runs])
    assert [(a["node"], a["local"]) for a in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ranks[0]["losses"] == pytest.approx(alone["losses"][:STEPS], rel=1e-5)


@pytest.mark.full
def test_the_slurm_commands_of_the_pages_train_as_tasks_of_srun(
    two: Laboratory, alone: dict[str, Any]
) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    asked = re.search(r"`(nnx run --on slurm .*?)`", (DOCS / "machines.md").read_text())
    script = re.search(r"^srun [^#]*", (DOCS / "recipes.md").read_text(), re.M)
    assert asked is not None and script is not None
    words = shlex.split(asked[1].replace(" -- ", " --dry-run -- "))
    printed = subprocess.run(words, capture_output=True, text=True, check=True, env={"PATH": path})
    line = " ".join(printed.stdout.split())
    assert re.fullmatch(r"srun --nodes=2 --ntasks-per-node=4 \S*/python\S* train.py", line)
    assert script[0].strip() == "srun python train.py"
    task = script[0].removeprefix("srun ").strip()
    job = json.dumps({"strategy": "fsdp_auto", "steps": STEPS, "nodes": 2, "devices": 2})
    task = task.replace("train.py", f"{SCRIPT} {shlex.quote(job)}")
    usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": STARTUP, "PATH": path}
    runs = [  # there is no srun here: the laboratory starts the tasks
        node.start("sh", "-c", task, env={**usual, **slurm(node.number, 2, 2, local)})
        for node in two.nodes
        for local in range(2)
    ]
    ranks = accounts_of([run.wait(120) for run in runs])
    assert [(a["rank"], a["node"], a["local"], a["host"]) for a in ranks] == [
        *((0, 0, 0, "node0"), (1, 0, 1, "node0")),
        *((2, 1, 0, "node1"), (3, 1, 1, "node1")),
    ]
    assert ranks[0]["losses"] == pytest.approx(alone["losses"][:STEPS], rel=1e-5)


@pytest.mark.full
def test_messages_and_the_progress_bar_are_shown_once(two: Laboratory) -> None:
    first, second = [run.wait(120) for run in start(two, strategy="fsdp_auto", bar=True, batches=20)]
    assert first.code == second.code == 0
    assert first.output.count("fsdp_auto: 2 ranks on 2 nodes") == 1
    assert "Epoch 0" in first.output
    for text in ("ranks on", "Epoch 0", "litlogger"):
        assert text not in second.output


@pytest.mark.full
def test_private_disks_are_refused_with_the_name_of_the_node(two: Laboratory) -> None:
    path = two.private / "private.ckpt"
    ended = [run.wait(120) for run in start(two, strategy="fsdp_auto", save=str(path))]
    for end in ended:
        assert end.code != 0
        assert f"saving '{path}' failed on rank 1 on node1: cannot write" in end.output
        assert "Every rank must see the same directory" in end.output
    assert "manifest" not in two.nodes[0].do(f"ls -R {path} 2>/dev/null || true")


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "loss"),
    [
        ("fsdp_auto", "rank"),
        ("nnscaler_zero", "node"),
        ("colossalai", "link"),
        pytest.param("nnx_deepspeed_2", "rank", marks=pytest.mark.slow),
        pytest.param("fairscale_fsdp", "node", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_node_or_link_ends_every_process_and_the_last_checkpoint_loads(
    strategy: str, loss: str, tmp_path: Path, alone: dict[str, Any]
) -> None:
    with Laboratory(2, folder=tmp_path / "lab") as lab:
        dies = {"dies": [1, 2]} if loss == "rank" else {}
        runs = start(
            lab,
            plain,
            strategy=strategy,
            steps=60,
            seconds=0.2,
            options={"timeout": TIMEOUT},
            save_each=str(lab.shared),
            **dies,
        )
        runs[0].wait_for("STEP 2", 60)
        if loss == "node":
            lab.nodes[1].vanish()
        elif loss == "link":
            lab.nodes[1].cut()
        ended = [run.wait(8 * TIMEOUT) for run in runs]
        assert ended[0].code != 0
        assert "no sign of life" in ended[0].output or "lost another rank" in ended[0].output
        if loss == "link":
            assert "did not answer" in ended[1].output or "lost another rank" in ended[1].output
        last = max(lab.shared.glob("step-*.ckpt"), key=lambda path: int(path.stem.split("-")[1]))
        step = int(last.stem.split("-")[1])
    # The shared folder is the machine's own, so it outlives the laboratory.
    with Laboratory(1, folder=tmp_path / "again") as lab:
        resumed = train(lab, plain, strategy=strategy, steps=step + 1, resume=str(last))[0]
    if step < MORE:
        assert resumed["losses"] == pytest.approx(alone["losses"][step : step + 1], rel=1e-4)


MEASURE = """
import json
import torch
import torch.distributed as dist
from nnx_core.machine.calibration import calibrated
from nnx_core.communicator import GroupCommunicator

dist.init_process_group("gloo")
rank, found = dist.get_rank(), []
for size in (2, 4):
    units = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
    own = GroupCommunicator(units[rank // size])
    hardware = calibrated(own, torch.device("cpu"), group=dist.group.WORLD, fresh=True)
    found.append([link.throughput("all_reduce", 2) for link in (hardware.inside, hardware.across)])
    assert hardware.ranks_per_node == 2
print("MEASURED", json.dumps(found), flush=True)
dist.barrier()
"""


@pytest.mark.full
def test_links_within_a_node_and_across_nodes_are_measured_apart(tmp_path: Path) -> None:
    with Laboratory(2, folder=tmp_path / "lab", rate="100mbit") as lab:
        script = lab.shared / "measure.py"
        script.write_text(MEASURE)
        runs = []
        for node in lab.nodes:
            words, _ = torchrun(node.number, 2, 2)
            runs.append(node.start(sys.executable, *words, str(script), env={"OMP_NUM_THREADS": "1"}))
        runs[0].wait_for("MEASURED", 120)
    line = next(line for line in runs[0].output.splitlines() if line.startswith("MEASURED"))
    for inside, across in json.loads(line.removeprefix("MEASURED ")):  # units within a node, and of both
        rate = 1 / across  # bytes each way in a second, of at most 12.5 million
        assert 3e6 < rate < 1.5e7
        assert inside < across / 5

"""Swarms on the loopback (docs/backends/hivemind.md). They depend on time: `pytest -m full -n 0 FILE`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nnx_hivemind._hivemind_compat", reason="hivemind is not installed")

from swarms import LOOPBACK, Process

from jobs.peer import alone, go_on
from nnx_conformance.pool import WorkerPool

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]
STEPS, SEEDS, WITHIN = 12, (1, 2, 3), 0.02
SECONDS_OF_P2P = 45.0
"""The seconds that hivemind's p2pd may live without its peer: it ends by itself after 30."""
Start = Callable[..., list[Process]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[Process] = []

    def several(*names: str) -> list[Process]:
        started = [Process(tmp_path, name) for name in names]
        processes.extend(started)
        return started

    yield several
    for process in processes:
        process.close()


def ends_alone(process: Process) -> None:
    deadline = time.monotonic() + SECONDS_OF_P2P
    while process.left() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert process.left() == []


def test_a_swarm_of_which_one_dies_and_one_joins_comes_near_one_process(start: Start, tmp_path: Path) -> None:
    names = [f"{role}{seed}" for seed in SEEDS for role in ("killed", "joins")]
    first, second, *others = start("first", "second", *names)
    ratios = []
    for seed, dies, joins in zip(SEEDS, others[::2], others[1::2], strict=True):
        run: dict[str, Any] = {"seed": seed, "steps": STEPS, "pause": 0.5}
        options = {**LOOPBACK, "run_id": f"seed{seed}"}
        first.fit(options=options, save=str(tmp_path / f"seed{seed}.ckpt"), **run)
        joining = {**options, "initial_peers": [first.address()]}
        second.fit(options=joining, **run)
        dies.fit(options=joining, **run)
        dies.wait(lambda _, dies=dies: dies.step >= 3)
        dies.kill()
        joins.fit(options={**options, "initial_peers": [second.address()]}, **run)
        wanted = alone(seed, steps=STEPS, batch=192)
        losses = [first.end(), second.end()]
        steps = [len({each.get("hivemind/epoch") for each in process.facts()}) for process in (first, joins)]
        most = max(each.get("hivemind/averaged_with", 0) for each in first.facts())
        print(f"seed {seed}: one process {wanted:.4f}, swarm {losses}, steps {steps}, averaged with {most:g}")
        assert joins.step > 3, "it took over the state of the swarm"
        assert most >= 2
        ratios += [loss / wanted for loss in losses]
        ends_alone(dies)
    assert all(abs(ratio - 1) < WITHIN for ratio in ratios), ratios
    for process in (first, second):
        assert process.code() == 0
        ends_alone(process)


def test_a_checkpoint_of_a_swarm_goes_on_under_other_strategies_and_in_a_swarm(
    start: Start, pool: WorkerPool, tmp_path: Path
) -> None:
    first, second = start("first", "second")
    run: dict[str, Any] = {"seed": 1, "steps": 3, "pause": 0.5}
    options, path = {**LOOPBACK, "run_id": "saves"}, str(tmp_path / "swarm.ckpt")
    first.fit(options=options, save=path, **run)
    second.fit(options={**options, "initial_peers": [first.address()]}, **run)
    loss = first.end()
    second.end()
    for strategy in ("ddp", "fsdp_auto"):
        for before, after, steps in pool.run(go_on, path, strategy, world_size=2):
            assert (before, steps) == (pytest.approx(loss, rel=1e-5), 2), strategy
            assert after < before, strategy
    first.fit(options={**options, "run_id": "resumes"}, resume=path, **{**run, "steps": 5})
    assert first.end() < loss
    assert min(each["hivemind/epoch"] for each in first.facts() if "loss" in each) >= 3


def test_peers_that_do_not_fit_are_refused_within_seconds_and_leave_nothing(start: Start) -> None:
    run: dict[str, Any] = {"seed": 1, "steps": 10**6, "pause": 0.5}
    options = {**LOOPBACK, "run_id": "ours"}
    first, model, name, gone, target = start("first", "model", "name", "gone", "target")
    first.fit(options=options, **run)
    address = first.address()
    joining = {**options, "initial_peers": [address]}
    cases = [
        (model, {**run, "outputs": 2}, joining, "has model=.*and a peer of run 'ours' has"),
        (target, run, {**joining, "target_batch_size": 96}, "has target_batch_size=96, and a peer"),
        (name, run, {**joining, "run_id": "theirs"}, "no peer trains run_id='theirs'.*train 'ours'"),
        (gone, run, {**options, "initial_peers": [unreachable(address)]}, "no peer of initial_peers"),
    ]
    for process, case, given, _ in cases:
        process.fit(options=given, **case)
    for process, _, _, message in cases:
        with pytest.raises(AssertionError, match=f"(?s)ended with 1.*{message}"):
            process.end()
        ends_alone(process)
    assert first.step == 0 or first.facts(), "the others go on"


def unreachable(address: str) -> str:
    """Return the address with another port, where nobody listens."""
    parts = address.split("/")
    parts[4] = "1"
    return "/".join(parts)

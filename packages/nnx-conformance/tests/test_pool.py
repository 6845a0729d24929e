from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path

import pytest

from jobs import pool_jobs
from nnx_conformance.pool import JobError, WorkerPool, free_port


def add_in_this_file(a: int, b: int) -> tuple[int, str]:
    return a + b, os.environ["RANK"]


def test_a_job_sees_what_torchrun_would_set(pool: WorkerPool) -> None:
    for world_size in (1, 2):
        results = pool.run(pool_jobs.describe, world_size=world_size)
        for rank, result in enumerate(results):
            assert result["env"] == {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
            }


def test_ranks_can_be_told_to_be_on_several_nodes(pool: WorkerPool) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    seen = [result["env"] for result in pool.run(pool_jobs.describe, world_size=4, nodes=2)]
    assert [[env[name] for name in names] for env in seen] == [
        ["0", "0", "2", "0", "0"],
        ["1", "1", "2", "0", "0"],
        ["2", "0", "2", "1", "1"],
        ["3", "1", "2", "1", "1"],
    ]
    with pytest.raises(ValueError, match="cannot be shared by nodes=2 alike"):
        pool.run(pool_jobs.describe, world_size=3, nodes=2)


def test_workers_stay_the_same_between_jobs(pool: WorkerPool) -> None:
    first = [result["pid"] for result in pool.run(pool_jobs.describe)]
    assert first == [result["pid"] for result in pool.run(pool_jobs.describe)]
    assert os.getpid() not in first


def test_collectives_work_in_a_group_that_the_pool_made(pool: WorkerPool) -> None:
    assert pool.run(pool_jobs.sum_of_ranks, world_size=2, init="gloo") == [(2, 3.0), (2, 3.0)]
    assert pool.run(pool_jobs.sum_of_ranks, world_size=1, init="gloo") == [(1, 1.0)]
    assert pool.run(pool_jobs.sum_of_ranks, world_size=2, init="gloo") == [(2, 3.0), (2, 3.0)]


def test_a_job_leaves_no_trace(pool: WorkerPool, tmp_path: Path) -> None:
    import torch

    before = pool.run(pool_jobs.describe)
    assert pool.run(pool_jobs.leave_a_mess, str(tmp_path), env={"NNX_TEST_EXTRA": "x"}) == ["x", "x"]
    after = pool.run(pool_jobs.describe)
    assert [r["cwd"] for r in after] == [r["cwd"] for r in before]
    assert pool.run(pool_jobs.find_a_mess) == [(None, None, torch.float32, False)] * 2


def test_a_worker_does_not_hang_where_ddp_is_the_last_to_hold_a_group(pool: WorkerPool) -> None:
    pool.run(pool_jobs.leave_a_collective_to_the_group_of_ddp, init="gloo", timeout=30)


def test_a_function_of_a_test_file_can_be_run(pool: WorkerPool) -> None:
    assert pool.run(add_in_this_file, 1, 2) == [(3, "0"), (3, "1")]


def test_a_rank_that_raises_is_reported_and_the_pool_goes_on(pool: WorkerPool) -> None:
    before = [result["pid"] for result in pool.run(pool_jobs.describe)]
    with pytest.raises(JobError, match="planted on rank 1") as caught:
        pool.run(pool_jobs.raise_on, 1, init="gloo")
    assert "ValueError" in caught.value.failures[1]
    assert "in raise_on" in caught.value.failures[1]
    assert "printed by 0" in str(caught.value)
    assert caught.value.output[1].startswith("printed by 1")
    assert before == [result["pid"] for result in pool.run(pool_jobs.describe)]


def test_a_rank_that_exits_is_a_failure(pool: WorkerPool) -> None:
    with pytest.raises(JobError, match="SystemExit: 3"):
        pool.run(pool_jobs.exit_on, 0)


def test_a_rank_that_dies_is_reported_and_replaced() -> None:
    with WorkerPool(size=2) as own:
        before = [result["pid"] for result in own.run(pool_jobs.describe)]
        with pytest.raises(JobError, match="died with exit code -9") as caught:
            own.run(pool_jobs.die_on, 1)
        assert list(caught.value.failures) == [1]
        after = [result["pid"] for result in own.run(pool_jobs.describe)]
        assert after[0] == before[0], "a rank that answered was replaced too"
        assert after[1] != before[1]
        assert own.run(pool_jobs.sum_of_ranks, init="gloo") == [(2, 3.0), (2, 3.0)]


@pytest.mark.parametrize("deaf", [False, True])
def test_a_rank_that_hangs_is_reported_with_its_stack_and_killed(pool: WorkerPool, deaf: bool) -> None:
    (before,) = pool.run(pool_jobs.describe, world_size=1)
    start = time.monotonic()
    with pytest.raises(JobError, match="no answer in time") as caught:
        pool.run(pool_jobs.hang_on, 0, deaf, world_size=1, timeout=1)
    assert time.monotonic() - start < 20
    assert "hang_on" in caught.value.output[0]
    with pytest.raises(ProcessLookupError):
        os.kill(before["pid"], 0)
    (after,) = pool.run(pool_jobs.describe, world_size=1)
    assert after["pid"] != before["pid"]


def test_ranks_that_are_done_are_ended_where_the_others_wait_for_them(pool: WorkerPool) -> None:
    before = [result["pid"] for result in pool.run(pool_jobs.describe)]
    answers = pool.run(pool_jobs.leave_with_the_group, 0, init="gloo", end_after=0.5, timeout=30.0)
    assert answers[0] == "left"
    assert "Connection" in answers[1]
    after = [result["pid"] for result in pool.run(pool_jobs.describe)]
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size=3 but the pool has 2 workers"):
        WorkerPool(size=2).run(pool_jobs.describe, world_size=3)


def test_ports_of_jobs_are_not_those_that_outgoing_connections_get() -> None:
    ports = [free_port() for _ in range(50)]
    lowest, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert all(1024 < port < int(lowest) for port in ports)
    assert len(set(ports)) > 40


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        free = free_port()
        draws = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(draws))
        assert free_port() == free

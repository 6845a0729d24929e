"""The pool: the environment and the traces of a job, failing ranks, and the templates of workers."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
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
    with pytest.raises(ValueError, match="nodes=2 does not divide"):
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


@pytest.mark.quick(every=6)
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


# Workers that are forked of a process that has imported everything, instead of importing it themselves.


@pytest.fixture(scope="module")
def own() -> Iterator[WorkerPool]:
    with WorkerPool(size=3, preload=("jobs.pool_jobs", "there_is_no_such_module")) as own:
        yield own


@pytest.mark.full
def test_what_is_preloaded_is_there_before_the_first_job(own: WorkerPool) -> None:
    for found in own.run(pool_jobs.origin):
        assert found["parent"] != os.getpid()
        assert found["imported_by"] == found["parent"]


@pytest.mark.full
@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all processes are told to have one order")
def test_ranks_next_to_each_other_differ_in_the_order_of_their_sets(own: WorkerPool) -> None:
    first, second = own.run(pool_jobs.origin)
    assert first["hash"] != second["hash"]
    assert first["parent"] != second["parent"]


@pytest.mark.full
def test_ranks_have_random_numbers_of_their_own(own: WorkerPool) -> None:
    first, _, third = own.run(pool_jobs.origin, world_size=3)
    assert first["parent"] == third["parent"]
    assert first["drawn"] != third["drawn"]


def test_a_worker_has_the_environment_and_the_directory_of_its_start(
    own: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.run(pool_jobs.describe)  # so that the templates are older than what follows
    with pytest.raises(JobError):
        own.run(pool_jobs.die_on, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_TEST_EXTRA", "of the start")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    old, new = own.run(pool_jobs.surroundings)
    assert new == {"cwd": str(tmp_path), "extra": "of the start", "temporary": str(tmp_path), "omp": "1"}
    assert old["extra"] is None
    assert old["cwd"] != new["cwd"]


def test_a_rank_that_dies_is_replaced_from_the_same_template(own: WorkerPool) -> None:
    before = own.run(pool_jobs.origin)
    with pytest.raises(JobError, match="died with exit code -9") as caught:
        own.run(pool_jobs.die_on, 1)
    assert list(caught.value.failures) == [1]
    after = own.run(pool_jobs.origin)
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["pid"] != before[1]["pid"]
    assert after[1]["parent"] == before[1]["parent"]
    assert own.run(pool_jobs.sum_of_ranks, init="gloo") == [(2, 3.0), (2, 3.0)]


def test_what_a_worker_prints_is_its_own(own: WorkerPool) -> None:
    with pytest.raises(JobError) as caught:
        own.run(pool_jobs.raise_on, 1, init="gloo")
    assert caught.value.output[0].startswith("printed by 0")
    assert "printed by 1" not in caught.value.output[0]


@pytest.mark.parametrize("code", [3, -signal.SIGTERM])
def test_the_exit_code_of_a_worker_is_told(own: WorkerPool, code: int) -> None:
    with pytest.raises(JobError, match=f"died with exit code {code}"):
        own.run(pool_jobs.leave_with, code, world_size=1)


@pytest.mark.full
def test_a_worker_whose_template_dies_goes_too_and_both_are_replaced(own: WorkerPool) -> None:
    before = own.run(pool_jobs.origin)[0]
    os.killpg(before["parent"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while _is_running(before["pid"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(before["pid"])
    after = own.run(pool_jobs.origin)
    assert after[0]["parent"] not in (before["parent"], os.getpid())
    assert own.run(pool_jobs.sum_of_ranks, init="gloo") == [(2, 3.0), (2, 3.0)]


@pytest.mark.full
def test_a_template_with_threads_is_not_forked() -> None:
    with WorkerPool(size=1, preload=("jobs.starts_a_thread",)) as own:
        (found,) = own.run(pool_jobs.origin, world_size=1)
        assert found["parent"] == os.getpid()


@pytest.mark.full
def test_beside_a_gpu_workers_import_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "device"
    device.touch()
    monkeypatch.setattr("nnx_conformance.pool.GPU_DEVICES", (str(device),))
    with WorkerPool(size=1, preload=("jobs.pool_jobs",)) as own:
        (found,) = own.run(pool_jobs.origin, world_size=1)
    assert found["parent"] == os.getpid()


def test_closing_leaves_neither_workers_nor_templates(own: WorkerPool) -> None:
    there = own.run(pool_jobs.origin)
    own.close()
    for found in there:
        assert not _is_running(found["pid"])
        assert not _is_running(found["parent"])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_of_the_shared_pool_have_lightning_from_the_start(pool: WorkerPool) -> None:
    for found in pool.run(pool_jobs.origin):
        assert b"nnx_conformance.pool" in Path(f"/proc/{found['parent']}/cmdline").read_bytes()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

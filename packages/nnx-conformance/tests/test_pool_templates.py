"""Workers that are forked of a process that has imported everything, instead of importing it themselves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import pool_jobs
from nnx_conformance import pool
from nnx_conformance.pool import JobError, WorkerPool


@pytest.fixture(scope="module")
def own() -> Iterator[WorkerPool]:
    with WorkerPool(size=3, preload=("jobs.pool_jobs", "there_is_no_such_module")) as own:
        yield own


def test_what_is_preloaded_is_there_before_the_first_job(own: WorkerPool) -> None:
    for found in own.run(pool_jobs.origin):
        assert found["parent"] != os.getpid()
        assert found["imported_by"] == found["parent"]


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all processes are told to have one order")
def test_ranks_next_to_each_other_differ_in_the_order_of_their_sets(own: WorkerPool) -> None:
    first, second = own.run(pool_jobs.origin)
    assert first["hash"] != second["hash"]
    assert first["parent"] != second["parent"]


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
    monkeypatch.setattr(pool, "GPU_DEVICES", (str(device),))
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

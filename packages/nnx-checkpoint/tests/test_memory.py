"""The memory of hosts: its lock, its end, and what is left of runs before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nnx_base.errors import CheckpointError
from nnx_checkpoint.memory import hosts
from nnx_checkpoint.memory.hosts import HostMemory, Hosts

HOLD = """
import sys, time
from nnx_checkpoint.memory.hosts import HostMemory
memory = HostMemory(sys.argv[1], "run", 1)
memory.lock(alone=True)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""

CLOSE = """
import multiprocessing, sys, time
from nnx_checkpoint.memory import hosts
own = hosts._lock
def lock(fd):
    has_lock = own(fd)
    time.sleep(0.05)  # the other process tries, too, before this one has closed
    return has_lock
hosts._lock = lock
context = multiprocessing.get_context("fork")
barrier = context.Barrier(2)
def close():
    for number in range(5):
        memory = hosts.HostMemory(sys.argv[1], f"run{number}", 1)
        memory.lock(alone=False)
        barrier.wait(60)
        memory.close(finished=True)
        barrier.wait(60)
other = context.Process(target=close)
other.start()
close()
other.join()
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """A process of another start that holds the memory."""
    words = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.full
def test_two_runs_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PATIENCE", 0.2)
    process = hold(tmp_path, 60)
    with pytest.raises(
        CheckpointError, match=r"another run with the name 'run' keeps copies on .* NNX_RUN_ID"
    ):
        HostMemory(str(tmp_path), "run", 1).lock(alone=True)
    process.kill()
    process.wait()
    HostMemory(str(tmp_path), "run", 1).lock(alone=True)


@pytest.mark.full
def test_the_lock_of_a_killed_process_is_waited_for(tmp_path: Path) -> None:
    process = hold(tmp_path, 60)
    process.kill()  # and not waited for: it may still be ending
    HostMemory(str(tmp_path), "run", 1).lock(alone=True)
    process.wait()


@pytest.mark.full
def test_the_last_process_of_a_finished_run_removes_its_memory(tmp_path: Path) -> None:
    process = hold(tmp_path, 60)
    memory = HostMemory(str(tmp_path), "run", 1)
    memory.lock(alone=False)
    process.kill()
    process.wait()
    (memory.path / "20260101T000000.000000-00000000").mkdir()
    memory.close(finished=True)
    assert not list(tmp_path.iterdir())


def test_processes_that_finish_at_the_same_moment_remove_their_memory(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CLOSE, str(tmp_path)], check=True, timeout=120)
    assert not list(tmp_path.iterdir())


def test_a_run_that_did_not_finish_keeps_its_memory(tmp_path: Path) -> None:
    memory = HostMemory(str(tmp_path), "run", 1)
    memory.lock(alone=True)
    memory.close(finished=False)
    assert memory.path.is_dir()


@pytest.mark.full
def test_memory_that_other_runs_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    for name, age in (("old", 7200.0), ("new", 10.0), ("held", 7200.0)):
        other = HostMemory(str(tmp_path), name, 1)
        (other.path / ".run.lock").touch()
        for path in (other.path / ".run.lock", other.path):
            os.utime(path, (time.time() - age,) * 2)
    words = [sys.executable, "-c", HOLD.replace('"run"', '"held"'), str(tmp_path), "60"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    held = HostMemory(str(tmp_path), "held", 1).path
    os.utime(held, (time.time() - 7200.0,) * 2)
    HostMemory(str(tmp_path), "run", 1).remove_abandoned()
    process.kill()
    process.wait()
    root = tmp_path / f"nnx-{os.geteuid()}"
    assert sorted(path.name for path in root.iterdir()) == ["held.1", "new.1", "run.1"]


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"nnx-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a directory of this user\. Remove it"):
        HostMemory(str(tmp_path), "run", 1)


def test_every_rank_has_a_buddy_on_another_host() -> None:
    for of_rank in [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 0, 1, 2, 2)]:
        found = Hosts(tuple(f"node{i}" for i in range(max(of_rank) + 1)), of_rank)
        for rank, host in enumerate(of_rank):
            buddy = found.buddy(rank)
            assert buddy is not None
            assert of_rank[buddy] != host
            assert len(set(found.holders(rank))) == 2
    assert Hosts(("node0",), (0, 0)).buddy(1) is None

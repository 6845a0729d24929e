"""After a fault of the disk at any operation, the path has the old checkpoint or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import nnx_checkpoint
from jobs import failing_disk
from jobs.failing_disk import meddled, save, version_at
from nnx_checkpoint.storage.lock import LOCK
from nnx_checkpoint.writing.collecting import collect_garbage
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in which forcing to disk costs nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("in_background", "every"),
    [
        pytest.param(False, 2, id="waiting"),  # leaves alternate faults out, but no operation
        pytest.param(True, 5, id="in the background"),
        pytest.param(False, 1, id="waiting, every fault", marks=pytest.mark.full),
        pytest.param(True, 1, id="in the background, every fault", marks=pytest.mark.full),
    ],
)
def test_a_fault_of_any_operation_loses_nothing(memory: Path, in_background: bool, every: int) -> None:
    tried, counts, _ = failing_disk.fail_everywhere(
        memory / "a", in_background=in_background, full=every == 1, every=every
    )
    print(f"{tried} faults of {sum(counts.values())} operations: {counts}")
    assert {"open", "write", "pwrite", "ftruncate", "fsync", "replace", "mkdir", "close", "flock"} <= {
        *counts
    }
    assert tried >= 100 // every


@pytest.mark.full
def test_a_fault_on_one_rank_reaches_both(pool: WorkerPool, memory: Path) -> None:
    for tried, failures in pool.run(
        failing_disk.fail_on_one_rank, str(memory / "a"), world_size=2, init="gloo"
    ):
        print(f"{tried} faults on one of two ranks, {failures} of them failed the save")
        assert tried > 40
        assert failures > 20


def test_a_disk_of_any_fullness_keeps_the_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        path, version = disk / "a", 1
        save(path, version)
        failures = 0
        for free in range(0, 40, 2):  # pages
            with (disk / "filler").open("wb", buffering=0) as filler:
                with pytest.raises(OSError, match="No space"):
                    while True:
                        filler.write(bytes(4096))
                filler.truncate(max(0, filler.tell() - 4096 * free))
            try:
                save(path, version + 1)
                version += 1
            except CheckpointError as error:
                failures += 1
                assert "No space left on device" in error.message
                assert "The previous checkpoint at this path is intact." in error.message
                assert error.remedy == "Free space there, or save elsewhere."
            assert nnx_checkpoint.verify(path) == []
            assert version_at(path) == version
            collect_garbage(path)
            (disk / "filler").unlink()
        assert 3 < failures < 20
        save(path, version + 1)
        assert version_at(path) == version + 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_commit_that_may_not_outlive_a_crash_keeps_the_save_before(memory: Path) -> None:
    path = memory / "a"
    save(path, 1)
    with meddled() as calls:
        save(path, 2)

    def act(name: str, number: int) -> None:
        if (name, number) == ("fsync", calls["fsync"]):  # of the directory, after the rename
            raise OSError(5, "Input/output error")

    with meddled(act), pytest.raises(CheckpointError, match="may restore the previous one"):
        save(path, 3)
    assert version_at(path) == 3
    before = sorted(entry for entry in path.iterdir() if entry.is_dir())[0]
    shutil.copy(before / "manifest.json", path)  # the machine crashed
    assert version_at(path) == 2


def test_a_lock_left_by_another_host_or_from_the_future_locks_nothing(memory: Path) -> None:
    path = memory / "a"
    save(path, 1)
    (path / LOCK).write_text("process 1 on another-host")
    os.utime(path / LOCK, (2**33, 2**33))
    save(path, 2)
    assert version_at(path) == 2
    assert not (path / LOCK).exists()


@pytest.mark.full
def test_a_reader_whose_save_is_replaced_at_any_operation_reads_the_new_one(memory: Path) -> None:
    path = memory / "a"
    save(path, 1)
    with meddled() as calls:
        nnx_checkpoint.open_checkpoint(path)
        nnx_checkpoint.verify(path)
    version, total = 1, sum(calls.values())
    for step in range(1, total + 1):
        count = 0

        def overwrite(_name: str, _number: int, step: int = step, version: int = version) -> None:
            nonlocal count
            count += 1
            if count == step:
                # Another name and more digits: other lengths of manifest and objects than before.
                save(path, 10**step if step < 15 else version + 1)

        with meddled(overwrite):
            nnx_checkpoint.open_checkpoint(path)
            assert nnx_checkpoint.verify(path) == []
        version = version_at(path)


@pytest.mark.full
def test_a_signal_that_saves_in_the_middle_of_a_save_harms_neither(memory: Path) -> None:
    path, other = memory / "a", memory / "hpc_ckpt_1.ckpt"
    save(path, 1)
    with meddled() as calls:
        save(path, 2)
    previous = signal.signal(signal.SIGUSR2, lambda *_: save(other, version))
    try:
        for step in range(1, sum(calls.values()) + 1):
            version, count = step + 2, 0

            def interrupt(_name: str, _number: int, step: int = step) -> None:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGUSR2)

            with meddled(interrupt):
                save(path, version)
            assert version_at(path) == version_at(other) == version
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert nnx_checkpoint.verify(other) == []

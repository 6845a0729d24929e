"""``memory_checkpoint``: processes are killed, and the next ones resume bit by bit from the copies in memory.

Processes and kills are real. Hosts are pretended by directories, one for the memory of each; those of
`tests/nodes` are real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nnx
from jobs.memory_jobs import (
    Counter,
    Filler,
    Report,
    call,
    damage,
    fit,
    recorded,
    step_of,
    with_own_io,
)
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import OptionError
from nnx_core.options import CommonOptions
from nnx_test_helpers.training import Run
from nnx_test_helpers.training import train as train_plainly

STEPS = 12
RUNS = {
    "fsdp_auto": Run(options={"min_num_params": 100}, steps=STEPS),
    "nnscaler_zero": Run("nnscaler_zero", steps=STEPS),
    "colossalai": Run("colossalai", steps=STEPS),
    "ddp": Run("ddp", steps=STEPS),
}
RUN = RUNS["fsdp_auto"]


def run(pool: WorkerPool, what: Run, folder: Path, **more: Any) -> list[Report]:
    """Train in real processes, under one name of the run for each folder."""
    env = {"NNX_RUN_ID": folder.name}
    return pool.run(call, what, str(folder), more, world_size=what.devices, env=env, end_after=1.0, grace=2.0)


def kill(pool: WorkerPool, what: Run, folder: Path, rank: int, step: int, **more: Any) -> None:
    """Train until a rank kills itself after a step."""
    with pytest.raises(JobError, match=r"SIGKILL|-9|signal 9"):
        run(pool, what, folder, kill=(rank, step), **more)


@pytest.mark.quick(every=8, first=4)
@pytest.mark.parametrize("what", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_killed_run_goes_on_from_the_copies_bit_by_bit(
    pool: WorkerPool, tmp_path: Path, what: Run, hosts: int
) -> None:
    whole = run(pool, what, tmp_path, hosts=hosts)
    assert not list(tmp_path.glob("host*/*")), "a finished run leaves nothing"
    kill(pool, what, tmp_path, 1, 8, hosts=hosts)
    assert step_of(tmp_path) == {6}
    reports = run(pool, what, tmp_path, hosts=hosts)
    for rank, report in enumerate(reports):
        assert report.start == 6
        assert report.before == recorded(tmp_path, rank, 6)
        assert report.losses == whole[rank].losses[6:]
        assert report.digests[STEPS] == whole[rank].digests[STEPS]
    names = "vm, vm" if hosts == 2 else "vm"
    assert any(
        line.startswith("memory: Resuming after step 6 from the copies in memory of ")
        and line.count(",") == names.count(",")
        for line in reports[0].log
    )
    assert not list(tmp_path.glob("host*/*"))


def test_a_lost_host_costs_nothing_and_another_takes_its_place(pool: WorkerPool, tmp_path: Path) -> None:
    what = replace(RUN, devices=3)
    kill(pool, what, tmp_path, 0, 8, hosts=3)
    shutil.rmtree(tmp_path / "host1")
    for rank, report in enumerate(run(pool, what, tmp_path, hosts=3)):
        assert (report.start, report.before) == (6, recorded(tmp_path, rank, 6))


@pytest.mark.full
def test_a_smaller_world_resumes_from_the_hosts_that_are_left(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(train_plainly, RUN, world_size=2)[0].losses
    kill(pool, RUN, tmp_path, 1, 8, hosts=2)
    shutil.rmtree(tmp_path / "host1")
    report = run(pool, replace(RUN, devices=1), tmp_path)[0]
    assert report.start == 6
    assert report.losses == pytest.approx(whole[6:], abs=1e-5)


# --- what is not usable -----------------------------------------------------------------------------


def on_disk(tmp_path: Path, step: int) -> Run:
    """A run over three hosts that saves to disk, and resumes from there."""
    disk = str(tmp_path / "disk.ckpt")
    return replace(RUN, devices=3, save=disk, save_at=step, resume=disk)


@pytest.fixture
def killed(pool: WorkerPool, tmp_path: Path) -> Run:
    """A run that was killed after step 8, with copies of step 6 and step 4 on disk."""
    what = on_disk(tmp_path, 4)
    kill(pool, replace(what, resume=None), tmp_path, 0, 8, hosts=3, saves=True)
    return what


@pytest.mark.full
def test_if_both_holders_are_gone_the_disk_is_taken_and_the_log_names_them(
    pool: WorkerPool, tmp_path: Path, killed: Run
) -> None:
    for host in (1, 2):
        shutil.rmtree(tmp_path / f"host{host}")
    report = run(pool, killed, tmp_path, hosts=3)[0]
    assert report.start == 4
    assert (
        "memory: The copy of step 6 in memory is refused: the state of rank 1 is gone with both"
        in report.log[0]
    )
    assert "holders, " in report.log[0]
    disk = killed.resume
    assert f"memory: Resuming after step 4 from disk (no usable copies in memory): {disk}" in report.log


@pytest.mark.full
def test_a_state_that_is_damaged_on_both_holders_is_refused_and_the_disk_is_taken(
    pool: WorkerPool, tmp_path: Path, killed: Run
) -> None:
    assert damage(tmp_path, "r00001.safetensors") == 2
    report = run(pool, killed, tmp_path, hosts=3)[0]
    assert report.start == 4
    assert re.search(
        r"step 6 in memory is refused: the state of rank 1 is damaged on \S+ and \S+ \(.*block", report.log[0]
    )


@pytest.mark.full
def test_a_state_that_is_damaged_on_one_holder_is_taken_from_the_other(
    pool: WorkerPool, tmp_path: Path, killed: Run
) -> None:
    assert damage(tmp_path, "r00001.safetensors", host="host1") == 1
    for rank, report in enumerate(run(pool, killed, tmp_path, hosts=3)):
        assert (report.start, report.before) == (6, recorded(tmp_path, rank, 6))


@pytest.mark.full
@pytest.mark.parametrize("name", ["index.json", "objects.json", "manifest.json"])
def test_damage_of_a_common_file_on_every_host_is_refused(
    pool: WorkerPool, tmp_path: Path, killed: Run, name: str
) -> None:
    assert damage(tmp_path, name) == 3 * (1 + (name == "manifest.json"))
    report = run(pool, killed, tmp_path, hosts=3)[0]
    assert report.start == 4
    assert "is refused: " in report.log[0]
    assert "damaged on vm" in report.log[0].replace(socket.gethostname(), "vm")


@pytest.mark.full
def test_a_newer_checkpoint_on_disk_wins(pool: WorkerPool, tmp_path: Path) -> None:
    what = on_disk(tmp_path, 7)
    kill(pool, replace(what, resume=None), tmp_path, 0, 8, hosts=3, saves=True)
    report = run(pool, what, tmp_path, hosts=3)[0]
    assert report.start == 7
    disk = f"Resuming after step 7 from disk (the copies in memory are of step 6): {what.resume}"
    assert f"memory: {disk}" in report.log


@pytest.mark.full
def test_without_copies_and_checkpoint_the_run_begins(pool: WorkerPool, tmp_path: Path) -> None:
    kill(pool, RUN, tmp_path, 1, 2)
    assert run(pool, RUN, tmp_path)[0].start == 0


# --- memory -----------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A memory of 600 KB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    folder = tmp_path / "host0"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.full
def test_a_memory_that_is_too_small_is_refused_before_anything_is_written(
    pool: WorkerPool, tmp_path: Path, small: Path
) -> None:
    (small / "full").write_bytes(bytes(570_000))
    with pytest.raises(JobError) as raised:
        run(pool, RUN, tmp_path)
    message = str(raised.value)
    assert "is too small: two copies of the state of ranks 0, 1 take" in message
    assert "--shm-size" in message


@pytest.mark.full
def test_a_memory_that_fills_up_later_costs_a_warning_and_the_last_copy_stays(
    pool: WorkerPool, tmp_path: Path, small: Path
) -> None:
    filler = Filler(str(small / "full"), 5)
    kill(pool, RUN, tmp_path, 1, 8, callbacks=(filler,))
    assert step_of(tmp_path) == {3}
    (small / "full").unlink()
    assert run(pool, RUN, tmp_path)[0].start == 3


@pytest.mark.full
def test_a_full_disk_ends_the_run_and_the_copies_live(pool: WorkerPool, tmp_path: Path, small: Path) -> None:
    (small / "full").write_bytes(bytes(590_000))
    other = tmp_path / "other"
    other.mkdir()
    what = replace(RUN, save=str(small / "disk.ckpt"), save_at=8)
    with pytest.raises(JobError, match="No space left on device"):
        run(pool, what, other, saves=True)
    assert step_of(other) == {6}
    assert run(pool, RUN, other)[0].start == 6


@pytest.mark.full
def test_memory_holds_two_copies_at_most(pool: WorkerPool, tmp_path: Path) -> None:
    counter = Counter(str(tmp_path))
    run(pool, RUN, tmp_path, hosts=2, callbacks=(counter,), every=1)
    counts = [int(text) for text in (tmp_path / "counts").read_text().split()]
    assert max(counts) <= 2
    assert len(counts) == STEPS


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3, True])
def test_the_interval_is_a_positive_number_of_steps(value: Any) -> None:
    expected = rf"memory_checkpoint={value} is not a positive number of steps. Pass, say, 5."
    with pytest.raises(OptionError, match=expected):
        CommonOptions(memory_checkpoint=value)
    with pytest.raises(OptionError, match=expected):
        nnx.CheckpointIO(memory_checkpoint=value)


def test_a_run_without_a_name_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match="needs a name of the run that a restart keeps, and the launcher gives"
    ):
        pool.run(call, RUN, str(tmp_path), {}, world_size=2, env={"TORCHELASTIC_RUN_ID": "none"})


def test_a_strategy_of_nnx_takes_the_option_itself(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"Pass it there: nnx.strategy\('fsdp_auto', memory_checkpoint=2\)"):
        pool.run(with_own_io, world_size=2)


def test_fabric_refuses_the_option() -> None:
    with pytest.raises(OptionError, match="memory_checkpoint=5 needs a Trainer, whose state nnx knows"):
        nnx.strategy("fsdp_auto", namespace="lightning.fabric", memory_checkpoint=5)


def test_a_directory_that_is_missing_is_one_error(pool: WorkerPool, tmp_path: Path) -> None:
    what = replace(RUN, options={**RUN.options, "memory_directory": str(tmp_path / "none")})
    with pytest.raises(JobError, match=r"memory_directory='\S+none' is no directory on"):
        pool.run(fit, what, world_size=2, env={"NNX_RUN_ID": "x"})

"""A save that cannot succeed raises one error on every rank, and the previous checkpoint stays intact."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from nnx_base.shard import Box, Shard, shard_of
from nnx_checkpoint.format.manifest import FileEntry, Manifest
from nnx_checkpoint.storage import lock
from nnx_checkpoint.storage.files import _REMEDIES, explained
from nnx_checkpoint.storage.locations import LocalPlace, place_of
from nnx_checkpoint.writing.transaction import begin
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers import checkpoint_jobs


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def save(path: Path, **more: Any) -> None:
    nnx_checkpoint.save(path, tensors={"w": shard_of(torch.ones(3))}, **{"objects": {}, **more})


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "file size limit",
            r"failed on rank 1: cannot write '.*r00001.safetensors': File too large. .*ulimit",
        ),
        (
            "shape",
            r"ranks disagree about tensor 'model.scalar': float32 \(\) on rank 0, float32 \(2,\) on rank 1",
        ),
        (
            "dtype",
            r"ranks disagree about tensor 'model.scalar': float32 \(\) on rank 0, int64 \(\) on rank 1",
        ),
        ("gap", r"tensor 'model.rows' do not make up its shape \(301, 400\): the boxes hold 60400 of 120400"),
        ("overlap", r"tensor 'model.rows' do not make up .*: box .* overlaps box \(0, 0\)\+"),
        ("opaque", r"failed on rank 1: the object at 'sampler' is a builtins.object, which has no safe"),
        ("alias", r"alias 'model.tied' of 'model.nowhere': the target must be stored"),
        ("name", r"failed on rank 1: the tensor name 'rank.1.y' is reserved"),
    ],
)
def test_a_fault_on_one_rank_is_the_same_error_on_both(
    pool: WorkerPool, tmp_path: Path, fault: str, message: str
) -> None:
    import re

    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    before = names(path)
    first, second = pool.run(checkpoint_jobs.attempt, str(path), fault, world_size=2, init="gloo")
    assert first == second
    assert first is not None
    assert first[0] == "CheckpointError"
    assert re.search(message, first[1]), first[1]
    assert names(path) == before  # nothing is left of the failed save
    assert nnx_checkpoint.verify(path) == []
    assert pool.run(checkpoint_jobs.load_all, str(path), world_size=2, init="gloo") == [[], []]


def test_without_a_fault_the_same_job_saves(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    assert pool.run(checkpoint_jobs.attempt, path, "none", world_size=2, init="gloo") == [None, None]


def test_a_failed_first_save_leaves_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.attempt, str(path), "file size limit", world_size=2, init="gloo")
    assert not path.exists()


def test_a_rank_that_dies_during_a_save_neither_hangs_nor_harms(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    with pytest.raises(JobError, match="died with exit code 9") as caught:
        pool.run(checkpoint_jobs.leave_during_save, str(path), world_size=2, init="gloo", timeout=60)
    assert list(caught.value.failures) == [1]  # rank 0 got a CheckpointError and returned
    assert nnx_checkpoint.verify(path) == []
    assert nnx_checkpoint.open_checkpoint(path).objects["version"] == 1
    orphans = names(path) - {"manifest.json", nnx_checkpoint.open_checkpoint(path).manifest.save_id}
    assert len(orphans) == 1
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    assert names(path) == {"manifest.json", nnx_checkpoint.open_checkpoint(path).manifest.save_id}


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a single-file checkpoint")
    with pytest.raises(
        CheckpointError,
        match=r"cannot save to '.*/a': it is a file. Nothing was changed at this path. Choose",
    ):
        save(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "a single-file checkpoint"


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"it holds other files, such as 'notes.txt'"):
        save(tmp_path)
    assert names(tmp_path) == {"notes.txt"}


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    save(tmp_path)
    assert nnx_checkpoint.is_checkpoint(tmp_path)


def test_other_files_in_a_checkpoint_are_never_removed(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "README").write_text("mine")
    (tmp_path / "20260101").mkdir()
    save(tmp_path)
    assert {"README", "20260101", "manifest.json"} < names(tmp_path)


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError,
        match=r"cannot create '.*': Not a directory. Nothing was changed at this path. Choose",
    ):
        save(tmp_path / "file" / "a")


def test_a_file_system_that_refuses_is_explained() -> None:
    with pytest.raises(CheckpointError, match=r"cannot create '/proc/nnx-test.ckpt': "):
        save(Path("/proc/nnx-test.ckpt"))


@pytest.mark.parametrize("code", sorted(_REMEDIES))
def test_every_known_error_of_the_system_has_a_remedy(code: int) -> None:
    with pytest.raises(CheckpointError) as caught, explained("write", "/x"):
        raise OSError(code, os.strerror(code))
    assert str(caught.value) == f"cannot write '/x': {os.strerror(code)}. {_REMEDIES[code]}"


def test_an_unknown_error_of_the_system_is_explained_too() -> None:
    with (
        pytest.raises(CheckpointError, match=r"cannot write '/x': odd. Check the path"),
        explained("write", "/x"),
    ):
        raise OSError("odd")


def test_a_link_to_a_directory_is_saved_through_and_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "last.ckpt").symlink_to("real")
    save(tmp_path / "last.ckpt")
    save(tmp_path / "last.ckpt", objects={"n": 2})
    assert (tmp_path / "last.ckpt").is_symlink()
    assert nnx_checkpoint.open_checkpoint(tmp_path / "last.ckpt").objects == {"n": 2}
    assert nnx_checkpoint.open_checkpoint(tmp_path / "real").objects == {"n": 2}


def test_saving_again_replaces_the_old_and_collects_it(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path / "a", objects={"step": step})
        checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
        assert checkpoint.objects == {"step": step}
        assert names(tmp_path / "a") == {"manifest.json", checkpoint.manifest.save_id}


def test_earlier_saves_can_be_kept(tmp_path: Path) -> None:
    ids = []
    for step in range(4):
        save(tmp_path / "a", objects={"step": step}, keep_previous=2)
        ids.append(nnx_checkpoint.open_checkpoint(tmp_path / "a").manifest.save_id)
    assert names(tmp_path / "a") == {"manifest.json", *ids[1:]}
    # A kept save is whole: putting its copy of the manifest back goes back to it.
    (tmp_path / "a" / "manifest.json").write_bytes((tmp_path / "a" / ids[1] / "manifest.json").read_bytes())
    assert nnx_checkpoint.verify(tmp_path / "a") == []
    assert nnx_checkpoint.open_checkpoint(tmp_path / "a").objects == {"step": 1}


def test_a_clock_that_is_set_back_does_not_change_which_saves_are_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    for step, hours in enumerate((0, 1, -2, -3)):
        monkeypatch.setattr(
            "nnx_checkpoint.writing.transaction.now", lambda hours=hours: begun + timedelta(hours=hours)
        )
        save(tmp_path / "a", objects={"step": step}, keep_previous=1)
    assert nnx_checkpoint.open_checkpoint(tmp_path / "a").objects == {"step": 3}
    saves = sorted(path for path in (tmp_path / "a").iterdir() if path.is_dir())
    assert [json.loads((path / "objects.json").read_text())["step"] for path in saves] == [2, 3]


def test_everything_is_on_disk_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, order = tmp_path / "a", []
    real_sync, real_replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        order.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real_sync(fd)

    def replace(*names: str, **directories: int) -> None:
        order.append("commit")
        real_replace(*names, **directories)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    save(path, rank_objects={"x": 1}, objects={"f": object}, opaque="pickle")
    before, after = set(order[: order.index("commit")]), order[order.index("commit") + 1 :]
    save_id = nnx_checkpoint.open_checkpoint(path).manifest.save_id
    files = {str(file) for file in (path / save_id).iterdir()}
    assert len(files) == 7
    assert files | {str(path / save_id), str(path), str(tmp_path)} < before
    assert f"{path}/.manifest.json.{save_id}.tmp" in before
    assert after == [str(path)]


def test_a_file_that_changed_before_the_commit_stops_it(tmp_path: Path) -> None:

    save(tmp_path / "a", objects={"n": 1})
    attempt = begin(place_of(tmp_path / "a"))
    manifest = Manifest(attempt.save_id, "", {"index.json": FileEntry(5, "0" * 32, 5)})
    with pytest.raises(CheckpointError, match=r"cannot commit '.*index.json': it is missing"):
        attempt.commit(manifest, keep_previous=0)
    (tmp_path / "a" / attempt.save_id / "index.json").write_bytes(b"123")
    with pytest.raises(
        CheckpointError, match=r"cannot commit '.*index.json': it has 3 bytes, 5 were written"
    ):
        attempt.commit(manifest, keep_previous=0)
    attempt.discard()
    assert nnx_checkpoint.open_checkpoint(tmp_path / "a").objects == {"n": 1}


def test_a_reader_that_opened_the_old_save_gets_old_data_or_a_clear_error(tmp_path: Path) -> None:
    save(tmp_path / "a")
    old = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="No such file"):
        old.read("w")


def test_two_runs_saving_to_one_path_never_commit_a_mixture(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "a", []

    def run(value: int) -> None:
        for _ in range(10):
            try:
                nnx_checkpoint.save(
                    path,
                    tensors={"w": shard_of(torch.full((1000,), value))},
                    objects={"value": value},
                )
                outcomes.append("")
            except CheckpointError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=run, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = {text for text in outcomes if text}
    assert all("another run is saving to it now" in text for text in refused), refused
    assert outcomes.count("") > 0
    checkpoint = nnx_checkpoint.open_native(path)
    assert checkpoint.read("w").tolist() == [checkpoint.objects["value"]] * 1000
    assert nnx_checkpoint.verify(path) == []
    assert names(path) == {"manifest.json", checkpoint.manifest.save_id}


def test_two_runs_that_make_one_path_at_once_see_each_other_as_runs(tmp_path: Path) -> None:
    refused: set[str] = set()

    def run(path: Path, start: threading.Barrier) -> None:
        start.wait()
        try:
            save(path, objects={"n": 1})
        except CheckpointError as error:
            refused.add(str(error))

    for number in range(60):
        start = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(tmp_path / str(number), start)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all("another run is saving to it now" in text for text in refused), refused


def test_a_second_run_is_refused_while_the_first_one_saves_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, objects={"n": 1})
    first = begin(place_of(path))
    (first.directory / "r00000.safetensors").write(b"in progress")
    before = {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(
        CheckpointError,
        match=rf"saving to it now \(process {os.getpid()} on .*\). Nothing was changed at this path. Give",
    ):
        save(path, objects={"n": 2})
    assert {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    first.discard()
    save(path, objects={"n": 2})
    assert nnx_checkpoint.open_checkpoint(path).objects == {"n": 2}
    assert names(path) == {"manifest.json", nnx_checkpoint.open_native(path).manifest.save_id}


def test_a_second_first_save_is_refused_too(tmp_path: Path) -> None:
    first = begin(place_of(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="another run is saving to it now"):
        save(tmp_path / "a")
    first.discard()
    assert not (tmp_path / "a").exists()


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """A child that does something and then waits until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = work()  # noqa: F841 - alive until the end
            os.write(write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        os.read(read, 1)
        yield child
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_run_locks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, objects={"n": 1})
    with (
        forked(lambda: begin(place_of(path))) as child,
        pytest.raises(CheckpointError, match=rf"another run is saving to it now \(process {child} on"),
    ):
        save(path)
    assert ".saving.lock" in names(path)
    save(path, objects={"n": 2})
    assert names(path) == {"manifest.json", nnx_checkpoint.open_native(path).manifest.save_id}


@pytest.mark.parametrize("child_releases", [False, True])
def test_a_process_forked_during_a_save_neither_keeps_nor_ends_the_lock(
    tmp_path: Path, child_releases: bool
) -> None:
    attempt = begin(place_of(tmp_path / "a"))
    # Such as a worker of a DataLoader, which goes on to run after the save.
    with forked(lambda: attempt.release() if child_releases else None):
        with pytest.raises(CheckpointError, match="another run is saving"):
            save(tmp_path / "a")
        attempt.discard()
        save(tmp_path / "a")


def test_a_lock_that_is_released_while_another_run_asks_for_it_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a")
    first, real = begin(place_of(tmp_path / "a")), fcntl.flock

    def release_first(fd: int, how: int) -> None:
        monkeypatch.undo()
        first.discard()  # removes the file that the other run has just opened
        real(fd, how)

    monkeypatch.setattr("fcntl.flock", release_first)
    second = begin(place_of(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="another run is saving"):
        save(tmp_path / "a")
    second.discard()


def test_an_interrupted_save_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnx_checkpoint.writing import writer

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write_rank_file", interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        save(tmp_path / "a")
    monkeypatch.undo()
    save(tmp_path / "a")  # although the traceback, and so the save, is still alive
    assert kept.value is not None
    assert nnx_checkpoint.verify(tmp_path / "a") == []


@pytest.mark.parametrize("code", sorted(lock._UNSUPPORTED))
def test_where_there_are_no_locks_a_save_that_was_overtaken_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "planted")

    monkeypatch.setattr("fcntl.flock", refuse)
    path = tmp_path / "a"
    save(path, objects={"n": 1})
    slow = begin(place_of(path))
    save(path, objects={"n": 2})
    assert slow.directory.kind() == "directory"  # not collected: it may still be in progress
    with pytest.raises(CheckpointError, match=r"commit to '.*': another run has saved to it meanwhile"):
        slow.commit(Manifest(slow.save_id, "", {}), keep_previous=0)
    slow.discard()
    assert nnx_checkpoint.open_checkpoint(path).objects == {"n": 2}
    assert names(path) == {"manifest.json", nnx_checkpoint.open_native(path).manifest.save_id}


def test_a_commit_that_came_through_is_not_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalPlace.replace

    def interrupted(self: LocalPlace, data: bytes, *, temporary: str) -> None:
        real(self, data, temporary=temporary)
        raise CheckpointError("planted: the connection was lost after the commit.")

    monkeypatch.setattr(LocalPlace, "replace", interrupted)
    with pytest.raises(CheckpointError, match="planted"):
        save(tmp_path / "a", objects={"n": 1})
    assert nnx_checkpoint.verify(tmp_path / "a") == []
    assert nnx_checkpoint.open_checkpoint(tmp_path / "a").objects == {"n": 1}


def test_a_directory_that_may_not_be_written_to_is_the_same_error_on_both_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "a"
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    made_by_pytest = [parent for parent in path.parents if Path(tempfile.gettempdir()) in parent.parents]
    for directory in (path, *made_by_pytest):
        directory.chmod(0o555)
    try:
        first, second = pool.run(
            checkpoint_jobs.save_without_permission, str(path), world_size=2, init="gloo"
        )
        other, _ = pool.run(checkpoint_jobs.save_without_permission, f"{path}-new", world_size=2, init="gloo")
    finally:
        for directory in (path, *made_by_pytest):
            directory.chmod(0o755)
    assert first == second
    assert (
        "/a/.saving.lock': Permission denied. Nothing was changed at this path. Make the directory writable"
        in first
    )
    assert "cannot create '" in other
    assert (
        "/a-new': Permission denied. Nothing was changed at this path. Make the directory writable" in other
    )
    assert nnx_checkpoint.verify(path) == []
    assert pool.run(checkpoint_jobs.load_all, str(path), world_size=2, init="gloo") == [[], []]


def test_a_directory_that_vanishes_in_the_middle_of_a_save_is_the_same_error_on_both_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    first, second = pool.run(checkpoint_jobs.lose_directory_during_save, str(path), world_size=2, init="gloo")
    assert first == second
    assert "The previous checkpoint at this path is intact. Every rank must see" in first
    assert pool.run(checkpoint_jobs.load_all, str(path), world_size=2, init="gloo") == [[], []]
    assert names(path) == {"manifest.json", nnx_checkpoint.open_native(path).manifest.save_id}


def test_a_checkpoint_that_vanishes_before_it_is_loaded_is_an_error_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    pool.run(checkpoint_jobs.save_all, str(path), "deduped", world_size=2, init="gloo")
    found = pool.run(checkpoint_jobs.load_what_vanishes, str(path), world_size=2, init="gloo")
    for text in found:
        assert "cannot read '" in text
        assert "No such file or directory. Every rank must see the same directory" in text


def test_a_missing_tensor_is_listed(tmp_path: Path) -> None:
    save(tmp_path / "a")
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    wanted = {f"x{i}": shard_of(torch.zeros(3)) for i in range(12)} | {"w": shard_of(torch.zeros(3))}
    with pytest.raises(CheckpointError, match=r"has no tensor 'x0', 'x1', .*, \.\.\. \(12 missing\)"):
        checkpoint.fill(wanted)
    assert wanted["w"].data[0].tolist() == [0, 0, 0]
    with pytest.raises(CheckpointError, match="has no tensor 'y'"):
        checkpoint.read("y")


def test_another_shape_is_refused_naming_both(tmp_path: Path) -> None:
    save(tmp_path / "a")
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'w' has shape \(3,\) in .*, but shape \(4,\) in the"):
        checkpoint.fill({"w": shard_of(torch.zeros(4))})


def test_another_dtype_is_refused_naming_both(tmp_path: Path) -> None:
    save(tmp_path / "a")
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'w' is torch.float32 in .*, but torch.bfloat16 in the model"):
        checkpoint.fill({"w": shard_of(torch.zeros(3).bfloat16())})


def test_a_box_outside_the_tensor_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a")
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="tensor 'w' is out of bounds"):
        checkpoint.read("w", Box((2,), (2,)))
    outside = Shard((3,), torch.float32, (Box((2,), (2,)),), (torch.zeros(2),))
    with pytest.raises(CheckpointError, match="tensor 'w' is out of bounds"):
        checkpoint.fill({"w": outside})


def test_an_unstorable_dtype_is_refused(tmp_path: Path) -> None:
    shard = Shard((2,), torch.float8_e5m2fnuz, (), ())
    with pytest.raises(CheckpointError, match="'w' has dtype float8_e5m2fnuz, which a checkpoint"):
        nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard}, objects={})
    sparse = torch.eye(3).to_sparse()
    view = Shard((3, 3), torch.float32, (Box.whole((3, 3)),), (sparse,))
    with pytest.raises(CheckpointError, match=r"is torch.float32 with layout torch.sparse_coo, expected"):
        nnx_checkpoint.save(tmp_path / "a", tensors={"w": view}, objects={})


def test_a_tensor_without_data_is_refused(tmp_path: Path) -> None:
    tensors = {"w": shard_of(torch.zeros(2, device="meta"))}
    with pytest.raises(CheckpointError, match=r"'w' is on the meta device and has no data. Materialise"):
        nnx_checkpoint.save(tmp_path / "a", tensors=tensors, objects={})


def test_an_unknown_state_dict_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown state_dict_type 'full'"):
        save(tmp_path / "a", state_dict_type="full")


def test_provenance_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the provenance of a checkpoint is not plain JSON"):
        save(tmp_path / "a", provenance={"x": object()})
    assert not (tmp_path / "a").exists()

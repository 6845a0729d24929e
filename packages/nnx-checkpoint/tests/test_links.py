"""A foreign checkpoint cannot lead outside its directory or block a reader forever."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_checkpoint.reading.verification import verify
from nnx_checkpoint.storage.lock import LOCK
from nnx_checkpoint.writing.collecting import collect_garbage
from nnx_core.errors import CheckpointError

FOREIGN_SAVE = "20200101T000000.000000-deadbeef"


def save(path: Path) -> Path:
    nnx_checkpoint.save(path, tensors={"w": shard_of(torch.ones(3))}, objects={})
    return path


def value(path: Path) -> list[float]:
    return nnx_checkpoint.open_checkpoint(path).read("w").tolist()


def save_directory(path: Path) -> Path:
    return path / nnx_checkpoint.open_checkpoint(path).manifest.save_id


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_or_a_second_name_in_the_place_of_the_lock_leads_nowhere(
    tmp_path: Path, dangling: bool
) -> None:
    path, precious = save(tmp_path / "a.ckpt"), tmp_path / "precious.txt"
    if not dangling:
        precious.write_text("precious data")
    (path / LOCK).symlink_to(precious)
    for attempt in (lambda: save(path), lambda: collect_garbage(path, dry_run=True)):
        try:
            attempt()
        except CheckpointError as error:
            assert LOCK in str(error)
    assert precious.exists() is not dangling
    if not dangling:
        (path / LOCK).unlink()
        (path / LOCK).hardlink_to(precious)
        with pytest.raises(CheckpointError, match="has a second name elsewhere"):
            save(path)
        assert precious.read_text() == "precious data"


@pytest.mark.parametrize("how", ["save", "gc"])
def test_a_link_named_like_a_save_harms_no_other_checkpoint(tmp_path: Path, how: str) -> None:
    victim, path = save(tmp_path / "victim.ckpt"), save(tmp_path / "evil.ckpt")
    (path / FOREIGN_SAVE).symlink_to(victim)
    if how == "save":
        save(path)
    else:
        spared = collect_garbage(path, keep_previous=0).spared
        assert "a link or a special file" in spared[0].why
    assert value(victim) == [1, 1, 1]
    assert (path / FOREIGN_SAVE).is_symlink()


def test_a_checkpoint_that_is_a_link_works_and_links_within_one_are_refused(tmp_path: Path) -> None:
    path, link = save(tmp_path / "a.ckpt"), tmp_path / "link.ckpt"
    link.symlink_to(path)
    assert value(save(link)) == [1, 1, 1]
    for inner in (
        "manifest.json",
        save_directory(path).name,
        f"{save_directory(path).name}/r00000.safetensors",
    ):
        copy = tmp_path / "copy.ckpt"
        shutil.copytree(path, copy)
        moved = tmp_path / "elsewhere"
        (copy / inner).rename(moved)
        (copy / inner).symlink_to(moved)
        with pytest.raises(CheckpointError):
            value(copy)
        shutil.rmtree(copy)
        shutil.rmtree(moved) if moved.is_dir() else moved.unlink()


@pytest.mark.parametrize("inner", ["manifest.json", "save/r00000.sums", "save/index.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, inner: str) -> None:
    path = save(tmp_path / "a.ckpt")
    file = path / inner.replace("save/", f"{save_directory(path).name}/")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError):
        value(path)
    if inner != "manifest.json":
        assert verify(path)


def test_links_in_circles_are_neither_followed_nor_fatal(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    unfinished = path / FOREIGN_SAVE
    unfinished.mkdir()
    for name in ("a", "b"):
        (unfinished / name).symlink_to(".")
    assert [Path(item.path).name for item in collect_garbage(path).removed] == [FOREIGN_SAVE]
    assert value(path) == [1, 1, 1]


def test_a_lock_without_room_for_its_text_still_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a.ckpt")
    (path / FOREIGN_SAVE).mkdir()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(os, "pwrite", full)
    assert len(collect_garbage(path).removed) == 1


def test_a_directory_that_cannot_be_forced_to_disk_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = save(tmp_path / "a.ckpt"), os.fsync

    def broken(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_dir():
            raise OSError(errno.EIO, "planted")
        real(fd)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(path)
    monkeypatch.undo()
    assert value(path) == [1, 1, 1]

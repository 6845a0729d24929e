"""Garbage collection removes no file in use and no file of other programs, and obstacles do not stop it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nnx_checkpoint
from nnx_base.errors import CheckpointError
from nnx_base.shard import shard_of
from nnx_checkpoint.format.manifest import MANIFEST
from nnx_checkpoint.writing.collecting import collect_garbage

SAVES = ("20000101T000000.000000-0123abcd", "20990101T000000.000000-0123abcd")


def save(path: Path) -> Path:
    nnx_checkpoint.save(path, tensors={"w": shard_of(torch.ones(3))}, objects={})
    return path


def age(*paths: Path) -> None:
    """Let two hours go by since anything in them changed."""
    then = time.time() - 7200
    for path in paths:
        for inner in (*path.rglob("*"), path):
            os.utime(inner, (then, then), follow_symlinks=False)


def removed(path: Path, **options: float) -> set[str]:
    return {Path(item.path).name for item in collect_garbage(path, **options).removed}  # type: ignore[arg-type]


def test_a_checkpoint_that_is_being_copied_in_is_left_alone(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source.ckpt"), tmp_path / "runs" / "target.ckpt"
    older = source / SAVES[0]
    older.mkdir()
    (older / "r00000.safetensors").write_bytes(b"some of it")
    age(source)
    for save_id in (path.name for path in source.iterdir() if path.is_dir()):
        (target / save_id).mkdir(parents=True)
        for file in (source / save_id).glob("r*"):
            shutil.copy2(file, target / save_id)  # as `cp -a` and rsync do, with the times of the source
    collected = collect_garbage(tmp_path / "runs")
    assert collected.removed == []
    assert all("a program may be copying it here" in item.why for item in collected.spared)
    assert len(collected.spared) == 2
    age(target)
    assert len(collect_garbage(tmp_path / "runs").removed) == 2


def test_a_newer_save_that_is_being_copied_over_an_older_one_is_left_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    newer = path / SAVES[1]
    newer.mkdir()
    shutil.copy(path / MANIFEST, newer)
    assert removed(path, keep_previous=0) == set()
    assert removed(path, keep_previous=0, min_age=0) == {newer.name}


def deep(partial: Path) -> None:
    here = Path.cwd()
    os.chdir(partial)
    for _ in range(1500):
        Path("d").mkdir()
        os.chdir("d")
    os.chdir(here)


def dangling(partial: Path) -> None:
    (partial / "gone").symlink_to("nowhere")


def circle(partial: Path) -> None:
    (partial / "round").symlink_to("round")


def test_directories_nested_without_end_do_not_end_a_collection(tmp_path: Path) -> None:
    partials = [tmp_path / f".{name}.0123abcd.nnx-partial" for name in "ab"]
    for partial in partials:
        partial.mkdir()
    deep(partials[0])
    try:
        collected = collect_garbage(tmp_path, min_age=0)
        assert partials[1] in {Path(item.path) for item in collected.removed}
        assert len(collected.failed) + len(collected.removed) == 2
    finally:
        subprocess.run(["rm", "-rf", str(partials[0])], check=True)


@pytest.mark.parametrize("odd", [dangling, circle])
def test_one_odd_entry_does_not_end_a_collection(tmp_path: Path, odd: Callable[[Path], None]) -> None:
    partials = [tmp_path / f".{name}.0123abcd.nnx-partial" for name in "ab"]
    for partial in partials:
        partial.mkdir()
    odd(partials[0])
    path = save(tmp_path / "z.ckpt")
    unfinished = path / SAVES[0]
    unfinished.mkdir()
    age(*partials, unfinished)
    assert removed(tmp_path) == {*(partial.name for partial in partials), SAVES[0]}


def test_what_vanishes_while_it_is_looked_at_does_not_end_a_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partials = [tmp_path / f".{name}.0123abcd.nnx-partial" for name in "ab"]
    for partial in partials:
        partial.mkdir()
        (partial / "part").write_bytes(b"x")
        age(partial)
    listed = os.scandir

    def vanishing(path: str | os.PathLike[str]) -> object:
        found = listed(path)
        if path == str(partials[0]):
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(os, "scandir", vanishing)
    assert partials[1].name in removed(tmp_path)
    assert not any(partial.exists() for partial in partials)


def test_a_failure_at_one_place_is_noted_and_the_others_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [save(tmp_path / name) / SAVES[0] for name in ("a.ckpt", "b.ckpt")]
    for unfinished in paths:
        unfinished.mkdir()
    age(*paths)
    listed = os.listdir

    def failing(path: str | os.PathLike[str]) -> list[str]:
        if os.fspath(path) == str(paths[0]):
            raise OSError(5, "planted")
        return listed(path)

    monkeypatch.setattr(os, "listdir", failing)
    collected = collect_garbage(tmp_path)
    assert [item.path for item in collected.failed] == [str(paths[0])]
    assert "Input/output error" in collected.failed[0].why
    assert [item.path for item in collected.removed] == [str(paths[1])]


def test_what_only_ends_like_a_partial_conversion_is_not_ours(tmp_path: Path) -> None:
    notes = tmp_path / "notes.nnx-partial"
    notes.write_text("the user's")
    assert removed(tmp_path, min_age=0) == set()
    assert notes.exists()


@pytest.mark.parametrize("content", ['{"name": "an app", "icons": []}', "", '{\n "digest": "sha256:0123"}'])
def test_another_programs_manifest_is_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    (tmp_path / "index.html").write_text("<html>")
    with pytest.raises(CheckpointError, match="belongs to another program"):
        save(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == content


@pytest.mark.parametrize(
    "harm",
    [lambda raw: b"", lambda raw: raw[:40], lambda raw: raw.replace(b"digest", b"dugest"), lambda raw: b"x"],
)
def test_a_damaged_checkpoint_of_ours_can_be_saved_over(
    tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    path = save(tmp_path / "a.ckpt")
    (path / MANIFEST).write_bytes(harm((path / MANIFEST).read_bytes()))
    with pytest.raises(CheckpointError, match=r"damaged|not the manifest"):
        nnx_checkpoint.open_checkpoint(path)
    assert nnx_checkpoint.open_checkpoint(save(path)).read("w").tolist() == [1, 1, 1]

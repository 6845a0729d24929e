"""Tests of ``nnx ckpt ls`` and ``nnx ckpt gc``."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import nnx_checkpoint as storage
from jobs.remote_jobs import s3_server
from nnx_base.shard import shard_of
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.reading.survey import PARTIAL
from nnx_checkpoint.storage.locations import LocalPlace, place_of
from nnx_checkpoint.writing.collecting import collect_garbage
from nnx_core.errors import CheckpointError


def save(path: Path | str, step: int = 1, keep_previous: int = 0) -> str:
    """Save something; returns the id of the save."""
    storage.save(
        path,
        tensors={"model.w": shard_of(torch.full((5,), float(step)))},
        objects={"trainer": {"epoch": 0, "global_step": step}},
        keep_previous=keep_previous,
    )
    return storage.open_native(path).manifest.save_id


def invoke(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def listed(path: Path | str) -> dict[str, dict[str, Any]]:
    rows = json.loads(invoke("ls", path, "--json").stdout)["checkpoints"]
    return {row["path"].removeprefix(str(path)).lstrip("/"): row for row in rows}


def interrupt(path: Path, *, complete: bool = False) -> Path:
    """Leave the files of a killed save; with `complete`, of one killed just before its commit."""
    source = path if (path / "manifest.json").exists() else None
    directory = path / "20990101T000000.000000-0123abcd"
    directory.mkdir(parents=True)
    (directory / "r00000.safetensors").write_bytes(b"x" * 100)
    if complete and source is not None:
        shutil.copy(source / "manifest.json", directory)
    age(directory)
    return directory


def age(path: Path) -> None:
    """Let two hours go by since anything in it changed."""
    then = time.time() - 7200
    for inner in (path, *path.rglob("*")):
        os.utime(inner, (then, then))


# --- ls -------------------------------------------------------------------------------------------


def test_ls_finds_what_is_there_at_any_depth(tmp_path: Path) -> None:
    save(tmp_path / "a" / "b" / "last.ckpt", 7)
    save(tmp_path / "first.ckpt", 3)
    (tmp_path / "a" / "notes.txt").write_text("nothing")
    (tmp_path / ".git").mkdir()
    save(tmp_path / ".git" / "hidden.ckpt")
    torch.save({"state_dict": {"w": torch.ones(3)}, "epoch": 4, "global_step": 5}, tmp_path / "a" / "x.ckpt")
    found = listed(tmp_path)
    assert sorted(found) == ["a/b/last.ckpt", "a/x.ckpt", "first.ckpt"]
    assert {name: (row["format"], row["step"], row["state"]) for name, row in found.items()} == {
        "a/b/last.ckpt": ("nnx", 7, "whole"),
        "first.ckpt": ("nnx", 3, "whole"),
        "a/x.ckpt": ("lightning", 5, "unchecked"),
    }
    assert found["a/x.ckpt"]["epoch"] == 4
    assert found["a/x.ckpt"]["bytes"] == (tmp_path / "a" / "x.ckpt").stat().st_size
    lines = [line.split() for line in invoke("ls", tmp_path).stdout.splitlines()]
    assert lines[0] == ["CHECKPOINT", "FORMAT", "EPOCH", "STEP", "SIZE", "CREATED", "STATE"]
    assert lines[-1][:4] == ["first.ckpt", "nnx", "0", "3"]
    assert lines[-1][-1] == "whole"


def test_ls_of_one_checkpoint_lists_it(tmp_path: Path) -> None:
    save(tmp_path / "one.ckpt", 2)
    assert list(listed(tmp_path / "one.ckpt")) == [""]
    assert "one.ckpt" in invoke("ls", tmp_path / "one.ckpt").stdout


def test_ls_shows_earlier_saves_and_interrupted_ones(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    ids = [save(path, step, keep_previous=2) for step in (1, 2, 3)]
    interrupted = interrupt(path)
    (row,) = listed(tmp_path).values()
    assert (row["step"], row["state"]) == (3, "whole")
    assert [(save["path"], save["step"], save["state"]) for save in row["previous"]] == [
        (str(interrupted), None, "interrupted"),
        (str(path / ids[1]), 2, "whole"),
        (str(path / ids[0]), 1, "whole"),
    ]
    assert f"  save {ids[0]}" in invoke("ls", tmp_path).stdout


def test_ls_tells_what_is_wrong(tmp_path: Path) -> None:
    for name in ("missing", "manifest", "objects"):
        save(tmp_path / name)
    next((tmp_path / "missing").rglob("*.safetensors")).unlink()
    (tmp_path / "manifest" / "manifest.json").write_text("{}")
    objects = next((tmp_path / "objects").rglob("objects.json"))
    objects.write_bytes(objects.read_bytes()[::-1])
    interrupt(tmp_path / "never")
    (tmp_path / f".x.0123abcd{PARTIAL}").mkdir()
    (tmp_path / "bad.ckpt").write_bytes(b"PK\\x03\\x04 but no archive")
    states = {name: (row["state"], row["detail"]) for name, row in listed(tmp_path).items()}
    assert states["missing"][0] == "incomplete"
    assert "r00000.safetensors' is missing" in states["missing"][1]
    assert states["manifest"][0] == "damaged"
    assert states["objects"][0] == "damaged"
    assert "do not match their digest" in states["objects"][1]
    assert states["never"] == ("interrupted", "its first save was never committed")
    assert states[f".x.0123abcd{PARTIAL}"][0] == "unfinished"
    assert states.get("bad.ckpt", ("damaged", ""))[0] == "damaged"


def test_ls_follows_links_to_checkpoints_but_not_in_circles(tmp_path: Path) -> None:
    save(tmp_path / "real.ckpt")
    (tmp_path / "last.ckpt").symlink_to("real.ckpt")
    (tmp_path / "circle").symlink_to(tmp_path)
    found = listed(tmp_path)
    assert sorted(found) == ["last.ckpt", "real.ckpt"]
    assert found["last.ckpt"]["detail"] == "link to real.ckpt"


def test_ls_of_an_empty_directory_says_so(tmp_path: Path) -> None:
    result = invoke("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No checkpoint found below" in result.stderr


def test_urls_are_listed_inspected_compared_and_verified() -> None:
    import fsspec

    root = "memory://listing"
    save(f"{root}/a.ckpt", 3)
    save(f"{root}/deep/b.ckpt", 3)
    try:
        assert sorted(listed(root)) == ["a.ckpt", "deep/b.ckpt"]
        assert json.loads(invoke("inspect", f"{root}/a.ckpt", "--json").stdout)["step"] == 3
        assert invoke("verify", f"{root}/a.ckpt").exit_code == 0
        assert invoke("diff", f"{root}/a.ckpt", f"{root}/deep/b.ckpt").exit_code == 0
        assert json.loads(invoke("gc", root, "--json").stdout)["removed"] == []
    finally:
        fsspec.filesystem("memory").rm("/listing", recursive=True)


@pytest.mark.full
def test_every_verb_works_on_an_object_store(tmp_path: Path) -> None:
    with s3_server():
        root = "s3://bucket/runs"
        for step in (1, 2):
            save(f"{root}/deep/last.ckpt", step, keep_previous=1)
        save(f"{root}/other.ckpt", 1)
        found = listed(root)
        assert {name: row["step"] for name, row in found.items()} == {"deep/last.ckpt": 2, "other.ckpt": 1}
        assert [row["step"] for row in found["deep/last.ckpt"]["previous"]] == [1]
        for verb in ("inspect", "verify"):
            assert invoke(verb, f"{root}/other.ckpt").exit_code == 0
        assert invoke("merge", f"{root}/other.ckpt", tmp_path / "one.ckpt").exit_code == 0
        assert invoke("diff", f"{root}/other.ckpt", tmp_path / "one.ckpt").exit_code == 0
        assert invoke("diff", f"{root}/other.ckpt", f"{root}/deep/last.ckpt").exit_code == 1
        convert = invoke("convert", tmp_path / "one.ckpt", f"{root}/back.ckpt", "--to", "nnx")
        assert convert.exit_code == 0
        assert invoke("diff", f"{root}/back.ckpt", f"{root}/other.ckpt").exit_code == 0
        removed = json.loads(invoke("gc", root, "--keep-previous", 0, "--json").stdout)["removed"]
        assert [item["kind"] for item in removed] == ["previous save"]
        assert listed(root)["deep/last.ckpt"]["previous"] == []
        assert storage.verify(f"{root}/deep/last.ckpt") == []
        with pytest.raises(CheckpointError, match="there is nothing at"):
            invoke("ls", "s3://bucket/nothing")


# --- gc -------------------------------------------------------------------------------------------


def test_gc_removes_what_killed_saves_left_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run" / "last.ckpt"
    previous = save(path, 1, keep_previous=1)
    committed = save(path, 2, keep_previous=1)
    orphan = interrupt(path)
    temporary = path / f".manifest.json.{committed}.tmp"
    temporary.write_text("{}")
    age(temporary)
    (path / "mine.txt").write_text("the user's")
    result = invoke("gc", tmp_path, "--dry-run", "--json")
    content = json.loads(result.stdout)
    assert content["dry_run"] is True
    assert {(item["path"], item["kind"]) for item in content["removed"]} == {
        (str(orphan), "unfinished save"),
        (str(temporary), "temporary manifest"),
    }
    assert content["bytes"] == 102
    assert orphan.exists() and temporary.exists()
    assert invoke("gc", tmp_path).stdout.splitlines()[-1] == "2 removed, 102 B."
    assert sorted(entry.name for entry in path.iterdir()) == sorted(
        [committed, "manifest.json", "mine.txt", previous]
    )
    assert storage.verify(path) == []
    assert invoke("gc", tmp_path).stdout == "0 removed, 0 B.\n"


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_gc_keeps_as_many_earlier_saves_as_asked(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "last.ckpt"
    ids = [save(path, step, keep_previous=9) for step in range(4)]
    invoke("gc", path, "--keep-previous", keep)
    left = [name for name in ids if (path / name).exists()]
    assert left == ids[max(0, 3 - keep) :]
    assert storage.open_checkpoint(path).objects["trainer"]["global_step"] == 3


def test_gc_never_touches_the_committed_save_even_if_a_newer_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    committed = save(path, 1)
    newer = interrupt(path, complete=True)
    invoke("gc", path)
    assert newer.exists(), "it is complete, and nobody said how many to keep"
    invoke("gc", path, "--keep-previous", 0)
    assert not newer.exists()
    assert (path / committed).exists()


def test_gc_leaves_a_save_in_progress_alone(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path)
    running = interrupt(path)
    lock = LocalPlace(path).lock()
    assert lock is not None
    result = invoke("gc", path)
    assert running.exists()
    assert "another run is saving to it now" in result.stderr
    assert result.exit_code == 0
    lock.release()
    invoke("gc", path)
    assert not running.exists()
    save(path)  # and the lock is free again


def test_gc_removes_a_first_save_that_was_interrupted(tmp_path: Path) -> None:
    interrupt(tmp_path / "never.ckpt")
    assert invoke("gc", tmp_path, "--dry-run").stdout.endswith("1 would be removed, 100 B.\n")
    assert (tmp_path / "never.ckpt").exists()
    invoke("gc", tmp_path)
    assert not (tmp_path / "never.ckpt").exists()


def test_gc_keeps_complete_saves_of_a_checkpoint_that_lost_its_manifest(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    only = save(path)
    (path / "manifest.json").unlink()
    result = invoke("gc", path, "--keep-previous", 0)
    assert (path / only).exists()
    assert "copy this save's to restore it" in result.stderr
    shutil.copy(path / only / "manifest.json", path)
    assert storage.verify(path) == []


def test_gc_touches_nothing_where_the_manifest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path)
    orphan = interrupt(path)
    raw = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(raw.replace(b'"version"', b'"versiom"'))
    result = invoke("gc", path)
    assert orphan.exists()
    assert "is damaged" in result.stderr


def test_gc_removes_conversions_that_nobody_works_on(tmp_path: Path) -> None:
    old, new = tmp_path / f".a.0123abcd{PARTIAL}", tmp_path / "deep" / f".b.0123abcd{PARTIAL}"
    new.mkdir(parents=True)
    (new / "part").write_bytes(b"x" * 50)
    old.write_bytes(b"x" * 20)
    then = time.time() - 7200
    os.utime(old, (then, then))
    os.utime(new, (then, then))  # but not what is in it
    result = invoke("gc", tmp_path)
    assert not old.exists()
    assert new.exists()
    assert "a conversion may be writing it" in result.stderr
    assert invoke("gc", tmp_path, "--older-than", 0).stdout.endswith("1 removed, 50 B.\n")
    assert not new.exists()


def test_gc_where_there_are_no_locks_spares_what_is_newer_than_the_commit() -> None:
    import fsspec

    root = "memory://collecting/a.ckpt"
    store = fsspec.filesystem("memory")
    try:
        committed = save(root)
        for save_id in ("20000101T000000.000000-00000000", "20990101T000000.000000-00000000"):
            store.pipe(f"/collecting/a.ckpt/{save_id}/r00000.safetensors", b"xy")
        collected = collect_garbage("memory://collecting")
        assert [(Path(item.path).name, item.nbytes) for item in collected.removed] == [
            ("20000101T000000.000000-00000000", 2)
        ]
        assert [Path(item.path).name for item in collected.spared] == ["20990101T000000.000000-00000000"]
        assert "no locks" in collected.spared[0].why
        assert place_of(root).names() == sorted(
            ["20990101T000000.000000-00000000", committed, "manifest.json"]
        )
    finally:
        store.rm("/collecting", recursive=True)


def test_gc_says_what_it_could_not_remove_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path)
    interrupt(path)
    temporary = path / ".manifest.json.20990101T000000.000000-0123abcd.tmp"
    temporary.write_text("{}")
    age(temporary)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    result = invoke("gc", path)
    assert result.exit_code == 1
    assert "cannot remove" in result.stderr
    assert not temporary.exists()
    save(path)  # the lock was given back

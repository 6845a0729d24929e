"""A damaged checkpoint or a failing rank gives one clear error on every rank, and no saved file is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.damage_jobs import resume_error, save_on_a_full_disk
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.training import Run, train

RUN = Run(options={"min_num_params": 100}, steps=2)


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "good.ckpt"
    pool.run(train, replace(RUN, save=str(path)), world_size=2)
    return path


def _file(checkpoint: Path, name: str) -> Path:
    return next(checkpoint.glob(f"*/{name}"))


def _flip(checkpoint: Path) -> None:
    file = _file(checkpoint, "r00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def _truncate(checkpoint: Path) -> None:
    file = _file(checkpoint, "r00001.safetensors")
    file.write_bytes(file.read_bytes()[:-10])


def _remove(checkpoint: Path) -> None:
    _file(checkpoint, "r00001.safetensors").unlink()


def _tear(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])


def _empty(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def _another_index(checkpoint: Path) -> None:
    index = _file(checkpoint, "index.json")
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content) + " ")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flip, ["r00001.safetensors"]),
        (_truncate, ["r00001.safetensors"]),
        (_remove, ["r00001.safetensors"]),
        (_tear, ["manifest.json"]),
        (_empty, ["manifest"]),
        (_another_index, ["index.json"]),
    ],
    ids=["flipped bit", "truncated", "missing file", "torn manifest", "no manifest", "changed index"],
)
def test_damage_is_named_on_every_rank(
    pool: WorkerPool, saved: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    copy = tmp_path / "bad.ckpt"
    shutil.copytree(saved, copy)
    damage(copy)
    errors = pool.run(resume_error, replace(RUN, resume=str(copy), steps=3), world_size=2, timeout=60)
    for error in errors:
        assert error.startswith("CheckpointError:"), error
        assert all(word in error for word in [*words, "bad.ckpt"]), error


def test_an_intact_checkpoint_gives_no_error(pool: WorkerPool, saved: Path) -> None:
    run = replace(RUN, resume=str(saved), steps=3)
    assert pool.run(resume_error, run, world_size=2) == ["no error"] * 2


def test_a_path_where_nothing_is_gives_one_error(pool: WorkerPool, tmp_path: Path) -> None:
    run = replace(RUN, resume=str(tmp_path / "nowhere.ckpt"))
    for error in pool.run(resume_error, run, world_size=2, timeout=60):
        assert error.startswith("CheckpointError:") and "nowhere.ckpt" in error


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_keeps_the_old_checkpoint(
    pool: WorkerPool, tmp_path: Path, rank: int
) -> None:
    path = tmp_path / "last.ckpt"
    results = pool.run(save_on_a_full_disk, replace(RUN, save=str(path)), rank, world_size=2, timeout=60)
    for errors, step, left in results:
        assert len(errors) == 1
        assert errors[0].startswith("CheckpointError:") and "last.ckpt" in errors[0]
        assert step == 1
        assert len(left) == 2 and "manifest.json" in left

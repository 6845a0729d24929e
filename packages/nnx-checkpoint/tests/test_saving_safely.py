"""Saves that are interrupted, that create parent directories, and that have an impossible destination."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from nnx_base.errors import CheckpointError
from nnx_base.shard import shard_of
from nnx_checkpoint.format.manifest import MANIFEST, load_json
from nnx_checkpoint.reading import slabs, verification


def save(path: Path, value: float = 1) -> Path:
    nnx_checkpoint.save(path, tensors={"w": shard_of(torch.full((3,), value))}, objects={})
    return path


@pytest.fixture
def _keyboard_interrupts() -> Iterator[None]:
    """Set Python's handler of SIGINT, which a shell that starts the tests in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_keyboard_interrupts")
@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("is_first", [True, False])
def test_ctrl_c_during_a_save_leaves_nothing_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, is_first: bool
) -> None:
    path, real, calls = tmp_path / "runs" / "a.ckpt", os.fsync, 0
    if not is_first:
        save(path, 1)

    def interrupted(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGINT)
        real(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    try:
        save(path, 2)
    except KeyboardInterrupt:
        stopped = True
    else:
        stopped = False
    monkeypatch.undo()
    assert stopped is (calls >= call)
    if (path / MANIFEST).exists():
        found = nnx_checkpoint.open_checkpoint(path).read("w").tolist()
        assert found in ([[1.0] * 3, [2.0] * 3] if not is_first else [[2.0] * 3])
        committed = nnx_checkpoint.open_native(path).manifest.save_id
        kept = {committed, MANIFEST}
        left = {entry.name for entry in path.iterdir()}
        assert left == kept or (found == [2.0] * 3 and kept < left), left
    else:
        assert not path.exists()
    save(path, 3)


def test_every_new_parent_of_a_first_save_is_forced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: set[Path] = set()
    real = os.fsync

    def noted(fd: int) -> None:
        forced.add(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    save(tmp_path / "a" / "b" / "c.ckpt")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c.ckpt"} <= forced
    forced.clear()
    nnx_checkpoint.merge(tmp_path / "a" / "b" / "c.ckpt", tmp_path / "x" / "y" / "one.ckpt")
    assert {tmp_path, tmp_path / "x", tmp_path / "x" / "y"} <= forced


def test_a_target_that_exists_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a.ckpt")
    (tmp_path / "one.ckpt").write_text("the user's")
    (tmp_path / "link.ckpt").symlink_to("nowhere")
    monkeypatch.setattr(slabs, "read_in_order", pytest.fail)
    monkeypatch.setattr("nnx_checkpoint.conversion.convert.open_checkpoint", pytest.fail)
    for write in (nnx_checkpoint.merge, nnx_checkpoint.convert):
        for target in ("one.ckpt", "link.ckpt"):
            with pytest.raises(CheckpointError, match="it exists already"):
                write(path, tmp_path / target)
    with pytest.raises(CheckpointError, match="a broken link"):
        save(tmp_path / "link.ckpt")


@pytest.mark.parametrize("name", ["x.safetensors", "deep/x.ckpt", "../a.ckpt/x.ckpt"])
def test_nothing_is_written_into_what_it_is_made_of(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "a.ckpt")
    before = sorted(path.rglob("*"))
    for write in (nnx_checkpoint.merge, nnx_checkpoint.convert):
        with pytest.raises(CheckpointError, match="it is inside the source checkpoint"):
            write(path, path / name)
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_verifying_without_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = save(tmp_path / "a.ckpt")

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(verification, "_ReadAhead", fail)
    with pytest.raises(CheckpointError, match="out of memory"):
        nnx_checkpoint.verify(path)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "[1, 1e999]", "NaN", "Infinity"])
def test_json_holds_finite_numbers_only(text: str) -> None:
    with pytest.raises(ValueError, match=r"beyond the numbers|not a JSON number"):
        load_json(text.encode())
    assert load_json(b"[1e300, 1.5, -0.0]") == [1e300, 1.5, 0.0]

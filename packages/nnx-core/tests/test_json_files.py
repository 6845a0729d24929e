"""Cache files between runs are never required, and never half written."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnx_core.json_files import cache_directory, read_json, write_json


def test_it_lies_below_the_directory_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("NNX_CACHE_DIR", raising=False)
    assert cache_directory("engine", "measured") == tmp_path / "xdg" / "nnx" / "engine" / "measured"
    monkeypatch.setenv("NNX_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory("engine") == tmp_path / "own" / "engine"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rates.json"
    write_json(path, {"rates": [1, 2.5]})
    write_json(path, {"rates": [3]})
    assert read_json(path) == {"rates": [3]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, b"", b'{"rates": ', b"\xff\xfe"])
def test_a_file_that_is_missing_or_damaged_counts_as_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_bytes(content)
    assert read_json(path) is None


def test_a_directory_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("", encoding="utf-8")
    write_json(occupied / "rates.json", {})
    assert occupied.read_text(encoding="utf-8") == ""


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.json"
    write_json(path, {"rates": 1})

    def full(temporary: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    write_json(path, {"rates": 2})
    assert read_json(path) == {"rates": 1}
    assert list(tmp_path.iterdir()) == [path]

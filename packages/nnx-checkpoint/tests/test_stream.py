"""The stream that writes large files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_checkpoint.storage import streams
from nnx_checkpoint.storage.files import read_exactly
from nnx_checkpoint.storage.streams import DirectFile, StreamWriter
from nnx_core.errors import CheckpointError


def write(path: Path, parts: list[bytes]) -> None:
    with StreamWriter(DirectFile(path), size=sum(map(len, parts))) as writer:
        for part in parts:
            writer.append(memoryview(part))
        writer.finish()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=12))
def test_parts_of_any_length_end_up_one_after_the_other(lengths: list[int]) -> None:
    import tempfile
    from unittest import mock

    parts = [os.urandom(length) for length in lengths]
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(streams, "_BUFFER", 16384):
        streams._spare.clear()
        write(Path(directory) / "file", parts)
        assert (Path(directory) / "file").read_bytes() == b"".join(parts)
    streams._spare.clear()


def test_what_was_appended_is_returned_from_where_it_will_be_written(tmp_path: Path) -> None:
    with StreamWriter(DirectFile(tmp_path / "file"), size=5) as writer:
        assert bytes(writer.append(memoryview(b"12345"))) == b"12345"
        writer.finish()


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(CheckpointError, match=r"cannot write '.*file': File exists. Let only one run save"):
        DirectFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"


def test_a_file_system_without_direct_io_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real, refused = fcntl.fcntl, []

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "planted")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write(tmp_path / "file", [b"x" * 5000])
    monkeypatch.undo()
    assert refused
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


def test_a_file_system_that_refuses_direct_io_at_the_write_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real, refused = os.pwrite, []

    def refuse(fd: int, data: Any, position: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "planted")
        return real(fd, data, position)

    monkeypatch.setattr(os, "pwrite", refuse)
    write(tmp_path / "file", [b"x" * 5000])
    monkeypatch.undo()
    assert len(refused) == 1
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


def test_an_error_of_the_writing_thread_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(CheckpointError, match=r"cannot write '.*file': No space left on device. Free space"):
        write(tmp_path / "file", [b"x" * 5000])
    streams._spare.clear()
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path / "more", [bytes(streams._BUFFER)] * 8)


def test_buffers_are_kept_for_the_next_save_and_no_more_than_one_set(tmp_path: Path) -> None:
    streams._spare.clear()
    for number in range(3):
        write(tmp_path / str(number), [b"x"])
    assert len(streams._spare) == streams._BUFFERS


def test_a_forked_process_does_not_share_the_buffers(tmp_path: Path) -> None:
    write(tmp_path / "file", [b"parent"])
    for buffer in streams._spare:
        buffer[:6] = b"parent"
    child = os.fork()
    if child == 0:
        for buffer in streams._spare:
            buffer[:6] = b"child!"
        os._exit(0)
    os.waitpid(child, 0)
    assert [buffer[:6] for buffer in streams._spare] == [b"parent"] * streams._BUFFERS


def test_memory_file_systems_work() -> None:
    path = Path(f"/dev/shm/nnx-test-{os.getpid()}")
    try:
        write(path, [b"y" * 10_001])
        assert path.read_bytes() == b"y" * 10_001
    finally:
        path.unlink(missing_ok=True)


def test_reading_past_the_end_says_where_the_file_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"file' is truncated: it ends at byte 3, 5 were expected"):
        read_exactly(tmp_path / "file", 4, start=1)

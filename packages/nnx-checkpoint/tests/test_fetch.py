"""Fetched regions are exact in every shape, cost few bytes, and work with and without checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nnx_checkpoint
from nnx_base.shard import Box, shard_of
from nnx_checkpoint.format.index import Piece, TensorEntry
from nnx_checkpoint.format.rankfile import ranges_of
from nnx_checkpoint.reading import fetching
from nnx_checkpoint.reading.fetching import Fetcher, PlainFiles, Wanted
from nnx_checkpoint.storage.files import FileReader
from nnx_core.errors import CheckpointError

HEADER = 24


def plain_file(path: Path, tensor: Tensor) -> TensorEntry:
    """A file of another program: some header, then one tensor."""
    path.write_bytes(b"h" * HEADER + tensor.numpy().tobytes())
    nbytes = tensor.numel() * tensor.element_size()
    piece = Piece(Box.whole(tensor.shape), path.name, HEADER, nbytes)
    return TensorEntry("w", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), (piece,))


@st.composite
def regions(draw: Any) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    offset, size = [], []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        offset.append(start)
        size.append(draw(st.integers(1, extent - start)))
    return shape, Box(tuple(offset), tuple(size))


@settings(max_examples=150, deadline=None)
@given(regions(), st.integers(0, 200), st.sampled_from([1, 8]))
def test_the_ranges_of_a_region_hold_its_bytes_and_only_small_gaps(
    case: tuple[tuple[int, ...], Box], gap: int, itemsize: int
) -> None:
    shape, region = case
    wanted = torch.zeros(shape, dtype=torch.bool)
    wanted[region.slices] = True
    expected = wanted.reshape(-1).repeat_interleave(itemsize)
    ranges = ranges_of(region, shape, itemsize, gap)
    starts = list(ranges.starts())
    assert len(starts) == ranges.count
    assert ranges.wanted * ranges.count == region.numel * itemsize
    held = torch.zeros_like(expected)
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        held[start : start + ranges.span] = True
        assert following is None or following - (start + ranges.span) > gap
        inside = expected[start : start + ranges.span].int()
        changes = (inside[1:] - inside[:-1]).nonzero()[:, 0].tolist()
        assert inside[0] == inside[-1] == 1
        assert all(up - down <= gap for down, up in zip(changes[::2], changes[1::2], strict=True))
    assert bool((held | ~expected).all())


@settings(max_examples=60, deadline=None)
@given(regions(), st.sampled_from([0, 40]), st.booleans(), st.sampled_from([16, 64, 1 << 20]))
def test_any_region_of_a_plain_file_arrives_exactly(
    case: tuple[tuple[int, ...], Box], gap: int, strided: bool, limit: int
) -> None:
    import tempfile
    from unittest import mock

    shape, region = case
    tensor = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int64).reshape(shape)
    into = torch.zeros((*region.size, 2), dtype=torch.int64)[..., 0]
    if not strided:
        into = into.contiguous()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(FileReader, "gap", gap),
        mock.patch.multiple(fetching, _SCRATCH=limit, _TASK=4 * limit),
    ):
        entry = plain_file(Path(folder) / "file", tensor)
        Fetcher(PlainFiles(folder)).fetch([Wanted(entry, region, into)])
    assert torch.equal(into, tensor[region.slices])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("limit", [1 << 12, 1 << 15, 4 << 20])
def test_any_region_of_a_verified_file_arrives_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, strided: bool
) -> None:
    monkeypatch.setattr(fetching, "_SCRATCH", limit)
    monkeypatch.setattr(fetching, "_TASK", 4 * limit)
    tensor = torch.arange(7 * 130 * 600).reshape(7, 130, 600)
    nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard_of(tensor)}, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    for region in (
        Box((0, 0, 0), (7, 130, 600)),
        Box((1, 3, 5), (5, 100, 400)),
        Box((0, 0, 599), (7, 130, 1)),
        Box((6, 0, 0), (1, 130, 600)),
        Box((2, 129, 0), (4, 1, 600)),
        Box((3, 5, 7), (1, 1, 1)),
    ):
        into = torch.zeros((*region.size, 2), dtype=torch.int64)[..., 0]
        view = into if strided else into.contiguous()
        Fetcher(checkpoint._source).fetch([Wanted(checkpoint.entry("w"), region, view)])  # type: ignore[attr-defined]
        assert torch.equal(view, tensor[region.slices]), region


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    real = FileReader.read_into

    def counted(self: FileReader, position: int, target: memoryview) -> None:
        read.append(len(target))
        real(self, position, target)

    monkeypatch.setattr(FileReader, "read_into", counted)
    return read


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_without_checksums_no_more_is_read_than_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, dim: int
) -> None:
    tensor = torch.randn(512, 16384)
    entry = plain_file(tmp_path / "file", tensor)
    read = count_bytes(monkeypatch)
    parts = tensor.chunk(ranks, dim)
    offset = 0
    for part in parts:
        into = torch.empty_like(part).contiguous()
        start = (offset, 0) if dim == 0 else (0, offset)
        Fetcher(PlainFiles(str(tmp_path))).fetch([Wanted(entry, Box(start, tuple(part.shape)), into)])
        assert torch.equal(into, part)
        offset += part.shape[dim]
    assert sum(read) == entry.nbytes


def test_gaps_of_less_than_a_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 64)
    entry = plain_file(tmp_path / "file", tensor)
    read = count_bytes(monkeypatch)
    into = torch.empty(1000, 16)
    Fetcher(PlainFiles(str(tmp_path))).fetch([Wanted(entry, Box((0, 0), (1000, 16)), into)])
    assert torch.equal(into, tensor[:, :16])
    assert len(read) == 1


def test_with_checksums_whole_blocks_are_read_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row is 4 MiB, that is 16 blocks, of which a quarter is four.
    tensor = torch.randint(0, 100, (6, 1 << 19))
    nnx_checkpoint.save(tmp_path / "a", tensors={"w": shard_of(tensor)}, objects={})
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    read = count_bytes(monkeypatch)
    quarter = Box((0, 1 << 17), (6, 1 << 17))
    assert torch.equal(checkpoint.read("w", quarter), tensor[quarter.slices])
    assert sum(read) == quarter.numel * 8
    read.clear()
    shifted = Box((0, (1 << 17) + 1), (6, 1 << 17))
    assert torch.equal(checkpoint.read("w", shifted), tensor[shifted.slices])
    assert sum(read) == quarter.numel * 8 + 6 * (1 << 18)


def test_a_plain_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    entry = plain_file(tmp_path / "file", torch.arange(100.0))
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(HEADER + 200)
    with pytest.raises(CheckpointError, match=r"file' is truncated: it ends at byte 224, 424 were expected"):
        Fetcher(PlainFiles(str(tmp_path))).fetch([Wanted(entry, Box.whole((100,)), torch.zeros(100))])


def test_a_plain_file_that_is_missing_is_named(tmp_path: Path) -> None:
    entry = plain_file(tmp_path / "file", torch.arange(100.0))
    (tmp_path / "file").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read '.*/file': No such file"):
        Fetcher(PlainFiles(str(tmp_path))).fetch([Wanted(entry, Box.whole((100,)), torch.zeros(100))])


def test_plain_files_may_be_named_by_absolute_paths(tmp_path: Path) -> None:
    tensor = torch.arange(10.0)
    entry = plain_file(tmp_path / "file", tensor)
    piece = Piece(entry.pieces[0].box, str(tmp_path / "file"), HEADER, entry.nbytes)
    absolute = TensorEntry("w", entry.shape, entry.dtype_name, (piece,))
    into = torch.zeros(10)
    Fetcher(PlainFiles()).fetch([Wanted(absolute, Box.whole((10,)), into)])
    assert torch.equal(into, tensor)

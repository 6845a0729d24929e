"""Plans and indexes by group have the same boxes as a list of all boxes, at a cost of ranks plus tensors."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_checkpoint
from nnx_base.box import (
    Box,
    box_of_grid,
    boxes_of_grid,
    boxes_of_range,
    find_fault,
    grid_of,
    numels_of_grid,
    overlapping_of_grid,
)
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.format import rankfile
from nnx_checkpoint.format.index import Index, decode_index, encode_index
from nnx_checkpoint.format.manifest import FileEntry, Manifest, decode_manifest, encode_manifest
from nnx_checkpoint.format.rankfile_header import Entry, Offsets, file_order, find_offsets
from nnx_checkpoint.writing.description import Description, describe, pack, requests, unpack
from nnx_checkpoint.writing.plan import Mode, make_plan, select
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError
from nnx_test_helpers.repository import from_repository

SAVE_ID = "20260102T030405.678901-0123abcd"
BLOCK = 16
World = Sequence[dict[str, Shard]]


def shard(shape: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype = torch.float32) -> Shard:
    """A shard whose elements are numbered through the whole tensor, as far as the dtype can count."""
    if any(o + n > full for box in boxes for o, n, full in zip(box.offset, box.size, shape, strict=True)):
        views = [torch.zeros(box.size, dtype=dtype) for box in boxes]
    else:
        views = [numbered(tuple(shape), dtype)[box.slices] for box in boxes]
    return Shard(tuple(shape), dtype, tuple(boxes), tuple(views))


@cache
def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def holds_its_own_numbers(entry: Entry, view: torch.Tensor) -> bool:
    return torch.equal(view, numbered(entry.shape, view.dtype)[entry.box.slices])


def chunked(extent: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of a part, as torch.chunk cuts."""
    step = -(-extent // parts)
    start = min(part * step, extent)
    return start, min(start + step, extent) - start


def slab(shape: Sequence[int], dim: int, parts: int, part: int) -> list[Box]:
    start, length = chunked(shape[dim], parts, part)
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    size = tuple(length if d == dim else extent for d, extent in enumerate(shape))
    return [Box(offset, size)] if length else []


def tile(shape: Sequence[int], rows: tuple[int, int], columns: tuple[int, int]) -> list[Box]:
    """The part of a tensor that is cut along two dims."""
    (first,) = slab(shape, 0, *rows) or [None]
    (second,) = slab(shape, 1, *columns) or [None]
    common = first.intersection(second) if first and second else None
    return [common] if common else []


def boxes_on(how: str, shape: Sequence[int], rank: int, size: int) -> list[Box] | None:
    """Return the boxes of a tensor on a rank; None if the rank does not know the tensor."""
    if how == "whole" or not shape:
        return [Box.whole(shape)]
    if how == "first":
        return [Box.whole(shape)] if rank == 0 else None
    if how == "last only":
        return [Box.whole(shape)] if rank == size - 1 else []
    if how == "rows":
        return slab(shape, 0, size, rank)
    if how == "last dim":
        return slab(shape, len(shape) - 1, size, rank)
    if how == "replicated rows":
        return slab(shape, 0, max(1, size // 2), rank % max(1, size // 2))
    if how == "tiles" and len(shape) > 1:
        rows = 2 if size % 2 == 0 else 1
        return tile(shape, (rows, rank % rows), (size // rows, rank // rows))
    start, length = chunked(math.prod(shape), size, rank)
    return boxes_of_range(shape, start, start + length)


HOW = ["whole", "first", "last only", "rows", "last dim", "replicated rows", "tiles", "flat"]
DTYPES = [torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.complex64]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Tensors of few shapes, cut in every way, over up to nine ranks."""
    size = draw(st.integers(1, 9))
    shapes = st.sampled_from([(), (1,), (5,), (16,), (7, 3), (12, 4), (3, 2, 4), (0, 3), (64, 6)])
    tensors = draw(st.lists(st.tuples(shapes, st.sampled_from(HOW), st.sampled_from(DTYPES)), max_size=12))
    world: list[dict[str, Shard]] = [{} for _ in range(size)]
    for number, (shape, how, dtype) in enumerate(tensors):
        for rank in range(size):
            boxes = boxes_on(how, shape, rank, size)
            if boxes is not None:
                world[rank][f"t{number}"] = shard(shape, boxes, dtype)
    return world


@dataclass
class Saved:
    """The result of a save that exchanged only messages."""

    index: Index
    selected: list[list[Entry]]
    raw: bytes
    manifest: Manifest


def converse(world: World) -> list[list[Description]]:
    """Return all descriptions as the coordinator receives them, with only the requested ones."""
    packed = [pack([describe(shards)]) for shards in world]
    heads = [head for head, _ in packed]
    parts = {key: packed[rank][1][key] for rank, keys in enumerate(requests(heads)) for key in keys}
    return unpack(heads, parts)


def save_in_messages(world: World, mode: Mode) -> Saved:
    plan = make_plan(converse(world), mode)
    selected = []
    for shards, rank_plan in zip(world, plan.rank_plans(SAVE_ID), strict=True):
        entries, data = select([describe(shards)], shards, plan.broadcast, rank_plan)
        assert [tuple(view.shape) for view in data] == [entry.box.size for entry in entries]
        assert all(holds_its_own_numbers(entry, view) for entry, view in zip(entries, data, strict=True))
        selected.append([entries[i] for i in file_order(entries)])
    index = plan.index()
    raw = encode_index(index)
    headers = {
        f"r{rank:05d}.safetensors": rankfile._header(entries)
        for rank, entries in enumerate(selected)
        if entries
    }
    assert list(headers) == list(index.files)
    files = {}
    for rank, entries in enumerate(selected):
        if entries:
            header = len(headers[f"r{rank:05d}.safetensors"])
            size = header + sum(entry.nbytes for entry in entries)
            files[f"r{rank:05d}.safetensors"] = FileEntry(size, "0" * 32, header)
            files[f"r{rank:05d}.sums"] = FileEntry(0, "0" * 32, 0)
    manifest = Manifest(SAVE_ID, "", files, block=BLOCK)

    def offsets(file: str) -> Offsets:
        return decoded.read_offsets(file, headers[file], BLOCK)

    decoded = decode_index(raw, manifest, source="index", offsets=offsets)
    return Saved(decoded, selected, raw, manifest)


def listed(saved: Saved) -> dict[tuple[str, Box, str], tuple[int, int]]:
    """Position and first checksum of every box, found by walking through every file."""
    found = {}
    for rank, entries in enumerate(saved.selected):
        file, block = f"r{rank:05d}.safetensors", 0
        position = saved.manifest.files[file].digested if entries else 0
        for entry in entries:
            found[entry.name, entry.box, file] = (position, block)
            position += entry.nbytes
            block += -(-entry.nbytes // BLOCK)
    return found


@settings(max_examples=100, deadline=None)
@given(worlds(), st.sampled_from(["deduped", "sharded"]))
def test_the_index_says_exactly_what_the_ranks_wrote(world: World, mode: Mode) -> None:
    saved = save_in_messages(world, mode)
    expected = listed(saved)
    found = {
        (name, piece.box, piece.file): (piece.start, piece.first_block)
        for name, entry in saved.index.tensors.items()
        for piece in entry.pieces
    }
    assert found.keys() == expected.keys()
    for key, (start, block) in found.items():
        assert start == expected[key][0], key
        assert block == expected[key][1] or key[1].numel == 0, key
    for file in saved.manifest.files:
        if file.endswith(".safetensors"):
            pieces = saved.index.pieces_of(file)
            assert {(name, piece.box, file) for name, piece in pieces} == {
                key for key in expected if key[2] == file
            }
            assert [piece.start for _, piece in pieces] == sorted(piece.start for _, piece in pieces)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(worlds())
def test_every_tensor_is_covered_and_deduped_stores_nothing_twice(world: World) -> None:
    tensors = {name: held for shards in world for name, held in shards.items()}
    stored = save_in_messages(world, "deduped").index.tensors
    assert set(stored) == set(tensors)
    for name, entry in stored.items():
        assert (entry.shape, entry.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert find_fault(entry.shape, [piece.box for piece in entry.pieces]) == ""
    everything = save_in_messages(world, "sharded")
    for rank, shards in enumerate(world):
        kept = {(box.name, box.box) for box in everything.selected[rank]}
        held = {(name, box) for name, one in shards.items() for box in one.boxes}
        assert kept == {item for item in held if item[1].numel or item[1].size == shards[item[0]].shape}


@settings(max_examples=100, deadline=None)
@given(worlds(), st.data())
@pytest.mark.full
def test_looking_up_a_box_finds_what_searching_all_pieces_finds(world: World, data: st.DataObject) -> None:
    saved = save_in_messages(world, "sharded")
    tensors = saved.index.tensors
    for name in tensors:
        entry = tensors[name]
        starts = [data.draw(st.integers(0, max(0, extent - 1))) for extent in entry.shape]
        size = [data.draw(st.integers(0, full - at)) for at, full in zip(starts, entry.shape, strict=True)]
        box = Box(tuple(starts), tuple(size))
        expected = {stored for stored in entry.copies if stored.intersection(box) is not None}
        assert {piece.box for piece in entry.overlapping(box)} == expected
        for own in saved.index.files:
            for piece in entry.overlapping(box, prefer=own):
                copies = entry.copies[piece.box]
                assert piece in copies
                assert piece.file == own or own not in {copy.file for copy in copies}


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), max_size=3), st.data())
def test_boxes_that_are_a_grid_are_known_as_one(dims: list[tuple[int, int]], data: st.DataObject) -> None:
    shape = tuple(extent for extent, _ in dims)
    grid = tuple(-(-extent // parts) for extent, parts in dims)
    boxes = list(boxes_of_grid(shape, grid))
    assert find_fault(shape, boxes) == ""
    assert boxes == sorted(boxes, key=lambda box: box.offset)
    assert [box.numel for box in boxes] == numels_of_grid(shape, grid)
    assert grid_of(shape, boxes) == grid
    assert [box_of_grid(shape, grid, number) for number in range(len(boxes))] == boxes
    offset = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    sizes = (data.draw(st.integers(0, full - at)) for at, full in zip(offset, shape, strict=True))
    wanted = Box(offset, tuple(sizes))
    assert overlapping_of_grid(shape, grid, wanted) == [
        number for number, box in enumerate(boxes) if box.intersection(wanted) is not None
    ]
    missing = data.draw(st.integers(0, len(boxes) - 1))
    assert grid_of(shape, boxes[:missing] + boxes[missing + 1 :]) != grid


# --- cost -----------------------------------------------------------------------------------------


def fsdp(size: int, layers: int) -> World:
    shapes = {"w": (256, 8), "b": (256,), "odd": (100, 8), "few": (3, 5)}
    return [
        {
            f"{layer}.{name}": shard(shape, slab(shape, 0, size, rank))
            for layer in range(layers)
            for name, shape in shapes.items()
        }
        | {f"{layer}.step": shard((), [Box((), ())]) for layer in range(layers)}
        for rank in range(size)
    ]


def test_ranks_send_names_once_and_otherwise_a_few_bytes() -> None:
    world = fsdp(64, 40)
    packed = [pack([describe(shards)]) for shards in world]
    heads = [head for head, _ in packed]
    asked = requests(heads)
    assert [rank for rank, keys in enumerate(asked) for _ in keys] == [0]
    assert max(len(pickle.dumps(head)) for head in heads) < 300


def test_a_mesh_of_two_dims_sends_what_is_cut_otherwise_once() -> None:
    """Half of the tensors of one shape are cut over rows, the others over columns."""
    world = [
        {
            f"{layer}.{name}": shard((64, 64), slab((64, 64), dim, 8, rank))
            for layer in range(200)
            for dim, name in enumerate(("up", "down"))
        }
        for rank in range(8)
    ]
    packed = [pack([describe(shards)]) for shards in world]
    heads = [head for head, _ in packed]
    assert [rank for rank, keys in enumerate(requests(heads)) for _ in keys] == [0] * 2  # catalog, exceptions
    saved = save_in_messages(world, "deduped")
    assert len(saved.index.groups) == 2
    assert all(group.grid is not None for group in saved.index.groups)


@pytest.mark.full
def test_the_index_grows_with_tensors_plus_ranks() -> None:
    few, many = (len(save_in_messages(fsdp(size, 40), "deduped").raw) for size in (4, 64))
    assert many - few < 64 * 2 * 60
    assert len(save_in_messages(fsdp(64, 80), "deduped").raw) - many < 40 * 5 * 40


def test_no_box_is_listed_where_all_are_grids() -> None:
    body = json.loads(save_in_messages(fsdp(24, 3), "deduped").raw)
    assert all("grid" in group for group in body["groups"])
    assert len(body["groups"]) <= 4 + 3


# --- who writes what ------------------------------------------------------------------------------


def loads(saved: Saved) -> list[int]:
    return [sum(box.nbytes for box in boxes) for boxes in saved.selected]


def test_replicas_are_spread_by_bytes_over_the_ranks() -> None:
    replicas = {f"w{i}": shard((10 * (i + 1),), [Box((0,), (10 * (i + 1),))]) for i in range(8)}
    saved = save_in_messages([replicas] * 3, "deduped")
    assert sum(loads(saved)) == 4 * 10 * 36
    assert max(loads(saved)) - min(loads(saved)) <= 40 * 10
    assert save_in_messages([replicas] * 3, "deduped").raw == saved.raw


def test_many_equal_replicas_are_dealt_in_turn() -> None:
    replicas = {f"w{i}": shard((7,), [Box((0,), (7,))]) for i in range(100)}
    assert sorted(loads(save_in_messages([replicas] * 8, "deduped"))) == [12 * 28] * 4 + [13 * 28] * 4


def test_replicas_of_slabs_are_spread_within_their_groups() -> None:
    size, groups = 12, 4
    world = [
        {f"w{i}": shard((64, 3), slab((64, 3), 0, groups, rank % groups)) for i in range(7)}
        for rank in range(size)
    ]
    saved = save_in_messages(world, "deduped")
    assert sum(loads(saved)) == 7 * 64 * 3 * 4
    assert max(loads(saved)) == 3 * 16 * 3 * 4


def test_replicas_of_odd_boxes_are_spread_too() -> None:
    boxes = [Box((i,), (1,)) for i in range(12)]
    saved = save_in_messages([{"grid": shard((12,), boxes)}] * 3, "deduped")
    assert loads(saved) == [16, 16, 16]


def test_a_large_replica_is_written_by_several_ranks() -> None:
    world = [
        {"big": shard((1000, 4000), [Box((0, 0), (1000, 4000))]), "small": shard((9,), [Box((0,), (9,))])}
    ] * 5
    saved = save_in_messages(world, "deduped")
    assert max(loads(saved)) <= 1.01 * min(loads(saved))
    assert len(saved.index.tensors["big"].pieces) == 5
    everything = save_in_messages(world, "sharded")
    assert len(everything.index.tensors["big"].copies) == 1


def test_ranks_with_ranges_of_a_flat_buffer_describe_only_what_they_hold() -> None:
    size, count = 8, 64
    world = []
    for rank in range(size):
        start, stop = (
            rank * count * 10 // size - 3 * (rank > 0),
            (rank + 1) * count * 10 // size - 3 * (rank < size - 1),
        )
        world.append(
            {
                f"p{i:02d}": shard(
                    (2, 5),
                    boxes_of_range((2, 5), max(0, min(10, start - 10 * i)), max(0, min(10, stop - 10 * i))),
                )
                for i in range(count)
            }
        )
    packed = [pack([describe(shards)]) for shards in world]
    sent = [sum(map(len, parts.values())) for _, parts in packed]
    assert len({key for _, parts in packed for key in parts}) == 1  # the catalog; all else is short
    assert max(sent) == min(sent)
    saved = save_in_messages(world, "deduped")
    assert sum(loads(saved)) == count * 40


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda world: world[5].update({"1.w": shard((256, 8), slab((256, 8), 0, 6, 5), torch.float64)}),
            r"ranks disagree about tensor '1.w': float32 \(256, 8\) on rank 0, float64 \(256, 8\) on rank 5",
        ),
        (
            lambda world: world[2].update({"0.few": shard((4, 5), [])}),
            r"ranks disagree about tensor '0.few': float32 \(3, 5\) on rank 0, float32 \(4, 5\) on rank 2",
        ),
        (
            lambda world: world[3].update({"0.w": shard((256, 8), [])}),
            r"tensor '0.w' do not make up its shape \(256, 8\): the boxes hold 1704 of 2048 elements",
        ),
        (
            lambda world: world[3].pop("0.b"),
            r"tensor '0.b' do not make up its shape \(256,\): the boxes hold 213 of 256",
        ),
        (
            lambda world: world[3].update({"0.w": shard((256, 8), slab((256, 8), 0, 4, 1))}),
            r"tensor '0.w' do not make up its shape .*: box .* overlaps box",
        ),
        (
            lambda world: [shards.update({"none": shard((2, 2), [])}) for shards in world],
            r"tensor 'none' do not make up its shape \(2, 2\): the boxes hold 0 of 4",
        ),
        (
            lambda world: world[0].update({"0.w": shard((256, 8), [Box((0, 0), (300, 8))])}),
            r"tensor '0.w' do not make up .*: box \(0, 0\)\+\(300, 8\) lies outside",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_are_named(change: Callable[[Any], Any], message: str) -> None:
    world = fsdp(6, 3)
    change(world)
    with pytest.raises(CheckpointError, match=message):
        save_in_messages(world, "deduped")


def test_a_rank_that_cuts_differently_but_cleanly_is_saved() -> None:
    world = fsdp(4, 2)
    for rank, (start, length) in enumerate([(0, 10), (10, 100), (110, 1), (111, 145)]):
        world[rank]["0.w"] = shard((256, 8), [Box((start, 0), (length, 8))])
    saved = save_in_messages(world, "deduped")
    assert sorted(saved.index.tensors["0.w"].copies) == [
        Box((0, 0), (10, 8)),
        Box((10, 0), (100, 8)),
        Box((110, 0), (1, 8)),
        Box((111, 0), (145, 8)),
    ]


def forged(change: Callable[[dict[str, Any]], object]) -> Index:
    saved = save_in_messages(fsdp(6, 3), "deduped")
    body = json.loads(saved.raw)
    change(body)
    return decode_index(json.dumps(body).encode(), saved.manifest, source="index.json")


def group_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    group: dict[str, Any] = body["groups"][body["tensors"][name]]
    return group


def owners_of(body: dict[str, Any], name: str) -> list[Any]:
    owners: list[Any] = body["owners"][group_of(body, name)["owners"]]
    return owners


def list_boxes(body: dict[str, Any], name: str) -> dict[str, Any]:
    """The same boxes, spelled out."""
    group = group_of(body, name)
    boxes = boxes_of_grid(tuple(group["shape"]), tuple(group.pop("grid")))
    return group | {"boxes": [[list(box.offset), list(box.size)] for box in boxes]}


def change_box(body: dict[str, Any], number: int, part: int, value: Any) -> None:
    group = group_of(body, "0.w")
    group.update(list_boxes(body, "0.w"))
    group["boxes"][number][part] = value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b["tensors"].update({"0.w": len(b["groups"])}), "malformed entry"),
        (lambda b: b["tensors"].update({"0.w": -1}), "malformed entry"),
        (lambda b: b["tensors"].update({"0.w": True}), "malformed entry"),
        (lambda b: b["tensors"].update({"0.w": {"dtype": "float32"}}), "malformed entry"),
        (
            lambda b: b["tensors"].update({"0.w": b["tensors"]["0.b"]}),
            "the entries of 'r00000.safetensors' end at",
        ),
        (lambda b: b["tensors"].pop("0.w"), "the entries of 'r00000.safetensors' end at"),
        (lambda b: group_of(b, "0.w").update(dtype="object"), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(dtype="float64"), "end at"),
        (lambda b: group_of(b, "0.w").update(shape=[256, 9]), "12 boxes with 6 owners"),
        (lambda b: group_of(b, "0.w").update(shape=[256]), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(shape=[256, -8]), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(shape=[1 << 62, 8], grid=[1 << 62, 8]), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(grid=[43]), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(grid=[0, 8]), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(grid=[300, 8]), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(grid=[40, 8]), "7 boxes with 6 owners"),
        (lambda b: group_of(b, "0.w").update(grid=[44, 8]), "end at"),
        (lambda b: group_of(b, "0.w").update(owners=len(b["owners"])), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(owners=-1), "malformed entry"),
        (lambda b: group_of(b, "0.w").update(owners=True), "malformed entry"),
        (lambda b: group_of(b, "0.w").pop("grid"), "malformed entry"),
        (lambda b: owners_of(b, "0.w").pop(2), "6 boxes with 5 owners"),
        (lambda b: owners_of(b, "0.w").append(0), "6 boxes with 7 owners"),
        (lambda b: owners_of(b, "0.w").__setitem__(2, 6), "malformed entry"),
        (lambda b: owners_of(b, "0.w").__setitem__(2, -1), "malformed entry"),
        (lambda b: owners_of(b, "0.w").__setitem__(2, []), "malformed entry"),
        (lambda b: owners_of(b, "0.w").__setitem__(2, [2, 2]), "malformed entry"),
        (lambda b: owners_of(b, "0.w").__setitem__(2, 3), "end at"),
        (lambda b: owners_of(b, "0.w").__setitem__(2, [2, 3]), "end at"),
        (lambda b: group_of(b, "0.w").update(list_boxes(b, "0.w")), ""),
        (lambda b: change_box(b, 1, 0, [42, 0]), "overlaps"),
        (lambda b: change_box(b, 5, 1, [40, 8]), r"tensor '\d.w': the boxes hold"),
        (lambda b: change_box(b, 5, 1, [60, 8]), "lies outside the shape"),
        (lambda b: change_box(b, 1, 0, [43, -1]), "malformed entry"),
        (lambda b: change_box(b, 1, 0, [43]), "malformed entry"),
        (lambda b: b.update(groups=3), "malformed entry"),
        (lambda b: b.pop("owners"), "malformed entry"),
        (lambda b: b.update(files=b["files"][:-1]), "malformed entry"),
        (lambda b: b.update(files=[*b["files"][:-1], "r9.safetensors"]), "not in the manifest"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(change: Any, reason: str) -> None:
    forged(lambda body: None)
    if not reason:
        assert forged(change).tensors["0.w"].shape == (256, 8)
        return
    with pytest.raises(CheckpointError, match=f"index.json' contradicts itself: .*({reason})"):
        forged(change)


# --- headers --------------------------------------------------------------------------------------


HELD = [
    Entry("x", (4, 5), "float32", Box((0, 0), (2, 5))),
    Entry("x", (4, 5), "float32", Box((3, 1), (1, 2))),
    Entry("y", (3,), "complex64", Box((0,), (3,))),
    Entry("__metadata__", (2,), "int8", Box((1,), (1,))),
    Entry("k", (0, 2), "float64", Box((0, 0), (0, 2))),
]


def test_offsets_come_from_the_header_whatever_its_order() -> None:
    for order in itertools.permutations(range(5)):
        header, position, blocks = rankfile._header([HELD[i] for i in order]), 0, 0
        found = find_offsets(header, HELD, [2, 2, 3, 0, 1], block=BLOCK, source="f")
        for i in order:
            start, block = found.find([2, 2, 3, 0, 1][i], int(i == 1))
            assert start == len(header) + position
            assert block == blocks or not HELD[i].nbytes
            position += HELD[i].nbytes
            blocks += -(-HELD[i].nbytes // BLOCK)
        assert found.block_count == blocks


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda held: held[:-1], "about 'k'"),
        (lambda held: [*held, Entry("z", (1,), "int8", Box((0,), (1,)))], "about 'z'"),
        (lambda held: [replace(held[0], dtype_name="int32"), *held[1:]], "about 'x'"),
        (lambda held: [replace(held[0], shape=(5, 5)), *held[1:]], "about 'x'"),
        (lambda held: [replace(held[0], box=Box((1, 0), (2, 5))), *held[1:]], "about 'x'"),
        (lambda held: [replace(held[0], box=Box((0, 0), (1, 5))), *held[1:]], "about 'x'"),
        (lambda held: [*held[:2], replace(held[2], dtype_name="float64"), *held[3:]], "about 'y'"),
    ],
)
def test_a_header_that_holds_other_entries_than_the_index_says_is_refused(change: Any, problem: str) -> None:
    header = rankfile._header(change(HELD))
    with pytest.raises(CheckpointError, match=f"'f' and the index contradict each other {problem}"):
        find_offsets(header, HELD, [2, 2, 3, 0, 1], block=BLOCK, source="f")


def altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    body = json.loads(rankfile._header(HELD)[8:])
    change(body)
    text = json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda body: body["y"].update(data_offsets=[40, 64]), "contradict each other about 'y'"),
        (lambda body: body["x"].update(data_offsets=[4, 44]), "contradict each other about 'x'"),
        (lambda body: body["x"].update(data_offsets=[-40, 0]), "is malformed: ValueError: bytes -40 to 0"),
        (lambda body: body["x"].update(data_offsets=[2**80, 2**80 + 40]), "is malformed"),
        (lambda body: body["x"].update(data_offsets=[{}, 40]), "is malformed"),
        (lambda body: body["x"].update(data_offsets=[0.0, 40.0]), "is malformed"),
        (lambda body: body["x"].update(data_offsets=None), "is malformed"),
        (lambda body: body["y"].update(shape=[3, 3]), "is malformed"),
        (lambda body: body["y"].update(shape=[]), "is malformed"),
        (lambda body: body["x"].update(dtype="I32"), "is malformed: ValueError: entry 'x' is not float32"),
        (lambda body: body.update({"q": body.pop("y")}), "contradict each other about 'y'"),
        (lambda body: body.pop("__metadata__"), "is malformed"),
        (lambda body: body["__metadata__"].pop("nnx"), "is malformed"),
        (lambda body: body["__metadata__"].update(nnx="[]"), "is malformed"),
        (lambda body: body["__metadata__"].update(nnx="["), "is malformed"),
        (lambda body: body.update(y=5), "is malformed"),
    ],
)
def test_a_header_that_cannot_be_is_refused(change: Any, problem: str) -> None:
    find_offsets(altered(lambda body: None), HELD, [2, 2, 3, 0, 1], block=BLOCK, source="f")
    with pytest.raises(CheckpointError, match=f"header of 'f' .*{problem}"):
        find_offsets(altered(change), HELD, [2, 2, 3, 0, 1], block=BLOCK, source="f")


def test_the_example_of_the_specification_is_an_index() -> None:
    text = from_repository(__file__, "docs/checkpoint-format.md").read_text()
    raw = text.split("## index.json")[1].split("```json\n")[1].split("```")[0]
    files = {
        "r00000.safetensors": FileEntry(4208, "", 4096),
        "r00001.safetensors": FileEntry(4200, "", 4096),
        "r00000.sums": FileEntry(0, "", 0),
        "r00001.sums": FileEntry(0, "", 0),
    }
    index = decode_index(raw.encode(), Manifest(SAVE_ID, "", files), source="the example")
    assert [box.offset for box in index.tensors["model.embed.weight"].boxes] == [(0, 0), (5, 0)]
    assert len(index.tensors["odd"].boxes) == 4


def test_a_feature_that_a_reader_does_not_know_is_refused() -> None:
    other = Manifest(SAVE_ID, "", {}, requires=("compression",))
    with pytest.raises(
        CheckpointError, match=r"needs features that this nnx does not know: \['compression'\]"
    ):
        decode_manifest(encode_manifest(other), source="x")


@pytest.mark.parametrize("version", [(1, 0), (1, 1)])
def test_a_version_that_was_never_released_is_refused_by_its_number(version: tuple[int, int]) -> None:
    old = encode_manifest(Manifest(SAVE_ID, "", {}, version=version))
    with pytest.raises(
        CheckpointError, match=rf"version 1\.{version[1]}, which no release of nnx has written"
    ):
        decode_manifest(old, source="x")


# --- real processes -------------------------------------------------------------------------------


def save_and_load(path: str) -> list[str]:
    """Save shards of every sort, fill them again, and return the ones that differ. Runs on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(3)
    shards = {}
    for number, how in enumerate(HOW):
        for shape in [(100, 70), (5,), (2, 9)]:
            full = torch.randn(shape, generator=random)
            boxes = boxes_on(how, shape, rank, size)
            if boxes is not None:
                views = tuple(full[box.slices].clone() for box in boxes)
                shards[f"{number}.{len(shape)}.{shape[0]}"] = Shard(shape, full.dtype, tuple(boxes), views)
    shards["big"] = shard_of(torch.randn(1000, 700, generator=random))
    expected = {name: [view.clone() for view in one.data] for name, one in shards.items()}
    modes: tuple[Mode, Mode] = ("deduped", "sharded")
    for mode in modes:
        nnx_checkpoint.save(f"{path}/{mode}", tensors=shards, objects={}, state_dict_type=mode)
        for one in shards.values():
            for view in one.data:
                view.zero_()
        nnx_checkpoint.open_checkpoint(f"{path}/{mode}").fill(shards)
        wrong = [n for n, one in shards.items() if not all(map(torch.equal, one.data, expected[n]))]
        if wrong:
            return [mode, *wrong]
    return []


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("size", [2, 3])
def test_everything_comes_back_over_real_processes(pool: WorkerPool, tmp_path: Path, size: int) -> None:
    assert pool.run(save_and_load, str(tmp_path), world_size=size, init="gloo") == [[]] * size
    for mode in ("deduped", "sharded"):
        assert nnx_checkpoint.verify(tmp_path / mode) == []
    deduped = nnx_checkpoint.open_native(tmp_path / "deduped")
    pieces = deduped.tensors["big"].pieces  # whole on every rank, and more than a fair share
    assert len({piece.file for piece in pieces}) == size
    raw = (deduped.path / deduped.manifest.save_id / "index.json").read_bytes()
    assert xxhash.xxh3_128_hexdigest(raw) == deduped.manifest.files["index.json"].digest
    sizes = [
        entry.size - entry.digested
        for name, entry in deduped.manifest.files.items()
        if name.endswith(".safetensors")
    ]
    assert max(sizes) < 2.5 * min(sizes)

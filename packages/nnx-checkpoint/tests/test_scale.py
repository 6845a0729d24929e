"""Plans and indexes by kind: the same boxes as a list of them, at a cost of ranks plus tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from nnx_checkpoint import cells
from nnx_checkpoint.box import Box, boxes_of_range, find_fault
from nnx_checkpoint.cells import Kind, Placement, Stored, cell_box, guess, habits, seats
from nnx_checkpoint.description import Description, describe, pack, requests, unpack
from nnx_checkpoint.index import Index, decode_index, encode_index, required
from nnx_checkpoint.manifest import FileEntry, Manifest, decode_manifest, encode_manifest
from nnx_checkpoint.plan import Mode, make_plan, select
from nnx_checkpoint.rankfile import StoredBox, file_order
from nnx_checkpoint.shard import Shard, shard_of
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


def holds_its_own_numbers(box: StoredBox, view: torch.Tensor) -> bool:
    return torch.equal(view, numbered(box.shape, view.dtype)[box.box.slices])


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
    """What a rank holds of a tensor; None where it does not know it."""
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
    """What came of a save that only took place in messages."""

    index: Index
    selected: list[list[StoredBox]]
    raw: bytes
    manifest: Manifest


def describe_rank(world: World, rank: int) -> Description:
    return describe(world[rank], rank=rank, world_size=len(world))


def converse(world: World) -> list[Description]:
    """All descriptions after their trip to the coordinator, where only what is asked for arrives."""
    packed = [pack(describe_rank(world, rank)) for rank in range(len(world))]
    heads = [head for head, _ in packed]
    parts = {key: packed[rank][1][key] for rank, keys in enumerate(requests(heads)) for key in keys}
    return unpack(heads, parts)


def save_in_messages(world: World, mode: Mode) -> Saved:
    plan = make_plan(converse(world), mode)
    deal = plan.deal()
    selected = []
    for rank, own in enumerate(plan.own()):
        shards = world[rank]
        boxes, data = select(describe_rank(world, rank), shards, deal, own)
        assert [tuple(view.shape) for view in data] == [box.box.size for box in boxes]
        assert all(holds_its_own_numbers(box, view) for box, view in zip(boxes, data, strict=True))
        selected.append([boxes[i] for i in file_order(boxes)])
    stored = plan.stored([bool(boxes) for boxes in selected])
    headers = [100 * (rank + 1) for rank, boxes in enumerate(selected) if boxes]
    raw = encode_index(stored, headers, BLOCK, {})
    sizes = [sum(box.nbytes for box in boxes) for boxes in selected if boxes]
    files = {}
    for name, header, size in zip(stored.files, headers, sizes, strict=True):
        files[name] = FileEntry(header + size, "0" * 32, header)
        files[f"{name.rsplit('.', 1)[0]}.sums"] = FileEntry(0, "0" * 32, 0)
    manifest = Manifest(SAVE_ID, "", files, block=BLOCK, requires=required(stored))
    return Saved(decode_index(raw, manifest, source="index"), selected, raw, manifest)


def listed(selected: list[list[StoredBox]]) -> dict[tuple[str, Box, str], tuple[int, int]]:
    """Position and first checksum of every box, found by walking through every file."""
    found = {}
    for rank, boxes in enumerate(selected):
        position, block = 100 * (rank + 1), 0
        for box in boxes:
            found[box.name, box.box, f"r{rank:05d}.safetensors"] = (position, block)
            position += box.nbytes
            block += -(-box.nbytes // BLOCK)
    return found


@pytest.fixture(params=[1, 1024], scope="module")
def shared_from(request: pytest.FixtureRequest) -> Iterator[None]:
    """Positions by sums that files share, and without, which is what few tensors get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_SHARED", request.param)
        yield


@pytest.mark.usefixtures("shared_from")
@settings(max_examples=100, deadline=None)
@given(worlds(), st.sampled_from(["deduped", "sharded"]))
def test_the_index_says_exactly_what_the_ranks_wrote(world: World, mode: Mode) -> None:
    saved = save_in_messages(world, mode)
    expected = listed(saved.selected)
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
            assert {(entry.name, piece.box, file) for piece, entry in pieces} == {
                key for key in expected if key[2] == file
            }
            assert [piece.start for piece, _ in pieces] == sorted(piece.start for piece, _ in pieces)


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
def test_looking_up_a_box_finds_what_searching_all_pieces_finds(world: World, data: st.DataObject) -> None:
    tensors = save_in_messages(world, "sharded").index.tensors
    for name in tensors:
        entry = tensors[name]
        starts = [data.draw(st.integers(0, max(0, extent - 1))) for extent in entry.shape]
        size = [data.draw(st.integers(0, full - at)) for at, full in zip(starts, entry.shape, strict=True)]
        box = Box(tuple(starts), tuple(size))
        expected = {stored for stored in entry.copies if stored.intersection(box) is not None}
        found = dict(entry.overlapping(box))
        assert found.keys() == expected
        assert all(list(found[stored]) == list(entry.copies[stored]) for stored in expected)


@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.data())
def test_a_box_of_a_chunked_tensor_is_guessed(
    extent: int, parts: int, seen: bool, data: st.DataObject
) -> None:
    part = data.draw(st.integers(0, parts - 1))
    found = slab((extent, 3), 0, parts, part)
    # What tells the coordinate where the last box is short: a full slab of another tensor, or the mesh.
    longer = (2 * parts + 2, 3)
    usual = habits([(longer, slab(longer, 0, parts + 1, part)[0], 1)]) if seen else ()
    if found:
        cut = guess((extent, 3), found[0], usual, [] if seen else seats(part, parts))
        assert cut is not None
        assert cell_box((extent, 3), *cut) == found[0]
        if found[0].size[0] < extent:
            assert cut == ((-(-extent // parts), 3), (part,) if part else ())


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
    packed = [pack(describe_rank(world, rank)) for rank in range(64)]
    heads = [head for head, _ in packed]
    asked = requests(heads)
    with_names = [rank for rank, keys in enumerate(asked) for key in keys if len(packed[rank][1][key]) > 2000]
    assert with_names == [0]
    # Ranks differ in which tensors they hold nothing of, and one in its shorter last slab.
    assert sum(len(keys) for keys in asked) <= 10
    for head in heads:
        assert sum(map(len, head.inline.values())) < 600


def test_the_index_grows_with_tensors_plus_ranks() -> None:
    few, many = (len(save_in_messages(fsdp(size, 40), "deduped").raw) for size in (4, 64))
    assert many - few < 64 * 2 * 60
    assert len(save_in_messages(fsdp(64, 80), "deduped").raw) - many < 40 * 5 * 40


def test_nothing_is_listed_where_everything_is_regular() -> None:
    body = json.loads(save_in_messages(fsdp(24, 3), "deduped").raw)
    assert all(type(kind) is int for kind in body["tensors"].values())
    assert len(body["kinds"]) <= 4 + 3


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
    packed = [pack(describe_rank(world, rank)) for rank in range(size)]
    assert (
        len({head.parts[1] for head, _ in packed}) == 1
    )  # nobody's cuts are like anybody else's, so none are sent
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


def kind_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    kind: dict[str, Any] = body["kinds"][body["tensors"][name]]
    return kind


def layout_of(body: dict[str, Any], name: str) -> list[Any]:
    layout: list[Any] = body["layouts"][kind_of(body, name)["layout"]]
    return layout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b["tensors"].update({"0.w": len(b["kinds"])}), "malformed entry"),
        (lambda b: b["tensors"].update({"0.w": -1}), "malformed entry"),
        (lambda b: b["tensors"].update({"0.w": True}), "malformed entry"),
        (
            lambda b: b["tensors"].update({"0.w": b["tensors"]["0.b"]}),
            "the pieces of 'r00000.safetensors' end at",
        ),
        (lambda b: b["tensors"].pop("0.w"), "the pieces of 'r00000.safetensors' end at"),
        (lambda b: kind_of(b, "0.w").update(dtype="object"), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(dtype="float64"), "end at"),
        (lambda b: kind_of(b, "0.w").update(shape=[256, 9]), "lacks 6 of 12 cells"),
        (lambda b: kind_of(b, "0.w").update(shape=[256]), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(shape=[256, -8]), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(shape=[1 << 62, 8], chunk=[1 << 62, 8]), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(chunk=[43]), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(chunk=[0, 8]), "has chunk"),
        (lambda b: kind_of(b, "0.w").update(chunk=[300, 8]), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(chunk=[40, 8]), r"tensor '\d.w': it lacks 1 of 7 cells"),
        (lambda b: kind_of(b, "0.w").update(chunk=[44, 8]), "end at"),
        (lambda b: kind_of(b, "0.w").update(layout=len(b["layouts"])), "malformed entry"),
        (lambda b: kind_of(b, "0.w").update(layout=-1), "malformed entry"),
        (lambda b: layout_of(b, "0.w").pop(2), "lacks 1 of 6 cells"),
        (lambda b: layout_of(b, "0.w").append([[2], [0]]), "malformed entry"),
        (lambda b: layout_of(b, "0.w").append([[2, 0], [0]]), "malformed entry"),
        (lambda b: layout_of(b, "0.w")[2].__setitem__(1, [6]), "malformed entry"),
        (lambda b: layout_of(b, "0.w")[2].__setitem__(1, []), "malformed entry"),
        (lambda b: layout_of(b, "0.w")[2].__setitem__(1, [2, 2]), "malformed entry"),
        (lambda b: layout_of(b, "0.w")[2].__setitem__(1, [3]), "end at"),
        (lambda b: layout_of(b, "0.w")[2].__setitem__(1, [2, 3]), "end at"),
        (lambda b: layout_of(b, "0.w")[2].__setitem__(0, [1 << 70]), "malformed entry"),
        (lambda b: b.update(kinds=3), "malformed entry"),
        (lambda b: b.pop("layouts"), "malformed entry"),
        (lambda b: b.update(files=b["files"][:-1]), "malformed entry"),
        (lambda b: b.update(files=[*b["files"][:-1], "r9.safetensors"]), "not in the manifest"),
    ],
)
def test_an_index_by_kind_that_contradicts_itself_is_refused(change: Any, reason: str) -> None:
    forged(lambda body: None)
    with pytest.raises(CheckpointError, match=f"index.json' contradicts itself: .*({reason})"):
        forged(change)


def test_a_listed_piece_among_regular_ones_must_lie_where_the_rule_puts_it() -> None:
    world = fsdp(3, 2)
    for rank, (start, stop) in enumerate([(0, 7), (7, 11), (11, 20)]):
        world[rank]["0.flat"] = shard((4, 5), boxes_of_range((4, 5), start, stop))
    saved = save_in_messages(world, "deduped")
    body = json.loads(saved.raw)
    assert len(body["tensors"]["0.flat"]["pieces"]) == 6
    body["tensors"]["0.flat"]["pieces"][0][3] += 4
    with pytest.raises(CheckpointError, match=r"a piece in 'r00000\.safetensors' starts at"):
        decode_index(json.dumps(body).encode(), saved.manifest, source="x")


@pytest.mark.usefixtures("shared_from")
def test_a_file_may_hold_several_cells_of_a_tensor_and_whole_tensors_between() -> None:
    kinds = [
        Kind("float32", (5, 3), (2, 3), 0),
        Kind("float32", (4,), (4,), 1),
        Kind("int8", (2, 3), (1, 3), 0),
    ]
    layouts = [{(): (0,), (1,): (0,), (2,): (1,)}, {(): (0, 1)}]
    stored = Stored(["a.safetensors", "b.safetensors"], layouts, kinds, {"x": 0, "y": 1, "z": 0, "k": 2}, {})
    placement = Placement(stored, [100, 200], BLOCK)
    expected = [("x", (0, 0), 100, 0), ("x", (2, 0), 124, 2), ("y", (0,), 148, 4), ("z", (0, 0), 164, 5)]
    expected += [("z", (2, 0), 188, 7), ("k", (0, 0), 212, 9), ("k", (1, 0), 215, 10)]
    assert [(name, box.offset) for name, box in placement.pieces(0)] == [item[:2] for item in expected]
    assert [(n, o, *placement.locate(0, n, o)) for n, o, _, _ in expected] == expected
    assert placement.locate(1, "y", (0,)) == (212, 1)
    assert [placement.size(file) for file in (0, 1)] == [118, 40]
    assert [placement.blocks(file) for file in (0, 1)] == [11, 3]


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
    where = [(piece.file, piece.start) for piece in index.tensors["model.embed.weight"].pieces]
    assert where == [("r00000.safetensors", 4104), ("r00001.safetensors", 4096)]


def test_a_manifest_names_the_feature_and_a_reader_without_it_would_refuse() -> None:
    manifest = save_in_messages(fsdp(2, 1), "deduped").manifest
    assert manifest.requires == ("kinds",)
    assert decode_manifest(encode_manifest(manifest), source="x").requires == ("kinds",)
    other = Manifest(SAVE_ID, "", {}, requires=("kinds", "compression"))
    with pytest.raises(
        CheckpointError, match=r"needs features that this nnx does not know: \['compression'\]"
    ):
        decode_manifest(encode_manifest(other), source="x")


# --- real processes -------------------------------------------------------------------------------


def save_and_load(path: str) -> list[str]:
    """Save shards of every sort, fill them again; what did not come back. Runs on each rank."""
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

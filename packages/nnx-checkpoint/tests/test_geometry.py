"""Boxes, manifests and indexes on inputs from hypothesis."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnx_base.box import Box, boxes_of_range, find_fault
from nnx_checkpoint.format.index import decode_index, encode_index, index_of
from nnx_checkpoint.format.manifest import FileEntry, Manifest, decode_manifest, encode_manifest
from nnx_checkpoint.format.rankfile import flat_bytes
from nnx_core.errors import CheckpointError

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, cut into boxes by repeated splits."""
    shape = draw(shapes)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, extent in enumerate(box.size) if extent > 1]
        if not dims:
            boxes.append(box)
            break
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.size[d] - 1))
        for start, extent in ((0, at), (at, box.size[d] - at)):
            offset, size = list(box.offset), list(box.size)
            offset[d], size[d] = offset[d] + start, extent
            boxes.append(Box(tuple(offset), tuple(size)))
    return shape, draw(st.permutations(boxes))


@given(partitions())
def test_a_partition_has_no_fault(case: tuple[tuple[int, ...], list[Box]]) -> None:
    assert find_fault(*case) == ""


@given(partitions(), st.data())
def test_a_partition_with_one_box_missing_twice_or_moved_has_a_fault(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    i = data.draw(st.integers(0, len(boxes) - 1))
    assert "elements" in find_fault(shape, boxes[:i] + boxes[i + 1 :])
    assert "overlaps" in find_fault(shape, [*boxes, boxes[i]])
    if shape:
        moved = Box((boxes[i].offset[0] + shape[0], *boxes[i].offset[1:]), boxes[i].size)
        assert "outside" in find_fault(shape, [*boxes[:i], moved, *boxes[i + 1 :]])


@given(shapes, st.data())
def test_a_flat_range_is_cut_into_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = boxes_of_range(shape, start, stop)
    full = torch.arange(total).view(shape)
    held = [int(v) for box in boxes for v in full[box.slices].reshape(-1)]
    assert held == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)
entries = st.builds(
    lambda size, digested, hexadecimal: FileEntry(size + digested, f"{hexadecimal:032x}", digested),
    st.integers(0, 2**50),
    st.integers(0, 2**50),
    st.integers(0, 2**128 - 1),
)
manifests = st.builds(
    Manifest,
    save_id=st.just("20260102T030405.678901-0123abcd"),
    created=st.text(max_size=20),
    files=st.dictionaries(st.from_regex(r"[a-z][a-z0-9.]{0,20}", fullmatch=True), entries, max_size=4),
    writer=st.dictionaries(st.text(), json_values, max_size=3),
    provenance=st.dictionaries(st.text(), json_values, max_size=3),
    block=st.integers(1, 2**30),
)


@pytest.mark.full
@given(manifests)
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest), source="x") == manifest


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifests, st.data())
def test_a_manifest_with_any_byte_changed_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(encode_manifest(manifest))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError):
        decode_manifest(bytes(raw), source="x")


@given(st.binary(max_size=200))
def test_garbage_is_never_a_manifest(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_manifest(raw, source="x")


@given(st.lists(partitions(), max_size=4), st.integers(1, 3))
def test_an_index_of_any_boxes_comes_back(
    cases: list[tuple[tuple[int, ...], list[Box]]], writers: int
) -> None:
    names = [f"r{rank:05d}.safetensors" for rank in range(writers)]
    tensors = {
        f"t{n}": ("float32", shape, {box: [names[(n + i) % writers]] for i, box in enumerate(boxes)})
        for n, (shape, boxes) in enumerate(cases)
    }
    index = replace(index_of(tensors), aliases={"tied": "t0"} if tensors else {})
    files: dict[str, FileEntry] = {}
    for name in index.files:
        held = [box for _, _, boxes in tensors.values() for box, owners in boxes.items() if name in owners]
        files[name] = FileEntry(4096 + 4 * sum(box.numel for box in held), "0" * 32, 4096)
        files[f"{name.rsplit('.', 1)[0]}.sums"] = FileEntry(0, "0" * 32, 0)
    manifest = Manifest("20260102T030405.678901-0123abcd", "", files, block=16)
    found = decode_index(encode_index(index), manifest, source="x")
    assert found.aliases == index.aliases
    assert {name: list(entry.boxes) for name, entry in found.tensors.items()} == {
        name: sorted(boxes) for name, (_, _, boxes) in tensors.items()
    }
    for name, (_, _, boxes) in tensors.items():
        owners = found.groups[found.numbers[name]].owners
        assert [[found.files[i] for i in held] for held in owners] == [boxes[box] for box in sorted(boxes)]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and any stride."""
    kinds = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    dtype = draw(st.sampled_from(kinds))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = (torch.randn(shape) * 3).to(dtype)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        d = draw(st.integers(0, len(shape) - 1))
        tensor = tensor.narrow(d, 0, draw(st.integers(0, tensor.shape[d])))
        if draw(st.booleans()):
            tensor = tensor.transpose(0, d)[::2]
    return tensor


@given(views(), st.integers(1, 64))
def test_the_bytes_of_any_view_come_in_row_major_order(tensor: torch.Tensor, limit: int) -> None:
    dense = tensor.clone(memory_format=torch.contiguous_format).resolve_conj()
    expected = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert b"".join(bytes(part) for part in flat_bytes(tensor, max(limit, 8))) == expected

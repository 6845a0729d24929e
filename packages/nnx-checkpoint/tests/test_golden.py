"""A golden checkpoint in the repository is still readable.

Besides nnx, a second reader opens it: some eighty lines written from docs/checkpoint-format.md alone, with
neither torch nor nnx.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import nnx_checkpoint
from nnx_test_helpers import checkpoint_jobs

VERSIONS = [(1, 2)]
KINDS = {"float32": "<f4", "float64": "<f8", "int16": "<i2", "int64": "<i8", "bfloat16": "<u2"}
KINDS |= {"bool": "|b1", "uint8": "|u1", "complex64": "<c8"}


@pytest.fixture(params=VERSIONS, ids=lambda version: "{}.{}".format(*version))
def version(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture
def golden(version: tuple[int, int]) -> Path:
    return Path(__file__).parent / "golden" / "v{}.{}.ckpt".format(*version)


def test_the_golden_checkpoint_loads_bit_for_bit(golden: Path, version: tuple[int, int]) -> None:
    checkpoint = nnx_checkpoint.open_checkpoint(golden)
    for name, (expected, _) in checkpoint_jobs.golden_tensors().items():
        assert checkpoint_jobs.same_bits(checkpoint.read(name), expected), name
    assert torch.equal(checkpoint.read("model.tied"), checkpoint.read("model.rows"))
    assert repr(checkpoint.objects) == repr(checkpoint_jobs.golden_objects())
    assert [checkpoint.rank_objects(rank)["rank"] for rank in range(2)] == [0, 1]
    assert checkpoint.rank_objects(1)["rng"].tolist() == [1, 2, 3, 4]
    assert (checkpoint.world_size, checkpoint.manifest.version) == (2, version)
    assert checkpoint.manifest.provenance == {"strategy": "golden", "step": 3}


def test_the_golden_checkpoint_verifies(golden: Path) -> None:
    assert nnx_checkpoint.verify(golden) == []


def test_the_specification_is_enough_to_read_it(golden: Path) -> None:
    read = read_by_the_specification(golden)
    for name, (expected, _) in checkpoint_jobs.golden_tensors().items():
        plain = expected.view(torch.uint16) if expected.dtype == torch.bfloat16 else expected
        assert np.array_equal(read[name], plain.numpy()), name
    assert np.array_equal(read["model.tied"], read["model.rows"])


def read_by_the_specification(path: Path) -> dict[str, Any]:
    raw = (path / "manifest.json").read_bytes()
    assert raw[:14] == b'{\n "digest": "'
    assert xxhash.xxh3_128_hexdigest(raw[:14] + b"0" * 32 + raw[46:]).encode() == raw[14:46]
    manifest = json.loads(raw)
    assert (manifest["format"], manifest["version"]) == ("nnx-ckpt", [1, 2])
    assert manifest["requires"] == []
    directory = path / manifest["save_id"]
    for name, entry in manifest["files"].items():
        data = (directory / name).read_bytes()
        assert len(data) == entry["size"]
        assert xxhash.xxh3_128_hexdigest(data[: entry["digested"]]) == entry["digest"]
    index = json.loads((directory / "index.json").read_bytes())
    starts = {file: find_entries(directory / file) for file in index["files"]}
    held: dict[str, list[tuple[int, int]]] = {file: [] for file in index["files"]}
    tensors: dict[str, Any] = {}
    for name, number in index["tensors"].items():
        group = index["groups"][number]
        kind = np.dtype(KINDS[group["dtype"]])
        tensors[name] = np.full(group["shape"], 99, dtype=kind)
        boxes, owners = list_boxes(group), index["owners"][group["owners"]]
        for (offset, size), files in zip(boxes, owners, strict=True):
            for file in [files] if isinstance(files, int) else files:
                start = starts[index["files"][file]].pop((name, tuple(offset)))
                length = math.prod(size) * kind.itemsize
                held[index["files"][file]].append((start, length))
                data = (directory / index["files"][file]).read_bytes()[start : start + length]
                box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
                tensors[name][box] = np.frombuffer(data, kind).reshape(size)
    assert not any(starts.values())
    for file, pieces in held.items():
        check_sums(directory / file, sorted(pieces), manifest["hash"]["block"])
    return tensors | {alias: tensors[target] for alias, target in index["aliases"].items()}


def list_boxes(group: dict[str, Any]) -> list[Any]:
    """Offset and size of every box."""
    if "boxes" in group:
        return list(group["boxes"])
    shape, grid = group["shape"], group["grid"]
    offsets = itertools.product(
        *(range(0, full, step) for full, step in zip(shape, grid, strict=True)),
    )
    return [
        (at, [min(step, full - first) for step, full, first in zip(grid, shape, at, strict=True)])
        for at in offsets
    ]


def find_entries(file: Path) -> dict[tuple[Any, ...], int]:
    """Return the start of each entry, by the name of its tensor and the offset of its box."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    origins = json.loads(header.pop("__metadata__")["nnx"])
    found: dict[tuple[Any, ...], int] = {}
    for key, entry in header.items():
        origin = origins.get(key, {"name": key, "offset": [0] * len(entry["shape"])})
        found[origin["name"], tuple(origin["offset"])] = 8 + length + entry["data_offsets"][0]
    return found


def check_sums(file: Path, pieces: list[tuple[int, int]], block: int) -> None:
    data, sums = file.read_bytes(), file.with_suffix(".sums").read_bytes()
    parts = [
        data[start + at : start + min(at + block, length)]
        for start, length in pieces
        for at in range(0, length, block)
    ]
    assert sums == b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(part)) for part in parts)


def test_the_index_can_be_rebuilt_from_the_headers(golden: Path) -> None:
    checkpoint = nnx_checkpoint.open_checkpoint(golden)
    directory = golden / checkpoint.manifest.save_id
    rebuilt: dict[str, set[tuple[Any, ...]]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        origin = json.loads(header.pop("__metadata__")["nnx"])
        for key, entry in header.items():
            source = origin.get(key, {"name": key, "offset": [0] * len(entry["shape"])})
            piece = (tuple(source["offset"]), file.name, 8 + length + entry["data_offsets"][0])
            rebuilt.setdefault(source["name"], set()).add(piece)
    assert rebuilt == {
        name: {(piece.box.offset, piece.file, piece.start) for piece in entry.pieces}
        for name, entry in checkpoint.tensors.items()
    }


def test_every_rank_file_of_it_is_plain_safetensors(golden: Path) -> None:
    from safetensors.torch import load_file

    directory = golden / nnx_checkpoint.open_checkpoint(golden).manifest.save_id
    parts = [load_file(directory / f"r0000{rank}.safetensors") for rank in range(2)]
    rows = torch.cat([part["model.rows"] for part in parts])
    assert torch.equal(rows, torch.arange(35.0).view(7, 5))

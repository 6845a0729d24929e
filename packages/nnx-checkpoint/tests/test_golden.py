"""Checkpoints of each version of the format that were written once and for all.

Besides nnx, a second reader opens them: some eighty lines written from docs/checkpoint-format.md alone, with
neither torch nor nnx.
"""

from __future__ import annotations

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

VERSIONS = [(1, 0), (1, 1)]
KINDS = {"float32": "<f4", "float64": "<f8", "int16": "<i2", "int64": "<i8", "bfloat16": "<u2"}
KINDS |= {"bool": "|b1", "uint8": "|u1", "complex64": "<c8"}
NUMBER = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "complex64": 4,
    "int16": 2,
    "bfloat16": 2,
    "bool": 1,
    "uint8": 1,
}


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
    assert (manifest["format"], manifest["version"][0]) == ("nnx-ckpt", 1)
    assert set(manifest["requires"]) <= {"kinds"}
    directory = path / manifest["save_id"]
    for name, entry in manifest["files"].items():
        data = (directory / name).read_bytes()
        assert len(data) == entry["size"]
        assert xxhash.xxh3_128_hexdigest(data[: entry["digested"]]) == entry["digest"]
    index = json.loads((directory / "index.json").read_bytes())
    positions: dict[str, list[tuple[int, int]]] = {name: [] for name in index["files"]}
    tensors: dict[str, Any] = {}
    for name, entry in list_pieces(index, manifest).items():
        kind = np.dtype(KINDS[entry["dtype"]])
        tensors[name] = np.full(entry["shape"], 99, dtype=kind)
        for offset, size, number, position in entry["pieces"]:
            file = index["files"][number]
            length = math.prod(size) * kind.itemsize
            positions[file].append((position, length))
            data = (directory / file).read_bytes()[position : position + length]
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            tensors[name][box] = np.frombuffer(data, kind).reshape(size)
    for file, pieces in positions.items():
        check_sums(directory / file, sorted(pieces), manifest["hash"]["block"])
    return tensors | {alias: tensors[target] for alias, target in index["aliases"].items()}


def list_pieces(index: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """Every tensor with its pieces, those that follow by rule included."""
    listed = {name: entry for name, entry in index["tensors"].items() if isinstance(entry, dict)}
    in_file: dict[int, list[Any]] = {number: [] for number in range(len(index["files"]))}
    for name, number in index["tensors"].items():
        if not isinstance(number, dict):
            kind = index["kinds"][number]
            listed[name] = {"dtype": kind["dtype"], "shape": kind["shape"], "pieces": []}
            for cell, files in index["layouts"][kind["layout"]]:
                at = cell + [0] * (len(kind["shape"]) - len(cell))
                offset = [i * step for i, step in zip(at, kind["chunk"], strict=False)]
                rest = [full - start for full, start in zip(kind["shape"], offset, strict=False)]
                if len(at) == len(rest) and all(extent > 0 for extent in rest):
                    size = [min(pair) for pair in zip(kind["chunk"], rest, strict=True)]
                    for file in files:
                        in_file[file].append((-NUMBER[kind["dtype"]], name, offset, size))
    regular = {file for file, pieces in in_file.items() if pieces}
    for name, entry in index["tensors"].items():
        for offset, size, file, _ in entry["pieces"] if isinstance(entry, dict) else ():
            if file in regular:
                in_file[file].append((-NUMBER[entry["dtype"]], name, offset, size))
    for file, pieces in in_file.items():
        position = manifest["files"][index["files"][file]]["digested"]
        for _, name, offset, size in sorted(pieces):
            entry = listed[name]
            if isinstance(index["tensors"][name], dict):
                assert [offset, size, file, position] in entry["pieces"]
            else:
                entry["pieces"].append([offset, size, file, position])
            position += math.prod(size) * np.dtype(KINDS[entry["dtype"]]).itemsize
    return listed


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

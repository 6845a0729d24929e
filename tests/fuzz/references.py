"""Read a changed checkpoint without nnx.

nnx's own format and safetensors give the bytes of every tensor, and are read by their specifications.
For the formats of other programs it is enough, and needs none of their code, to know the tensors in their
files: every tensor that nnx assembles must consist of runs of one of these, in order.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from fuzz.pickles import Made, Stored, load_pickle

__all__ = ["explains", "stored_sums"]

_SAFE = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
_SAFE |= {"I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64"}
_STORAGES = {"FloatStorage": 4, "BFloat16Storage": 2, "LongStorage": 8, "IntStorage": 4, "HalfStorage": 2}
_STORAGES |= {"DoubleStorage": 8, "BoolStorage": 1, "ByteStorage": 1, "ShortStorage": 2, "CharStorage": 1}
_STORAGES |= {"ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "UntypedStorage": 1}


_Entry = tuple[int, int, str, Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor, and its possible contents: ranks may store the same box."""

    box: tuple[slice, ...]
    data: list[bytes]


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor as the files say."""

    dtype: str
    shape: tuple[int, ...]
    regions: list[Region]


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def explains(format: str, files: Mapping[str, bytes], found: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ from the files."""
    if format == "nnx":
        return _differing(_native(files), found)
    if format == "safetensors":
        return _differing(_safetensors(files), found)
    pool = [data for name, raw in files.items() for data in _stored(name, raw)]
    numbers = {number for raw in files.values() for number in _numbers(raw)}
    return [
        name for name, value in found.items() if not (_made_of(value, pool) or _is_number(value, numbers))
    ]


def _differing(expected: Mapping[str, Expected], found: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in found.items() if not _same(expected.get(name), tensor)]


def _same(expected: Expected | None, tensor: Tensor) -> bool:
    if expected is None or expected.shape != tuple(tensor.shape):
        return False
    if expected.dtype != str(tensor.dtype).removeprefix("torch."):
        return False
    return all(bits(tensor[region.box]) in region.data for region in expected.regions)


# --- our own format -------------------------------------------------------------------------------


def _entries(index: Any, files: Mapping[str, bytes], save_id: str) -> dict[int, list[_Entry]]:
    """For each rank file its entries in order: position, length, tensor, offset and size."""
    starts = [_starts(files[f"{save_id}/{file}"]) for file in index["files"]]
    found: dict[int, list[_Entry]] = {number: [] for number in range(len(index["files"]))}
    for name, number in index["tensors"].items():
        group = index["groups"][number]
        itemsize = getattr(torch, group["dtype"]).itemsize
        for (offset, size), held in zip(_boxes(group), index["owners"][group["owners"]], strict=True):
            length = math.prod(size) * itemsize
            for file in [held] if isinstance(held, int) else held:
                found[file].append((starts[file][name, tuple(offset)], length, name, offset, size))
    return {file: sorted(entries, key=lambda entry: entry[:2]) for file, entries in found.items()}


def _boxes(group: Any) -> list[Any]:
    if "boxes" in group:
        return list(group["boxes"])
    shape, grid = group["shape"], group["grid"]
    offsets = product(*(range(0, full, step) for full, step in zip(shape, grid, strict=True)))
    return [
        (at, [min(step, full - first) for step, full, first in zip(grid, shape, at, strict=True)])
        for at in offsets
    ]


def _starts(raw: bytes) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the start of each entry of a rank file, by the name of its tensor and the offset of its box."""
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    origins = json.loads(header.pop("__metadata__")["nnx"])
    found = {}
    for key, entry in header.items():
        origin = origins.get(key, {"name": key, "offset": [0] * len(entry["shape"])})
        found[origin["name"], tuple(origin["offset"])] = 8 + length + entry["data_offsets"][0]
    return found


def _native(files: Mapping[str, bytes]) -> dict[str, Expected]:
    manifest = json.loads(files["manifest.json"])
    directory = manifest["save_id"]
    index = json.loads(files[f"{directory}/index.json"])
    regions: dict[str, dict[Any, list[bytes]]] = {}
    for file, entries in _entries(index, files, directory).items():
        raw = files[f"{directory}/{index['files'][file]}"]
        for position, length, name, offset, size in entries:
            box = (tuple(offset), tuple(size))
            regions.setdefault(name, {}).setdefault(box, []).append(raw[position : position + length])
    found = {}
    for name, number in index["tensors"].items():
        group = index["groups"][number]
        held = [Region(_slices(*box), data) for box, data in regions.get(name, {}).items()]
        found[name] = Expected(group["dtype"], tuple(group["shape"]), held)
    return found


def _slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))


def stored_sums(manifest: Any, index: Any, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The checksums that every rank file of our own format should have."""
    found, block = {}, manifest["hash"]["block"]
    for file, entries in _entries(index, files, manifest["save_id"]).items():
        name = index["files"][file]
        raw = files[f"{manifest['save_id']}/{name}"]
        parts = [raw[at : min(at + block, p + n)] for p, n, *_ in entries for at in range(p, p + n, block)]
        sums = [xxhash.xxh3_64_intdigest(part) for part in parts]
        found[f"{name.rsplit('.', 1)[0]}.sums"] = struct.pack(f"<{len(sums)}Q", *sums)
    return found


# --- safetensors ----------------------------------------------------------------------------------


def _safetensors(files: Mapping[str, bytes]) -> dict[str, Expected]:
    found = {}
    for name, raw in files.items():
        if not name.endswith(".safetensors"):
            continue
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        wide = {k: v for text in metadata.values() for k, v in _names(text).items()}
        for key, entry in header.items():
            start, stop = entry["data_offsets"]
            shape, data = tuple(entry["shape"]), raw[8 + length + start : 8 + length + stop]
            dtype = _SAFE.get(entry["dtype"], entry["dtype"])
            if key in wide:
                dtype, shape = wide[key], shape[:-1]
            region = Region(tuple(slice(0, extent) for extent in shape), [data])
            found[key] = found[f"model.{key}"] = Expected(dtype, shape, [region])
    return found


def _names(text: str) -> dict[str, str]:
    """Element types by name, where a text is JSON of that."""
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    plain = isinstance(body, dict) and all(isinstance(value, str) for value in body.values())
    return body if plain else {}


# --- files of torch.save --------------------------------------------------------------------------


def _stored(name: str, raw: bytes) -> Iterator[bytes]:
    """The bytes of every tensor in a file, as its pickle describes it; of a DCP data file all bytes."""
    if name.endswith((".distcp", ".safetensors")):
        yield raw
        return
    records = _records(raw)
    if not records:
        return
    order = records.get("byteorder", b"little")
    for node in _nodes(load_pickle(records["data.pkl"]), set()):
        if not isinstance(node, Made):
            continue
        kind, arguments = node.symbol[1], node.args
        if kind == "_rebuild_from_type_v2" and len(arguments) == 4:  # a function and its arguments
            kind, arguments = getattr(arguments[0], "symbol", ("", ""))[1], arguments[2]
        if kind in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            yield from _tensor(kind, arguments, records, order)


def _records(raw: bytes) -> dict[str, bytes]:
    """Return the records of a zip file, without the first part of their names; empty if it is no zip file."""
    if not zipfile.is_zipfile(io.BytesIO(raw)):
        return {}
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for entry in archive.infolist():
            del entry.CRC  # torch need not write it, and checks none
        return {entry.partition("/")[2]: archive.read(entry) for entry in archive.namelist()}


def _numbers(raw: bytes) -> Iterator[float]:
    """The numbers in a file of torch.save, of which readers make tensors of no dimension."""
    described = _records(raw).get("data.pkl")
    for node in _nodes(load_pickle(described), set()) if described else ():
        if isinstance(node, (int, float)) and abs(node) < 1e300:
            yield float(node)


def _is_number(tensor: Tensor, numbers: set[float]) -> bool:
    if tensor.dim() or tensor.is_complex():
        return False
    return any(torch.equal(torch.tensor(number, dtype=tensor.dtype), tensor) for number in numbers)


def _nodes(tree: Any, seen: set[int]) -> Iterator[Any]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Made):
            pending += [node.args, node.state, node.items, node.values]
        elif isinstance(node, dict):
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _tensor(kind: str, arguments: Any, records: Mapping[str, bytes], order: bytes) -> Iterator[bytes]:
    try:
        storage, offset, shape, stride = arguments[:4]
        assert isinstance(storage, Stored)
        _, of, key, *_ = storage.pid
        width = _STORAGES[of.symbol[1]]
        if kind == "_rebuild_tensor_v3":
            width = getattr(torch, arguments[6].symbol[1]).itemsize
        if not stride:  # for torch they are those of a contiguous tensor
            stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        data = np.frombuffer(records[f"data/{key}"], np.dtype(f"V{width}"))[offset:]
        last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if 0 in shape or last >= len(data) or math.prod(shape) > 1 << 20:
            return
        strides = [step * width for step in stride]
        raw = np.lib.stride_tricks.as_strided(data, shape, strides).tobytes()
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, IndexError):
        return
    yield raw
    if order == b"big":
        yield np.frombuffer(raw, np.dtype(f">u{min(width, 8)}")).astype(f"<u{min(width, 8)}").tobytes()


def _made_of(tensor: Tensor, pool: Sequence[bytes]) -> bool:
    """Return True if every row of a tensor consists of at most a few runs of stored bytes."""
    if tensor.numel() == 0 or not tensor.dim():
        return tensor.numel() == 0 or _runs(bits(tensor), tensor.dtype.itemsize, pool) == 1
    rows = tensor.reshape(-1, tensor.shape[-1])
    return all(_runs(bits(row), tensor.dtype.itemsize, pool) <= 4 for row in rows)


def _runs(data: bytes, width: int, pool: Sequence[bytes]) -> int:
    """Return the number of runs of stored bytes, each as long as possible, that make up the data."""
    count = 0
    while data:
        stop = len(data)
        while stop and not any(data[:stop] in held for held in pool):
            stop -= width
        if stop <= 0:
            return 1 << 30
        data, count = data[stop:], count + 1
    return count

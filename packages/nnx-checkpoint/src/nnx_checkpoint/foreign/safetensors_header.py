"""Read and write the header of a safetensors file, and check every claim of it.

A file is an eight-byte length, a JSON object, then the tensors' elements without gaps. Element types that the
format lacks (complex128) get a further dim of extent 2, and the metadata entry ``nnx.complex`` names them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.index import TensorEntry
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.format.rankfile_header import DTYPES
from nnx_checkpoint.storage.files import explained, is_file, read_exactly

_LIMIT = 100_000_000
"""The longest header that the safetensors library itself accepts."""


_ALIGNMENT = 8


_COMPLEX_KEY = "nnx.complex"


_CODES = {name: stored.code for name, stored in DTYPES.items() if stored.parts == 1} | {"complex64": "C64"}


_NAMES = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: Its name in the file.
        dtype_name: Its element type, as torch names it.
        shape: Its shape.
        start: Position of its first byte in the file.
        nbytes: Its length.
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file.

    Attributes:
        tensors: The tensors in the order of their names in the header.
        metadata: Free text by key.
    """

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Read and check the header of a file.

    Raises:
        CheckpointError: The file is missing or truncated, or its header makes impossible claims.
    """
    if not is_file(file):
        raise CheckpointError(f"'{file}' is missing.", remedy="Restore it, or use another checkpoint.")
    with explained("read", file):
        size = file.stat().st_size
    if size < 8:
        raise _malformed(file, f"it has {size} bytes")
    (length,) = struct.unpack("<Q", read_exactly(file, 8))
    if length > min(_LIMIT, size - 8):
        raise _malformed(file, f"its header would have {length} bytes, and the file has {size}")
    try:
        body = load_json(read_exactly(file, length, start=8))
        metadata = body.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata has values that are not text")
        widened = load_json(metadata.pop(_COMPLEX_KEY, "{}").encode())
        tensors = tuple(_tensor(name, value, 8 + length, widened.get(name)) for name, value in body.items())
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _malformed(file, f"its header is not valid ({error})") from error
    _check_positions(file, tensors, 8 + length, size)
    return Header(tensors, metadata)


def _tensor(name: str, value: dict[str, Any], base: int, widened: str | None) -> StoredTensor:
    code, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    if any(type(number) is not int or not 0 <= number < 1 << 58 for number in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has extents or positions that are not natural numbers")
    dtype = _NAMES.get(code, code)
    if widened is not None:
        if widened not in DTYPES or shape[-1:] != [DTYPES[widened].parts]:
            raise ValueError(f"tensor {name!r} is not {widened!r}")
        dtype, shape = widened, shape[:-1]
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != stop - start:
        raise ValueError(f"tensor {name!r} of shape {shape} has {stop - start} bytes")
    return StoredTensor(name, dtype, tuple(shape), base + start, stop - start)


def _check_positions(file: Path, tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    """Raise unless tensors fill the file without gap or overlap, as the format requires."""
    position = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != position:
            kind = "overlaps another" if tensor.start < position else "leaves a gap before it"
            raise _malformed(file, f"tensor '{tensor.name}' {kind}")
        position += tensor.nbytes
    if position > size:
        raise CheckpointError(
            f"'{file}' is truncated: it has {size} bytes, expected {position}.", remedy=_RESTORE
        )
    if position < size:
        raise _malformed(file, f"it has {size} bytes and its tensors end at {position}")


def encode_header(
    entries: Sequence[TensorEntry], names: Mapping[str, str], metadata: Mapping[str, str]
) -> tuple[list[str], bytes]:
    """Return the first bytes of a file.

    Args:
        entries: The entries of the file.
        names: The name of each entry in the file, by its logical name.
        metadata: Further text by key.

    Returns:
        The logical names in the order in which their data follows, and the bytes.
    """
    # The widest numbers first, so that each tensor is aligned for programs that map the file into memory.
    order = sorted(entries, key=lambda entry: -(DTYPES[entry.dtype_name].itemsize))
    body: dict[str, Any] = {}
    widened: dict[str, str] = {}
    start = 0
    for entry in order:
        name, shape = names[entry.name], list(entry.shape)
        stored = DTYPES[entry.dtype_name]
        if entry.dtype_name not in _CODES:
            widened[name] = entry.dtype_name
            shape.append(stored.parts)
        code = _CODES.get(entry.dtype_name, stored.code)
        body[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + entry.nbytes]}
        start += entry.nbytes
    extra = {_COMPLEX_KEY: json.dumps(widened)} if widened else {}
    text = json.dumps({"__metadata__": {"format": "pt", **metadata, **extra}, **body}, separators=(",", ":"))
    data = text.encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    return [entry.name for entry in order], struct.pack("<Q", len(data)) + data


_RESTORE = "Restore it from a backup, or use another checkpoint."


def _malformed(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"'{file}' is not a valid safetensors file: {why}.", remedy=_RESTORE)

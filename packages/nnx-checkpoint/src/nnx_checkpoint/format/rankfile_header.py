"""Write and parse the header of a rank file."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.storage.streams import ALIGNMENT


@dataclass(frozen=True, slots=True)
class StoredType:
    """The stored form of one element type.

    Attributes:
        code: Its name in a safetensors header.
        itemsize: Bytes of one element.
        parts: Numbers in one element: 2 for complex types. safetensors has none, so they are stored with a
            further last dim of extent 2.
    """

    code: str
    itemsize: int
    parts: int = 1


DTYPES: dict[str, StoredType] = {
    "bool": StoredType("BOOL", 1),
    "uint8": StoredType("U8", 1),
    "int8": StoredType("I8", 1),
    "uint16": StoredType("U16", 2),
    "int16": StoredType("I16", 2),
    "uint32": StoredType("U32", 4),
    "int32": StoredType("I32", 4),
    "uint64": StoredType("U64", 8),
    "int64": StoredType("I64", 8),
    "float8_e4m3fn": StoredType("F8_E4M3", 1),
    "float8_e5m2": StoredType("F8_E5M2", 1),
    "float16": StoredType("F16", 2),
    "bfloat16": StoredType("BF16", 2),
    "float32": StoredType("F32", 4),
    "float64": StoredType("F64", 8),
    "complex64": StoredType("F32", 8, parts=2),
    "complex128": StoredType("F64", 16, parts=2),
}
"""The element types that a checkpoint can hold, by torch's names without the ``torch.`` prefix."""


def width(dtype_name: str) -> int:
    """Return the bytes of one number of this type; a complex element has two of them."""
    stored = DTYPES[dtype_name]
    return stored.itemsize // stored.parts


@dataclass(frozen=True, slots=True)
class Entry:
    """One box of a tensor in a rank file, without its data.

    Attributes:
        name: The name of the tensor.
        shape: The global shape of the tensor.
        dtype_name: The element type of the tensor.
        box: The box.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Its length in the file."""
        return self.box.numel * DTYPES[self.dtype_name].itemsize


def file_order(entries: Sequence[Entry]) -> list[int]:
    """Return the order of entries in a file: widest numbers first, then by name and offset."""

    def key(i: int) -> tuple[int, str, tuple[int, ...]]:
        return -width(entries[i].dtype_name), entries[i].name, entries[i].box.offset

    return sorted(range(len(entries)), key=key)


# The key of an entry is its tensor's name, or a numbered one for a further box of the tensor. The metadata
# hold the facts without a standard field: name, dtype and shape of the logical tensor, and the offset of the
# box. An unsharded tensor of a type of safetensors needs none.


def _header(entries: Sequence[Entry]) -> bytes:
    """Return the header, built as text: with `json`, small tensors would take most of their time here."""
    fields: list[str] = []
    origins: list[str] = []
    offsets: list[str] = []
    known: dict[tuple[str, tuple[int, ...], Box], _Fields] = {}
    keys = _Keys({entry.name for entry in entries})
    start = 0
    for entry in entries:
        like = (entry.dtype_name, entry.shape, entry.box)
        found = known.get(like)
        if found is None:
            found = known[like] = _fields(entry)
        key = keys.next(entry.name)
        quoted = json.dumps(key)
        stop = start + found.nbytes
        fields.append(f'{quoted}:{{{found.fields},"data_offsets":[{start},{stop}]}}')
        # torch's own Hugging Face reader requires this entry.
        offsets.append(f'{quoted}:{{"saved_offsets":{found.saved}}}')
        if not found.plain or key != entry.name:
            name = quoted if key == entry.name else json.dumps(entry.name)
            origins.append(f'{quoted}:{{"name":{name},{found.origin}}}')
        start = stop
    metadata = {"format": "pt", "DCP_SHARDING_INFO": _object(offsets), "nnx": _object(origins)}
    head = f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}'
    text = _object([head, *fields]).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True)
class _Fields:
    """The header's facts about entries that differ in their names only."""

    nbytes: int
    fields: str
    saved: str
    origin: str
    plain: bool
    """True if standard fields suffice: an unsharded tensor of a type of safetensors."""


def _fields(entry: Entry) -> _Fields:
    stored = DTYPES[entry.dtype_name]
    parts = [stored.parts] if stored.parts > 1 else []
    shape = json.dumps([*entry.box.size, *parts], separators=(",", ":"))
    origin = {"dtype": entry.dtype_name, "shape": entry.shape, "offset": entry.box.offset}
    return _Fields(
        nbytes=entry.nbytes,
        fields=f'"dtype":"{stored.code}","shape":{shape}',
        saved=json.dumps([*entry.box.offset, *(0 for _ in parts)], separators=(",", ":")),
        origin=json.dumps(origin, separators=(",", ":"))[1:-1],
        plain=not parts and entry.box == Box.whole(entry.shape),
    )


def _object(members: Sequence[str]) -> str:
    return f"{{{','.join(members)}}}"


class _Keys:
    """Unique keys: a tensor's name for its first box in this file, a numbered name for further boxes."""

    def __init__(self, names: set[str]) -> None:
        self._taken = {"__metadata__"} | names
        self._numbers = {"__metadata__": 0}  # the last number of each name: a count from 1 is quadratic

    def next(self, name: str) -> str:
        if name not in self._numbers:
            self._numbers[name] = 0
            return name
        while True:
            self._numbers[name] += 1
            key = f"{name}#{self._numbers[name]}"
            if key not in self._taken:
                return key


_PLAIN = {stored.code: name for name, stored in DTYPES.items() if stored.parts == 1}


_MOST_BYTES = 1 << 62
"""The longest file; positions below it fit into 64 bits."""


_Claim = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
"""A header's claim about an entry: dtype, global shape, size of the box, range of bytes in the data."""


def parse_header(raw: bytes) -> dict[tuple[str, tuple[int, ...]], _Claim]:
    """Return the entries of a header, by the name of the tensor and the offset of the box.

    Args:
        raw: All bytes of a rank file before its data.

    Raises:
        ValueError, KeyError, TypeError and the like: The bytes are not the header of a rank file.
    """
    (length,) = struct.unpack_from("<Q", raw)
    if length != len(raw) - 8:
        raise ValueError(f"it claims {length} bytes and has {len(raw) - 8}")
    fields = json.loads(raw[8:])
    origins = json.loads(fields.pop("__metadata__")["nnx"])
    claims: dict[tuple[str, tuple[int, ...]], _Claim] = {}
    for key, found in fields.items():
        name, offset, claim = _claim(key, found, origins.get(key))
        if (name, offset) in claims:
            raise ValueError(f"two entries have tensor {name!r} at {offset}")
        claims[name, offset] = claim
    return claims


def _claim(
    key: str, found: Mapping[str, Any], origin: Mapping[str, Any] | None
) -> tuple[str, tuple[int, ...], _Claim]:
    size, (start, stop) = found["shape"], found["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= _MOST_BYTES:
        raise ValueError(f"bytes {start!r} to {stop!r} of entry {key!r}")
    if origin is None:
        return key, (0,) * len(size), (_PLAIN[found["dtype"]], tuple(size), tuple(size), start, stop)
    stored, name = DTYPES[origin["dtype"]], origin["name"]
    if stored.parts > 1:
        if size[-1:] != [stored.parts]:
            raise ValueError(f"entry {key!r} is not {origin['dtype']}")
        size = size[:-1]
    if found["dtype"] != stored.code:
        raise ValueError(f"entry {key!r} is not {origin['dtype']}")
    if key != name and not re.fullmatch(re.escape(name) + r"#\d+", key):
        raise ValueError(f"entry {key!r} is called {name!r}")
    claim = (origin["dtype"], tuple(origin["shape"]), tuple(size), start, stop)
    return name, tuple(origin["offset"]), claim


@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """The positions of the entries of a rank file.

    Attributes:
        tensors: A number for the tensor of each entry, in ascending order; boxes of one tensor are in
            order of their offsets.
        starts: Position of the first byte of each entry in the file.
        blocks: Number of the first checksum of each entry.
        block_count: The number of checksums in the file.
    """

    tensors: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    block_count: int

    def find(self, tensor: int, number: int) -> tuple[int, int]:
        """Return the position of an entry, and the number of its first checksum.

        Args:
            tensor: The number of the tensor.
            number: The number of the box among the tensor's boxes in this file.
        """
        row = int(self.tensors.searchsorted(tensor)) + number
        return self.starts.item(row), self.blocks.item(row)

    def rows(self, tensors: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the result of `find` for all entries, given the tensor of each."""
        rows = np.argsort(np.argsort(tensors, kind="stable"), kind="stable")
        return zip(self.starts[rows].tolist(), self.blocks[rows].tolist(), strict=True)

    @property
    def key(self) -> bytes:
        """A hash that is equal for files with entries of the same tensors at the same positions."""
        arrays = (self.tensors, self.starts, self.blocks)
        return xxhash.xxh3_128_digest(b"".join(array.tobytes() for array in arrays))


_MALFORMED = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


def find_offsets(
    header: bytes, entries: Sequence[Entry], tensors: Sequence[int], *, block: int, source: str
) -> Offsets:
    """Return the positions of entries from a header.

    Args:
        header: All bytes of a rank file before its data.
        entries: All entries of the file according to the index.
        tensors: A number for the tensor of each entry.
        block: Bytes under one checksum.
        source: The path of the file, for messages.

    Raises:
        CheckpointError: The header is malformed, or contradicts the index.
    """
    nbytes = np.array([entry.nbytes for entry in entries], np.int64)
    order = np.array(file_order(entries), np.int64)
    if header != _header([entries[i] for i in order]):  # not written by nnx: the format allows other orders
        order = _order_of(header, entries, nbytes, source)
    starts, blocks = np.empty_like(nbytes), np.empty_like(nbytes)
    count = -(-nbytes // block)
    starts[order] = len(header) + np.cumsum(nbytes[order]) - nbytes[order]
    blocks[order] = np.cumsum(count[order]) - count[order]
    row = np.argsort(tensors, kind="stable")
    return Offsets(np.array(tensors, np.int64)[row], starts[row], blocks[row], int(count.sum()))


def _order_of(header: bytes, entries: Sequence[Entry], nbytes: npt.NDArray[np.int64], source: str) -> Any:
    """Return the order of entries in a file, and refuse gaps between them."""
    try:
        claims = parse_header(header)
    except _MALFORMED as error:
        raise _unusable(f"the header of '{source}' is malformed: {type(error).__name__}: {error}.") from error
    starts = np.empty_like(nbytes)
    for i, entry in enumerate(entries):
        claim = claims.pop((entry.name, entry.box.offset), None)
        start = claim[3] if claim else 0
        if claim != (entry.dtype_name, entry.shape, entry.box.size, start, start + entry.nbytes):
            raise _contradiction(source, entry.name)
        starts[i] = start
    for name, _ in claims:
        raise _contradiction(source, name)
    order = np.lexsort((nbytes, starts))
    expected = np.cumsum(nbytes[order]) - nbytes[order]
    for row in order[starts[order] != expected].tolist():
        raise _contradiction(source, entries[row].name)
    return order


def _contradiction(source: str, name: str) -> CheckpointError:
    return _unusable(f"the header of '{source}' and the index contradict each other about '{name}'.")


def _unusable(message: str) -> CheckpointError:
    return CheckpointError(
        message, remedy="Resume from another checkpoint; this one was not written by a working nnx."
    )

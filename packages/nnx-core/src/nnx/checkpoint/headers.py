"""The header of a rank file, compared with the index.

We read by the index, other programs that read safetensors by the headers. Where the two differ, a checkpoint
is one thing for us and another for them. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnx.checkpoint.dtypes import DTYPES
from nnx.checkpoint.index import Piece, TensorEntry
from nnx.checkpoint.manifest import load_json

__all__ = ["find_contradiction"]

_PLAIN = {stored.code: name for name, stored in DTYPES.items() if stored.parts == 1}


@dataclass(frozen=True, slots=True)
class _Claim:
    """One box of a tensor, and which bytes of the file's data it has."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int


def find_contradiction(header: bytes, pieces: Sequence[tuple[Piece, TensorEntry]]) -> str:
    """Say where the header of a rank file differs from the index; empty if it does not.

    Args:
        header: The file's bytes before its data.
        pieces: What the index says of the file.
    """
    try:
        claimed = set(_claims(header))
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        return f"its header is malformed: {type(error).__name__}: {error}."
    expected = {
        _Claim(
            tensor.name,
            tensor.dtype_name,
            tuple(tensor.shape),
            piece.box.offset,
            piece.box.size,
            piece.start - len(header),
            piece.start - len(header) + piece.nbytes,
        )
        for piece, tensor in pieces
    }
    differing = min((claim.name for claim in claimed ^ expected), default=None)
    return "" if differing is None else f"its header and the index contradict each other about '{differing}'."


def _claims(raw: bytes) -> Iterator[_Claim]:
    (length,) = struct.unpack_from("<Q", raw)
    if length != len(raw) - 8:
        raise ValueError(f"it says that it has {length} bytes and has {len(raw) - 8}")
    entries = load_json(raw[8:])
    metadata = entries.pop("__metadata__")
    if metadata["format"] != "pt":
        raise ValueError(f"format {metadata['format']!r}")
    origins, offsets = (load_json(metadata[key].encode()) for key in ("nnx", "DCP_SHARDING_INFO"))
    for table in (origins, offsets):
        if table.keys() - entries.keys():
            raise ValueError(f"it has no entry {min(table.keys() - entries.keys())!r}")
    for key, entry in entries.items():
        yield _claim(key, entry, origins.get(key), offsets[key]["saved_offsets"])


def _claim(
    key: str, entry: Mapping[str, Any], origin: Mapping[str, Any] | None, saved: Sequence[int]
) -> _Claim:
    size, (start, stop) = entry["shape"], entry["data_offsets"]
    if origin is None:
        origin = {"name": key, "dtype": _PLAIN[entry["dtype"]], "shape": size, "offset": [0 for _ in size]}
    stored = DTYPES[origin["dtype"]]
    more = [stored.parts] if stored.parts > 1 else []
    if entry["dtype"] != stored.code or size[len(size) - len(more) :] != more:
        raise ValueError(f"entry {key!r} is not {origin['dtype']}")
    if saved != [*origin["offset"], *(0 for _ in more)]:
        raise ValueError(f"entry {key!r} has two offsets")
    name = origin["name"]
    if key != name and not re.fullmatch(re.escape(name) + r"#\d+", key):
        raise ValueError(f"entry {key!r} is called {name!r}")
    box = tuple(origin["offset"]), tuple(size[: len(size) - len(more)])
    return _Claim(name, origin["dtype"], tuple(origin["shape"]), *box, start, stop)

"""Write a file of `torch.save` by streaming.

A file of ``torch.save`` is an uncompressed zip archive: a pickle that describes the tensors, and their
elements. It is written from beginning to end, in bounded memory: its length is known before any element is
read. Checksums follow the data that they cover, as the zip format allows and torch does too, so that nothing
is written twice. Any zip tool can check the file.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnx_base.errors import CheckpointError
from nnx_checkpoint._torch_compat import rebuilding, storage_kind
from nnx_checkpoint.format.codec import EnumName
from nnx_checkpoint.format.rankfile import flat_bytes
from nnx_checkpoint.reading.formats import Progress
from nnx_checkpoint.reading.naming import (
    StoredName,
)
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import read_in_order, stream_to

_PROTOCOL = 2


_DATA_ALIGNMENT = 64


_LARGE = 0xFFFFFFFF
"""The size and position from which the fields of ZIP64 are required."""


_FLAGS = 0x0808
"""Names are UTF-8; checksum and lengths follow the data."""


_DATE = 0x0021
"""The first of January 1980, a constant so that equal contents give equal files."""


def write_torch_file(path: Path, tree: Any, checkpoint: Checkpoint, *, name: str, progress: Progress) -> None:
    """Write a tree like ``torch.save``.

    Args:
        path: The file, which must not exist.
        tree: A tree of objects that pickle can write. A `StoredName` in it becomes a tensor; several of one
            name become tensors that share their memory.
        checkpoint: The checkpoint to read the data of stored names from.
        name: The name of the archive inside the file.
        progress: Function of the bytes of stored tensors done and their total.

    Raises:
        CheckpointError: An object in the tree cannot be pickled, or reading or writing failed.
    """
    pickler, described = _describe(tree)
    head = {
        "data.pkl": described,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
    }
    tail = {"version": b"3\n", ".data/serialization_id": b"0" * 40}
    sizes = [
        *((record, len(data)) for record, data in head.items()),
        *((f"data/{i}", nbytes) for i, nbytes in enumerate(pickler.sizes())),
        *((record, len(data)) for record, data in tail.items()),
    ]
    layout = ZipLayout([(f"{name}/{record}", nbytes) for record, nbytes in sizes])
    names = [value.key for value in pickler.tensors if isinstance(value, StoredName)]
    read = groupby(read_in_order(checkpoint, names, progress=progress), key=lambda part: part.name)

    def records() -> Iterator[Iterable[memoryview]]:
        yield from ([memoryview(data)] for data in head.values())
        for value in pickler.tensors:
            yield (
                (part.data for part in next(read)[1]) if isinstance(value, StoredName) else flat_bytes(value)
            )
        yield from ([memoryview(data)] for data in tail.values())

    with stream_to(path, size=layout.size) as stream:
        layout.write(stream.append, records())
        stream.finish()


def _describe(tree: Any) -> tuple[_Pickler, bytes]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(tree)
    except CheckpointError:
        raise
    except Exception as error:  # the objects' own methods may raise anything
        raise CheckpointError(
            f"an object in the checkpoint cannot be pickled: {type(error).__name__}: {error}.",
            remedy="Convert to another format, or to the weights alone (`save_weights_only=True`).",
        ) from error
    return pickler, buffer.getvalue()


@dataclass(frozen=True, slots=True)
class _Storage:
    """The elements of a tensor, which have their own record."""

    kind: Any
    record: str
    count: int


class _Pickler(pickle.Pickler):
    """Pickles tensors like torch, by the record of their elements."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[StoredName | Tensor] = []
        """The tensors of records 0, 1, ..."""
        self._records: dict[Any, int] = {}

    def sizes(self) -> Iterator[int]:
        """Yield the bytes of each record."""
        for value in self.tensors:
            yield value.stored.entry(value.key).nbytes if isinstance(value, StoredName) else value.nbytes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, StoredName):
            entry = value.stored.entry(value.key)
            return self._reduce(StoredName(value.stored, entry.name), entry.name, entry.shape, entry.dtype)
        if type(value) is Tensor:
            return self._reduce(value.detach(), id(value), tuple(value.shape), value.dtype)
        if isinstance(value, EnumName):
            raise CheckpointError(
                f"the checkpoint holds {value.name} of the enum {value.type}, which is not imported.",
                remedy=f"Import {value.type.partition(':')[0]} before converting.",
            )
        return NotImplemented

    def _reduce(
        self, value: StoredName | Tensor, key: Any, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Any:
        number = self._records.setdefault(key, len(self._records))
        if number == len(self.tensors):
            self.tensors.append(value)
        kind, count = storage_kind(dtype), torch.Size(shape).numel()
        if kind is torch.UntypedStorage:
            count *= dtype.itemsize
        return rebuilding(_Storage(kind, str(number), count), shape, dtype)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", value.kind, value.record, "cpu", value.count)
        return None


@dataclass(slots=True)
class _Record:
    name: bytes
    size: int
    position: int
    checksum: int = 0

    @property
    def large(self) -> bool:
        return self.size >= _LARGE


class ZipLayout:
    """The layout of a zip archive of records with known lengths, before their contents are read.

    Every record's data starts at a multiple of 64 bytes, counted from the start of the archive.

    Args:
        records: Name and length of each.
    """

    def __init__(self, records: Iterable[tuple[str, int]]) -> None:
        self._records: list[_Record] = []
        position = 0
        for name, size in records:
            record = _Record(name.encode(), size, position)
            self._records.append(record)
            position += len(_local_header(record)) + size + len(_descriptor(record))
        self._directory = position
        self.size = position + len(_directory(self._records, position))
        """Length of the archive."""

    def write(self, append: Callable[[memoryview], object], data: Iterable[Iterable[memoryview]]) -> None:
        """Write the archive.

        Args:
            append: Function that writes the next bytes.
            data: For each record the slices of its data, which together have its length.
        """
        for record, parts in zip(self._records, data, strict=True):
            append(memoryview(_local_header(record)))
            for part in parts:
                record.checksum = zlib.crc32(part, record.checksum)
                append(part)
            append(memoryview(_descriptor(record)))
        append(memoryview(_directory(self._records, self._directory)))


def _local_header(record: _Record) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if record.large else b""
    start = record.position + 30 + len(record.name) + len(extra) + 4
    padding = -start % _DATA_ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
    length = _LARGE if record.large else 0
    version = 45 if record.large else 20
    fixed = (b"PK\x03\x04", version, _FLAGS, 0, 0, _DATE, 0, length, length, len(record.name), len(extra))
    return struct.pack("<4s5H3I2H", *fixed) + record.name + extra


def _descriptor(record: _Record) -> bytes:
    kind = "<4sIQQ" if record.large else "<4sIII"
    return struct.pack(kind, b"PK\x07\x08", record.checksum, record.size, record.size)


def _directory(records: Sequence[_Record], start: int) -> bytes:
    body = b"".join(_directory_entry(record) for record in records)
    count, end = len(records), start + len(body)
    tail = b""
    if count >= 0xFFFF or end >= _LARGE:
        numbers = (44, 45, 45, 0, 0, count, count, len(body), start)
        tail = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", *numbers)
        tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    shown = min(count, 0xFFFF)
    sizes = (min(len(body), _LARGE), min(start, _LARGE))
    return body + tail + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, shown, shown, *sizes, 0)


def _directory_entry(record: _Record) -> bytes:
    far = record.position >= _LARGE
    wide = [record.size, record.size] if record.large else []
    wide += [record.position] if far else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, version = min(record.size, _LARGE), 45 if wide else 20
    fixed = (b"PK\x01\x02", version, version, _FLAGS, 0, 0, _DATE, record.checksum, size, size)
    more = (len(record.name), len(extra), 0, 0, 0, 0, min(record.position, _LARGE))
    return struct.pack("<4s6H3I", *fixed) + struct.pack("<5H2I", *more) + record.name + extra

"""Zip files of ``torch.save`` that hold one tensor: where its elements are, from a few hundred bytes.

Only the zip's directory and the pickle are read, which lie at its two ends. The pickle is read by an
unpickler that knows nothing but tensors and calls nothing of torch. Positions count from the beginning of
the zip, so that it may lie inside another file.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from nnx.checkpoint._torch_compat import STORAGE_DTYPES

__all__ = ["DescribedTensor", "TorchArchive", "describe_tensor"]

_END = 2048
"""Bytes read at once at each end: what precedes and what follows the elements, usually."""
_LONGEST_PICKLE = 1 << 16
"""A tensor's pickle has some 200 bytes."""
_LONGEST_DIRECTORY = 1 << 16
"""It lists some seven records."""
_LOCAL, _CENTRAL = struct.Struct("<4s22xHH"), struct.Struct("<4s6xH8xIIHHH8xI")
_END_RECORD, _LOCATOR = struct.Struct("<4s6xHII2x"), struct.Struct("<4s4xQ4x")
_END_RECORD_64 = struct.Struct("<4s28xQQQ")
_UNKNOWN = 0xFFFFFFFF


class TorchArchive:
    """The records of a zip file of ``torch.save``, found by reading little more than its ends.

    Args:
        read: Gives the bytes at a position, so many of them.
        length: Length of the file.

    Raises:
        ValueError: It is no such file, or it is damaged.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self._length = read, length
        self._head: bytes = read(0, min(_END, length))
        size = min(_END, length)
        self._tail: bytes = self._head if size == length else read(length - size, size)
        self._records = self._directory()

    @property
    def byte_order(self) -> bytes:
        """What the record of that name says; empty where there is none, as before torch 2.1."""
        return self.record("byteorder", 16) if "byteorder" in self._records else b""

    def record(self, name: str, longest: int) -> bytes:
        """The bytes of a record."""
        start, size = self.place(name)
        if size > longest:
            raise ValueError(f"record {name} has {size} bytes")
        return self._bytes(start, size)

    def place(self, name: str) -> tuple[int, int]:
        """Position and length of a record's data."""
        if name not in self._records:
            raise ValueError(f"it has no record {name}")
        header, size = self._records[name]
        signature, name_length, extra = _LOCAL.unpack(self._bytes(header, _LOCAL.size))
        start = header + _LOCAL.size + name_length + extra
        if signature != b"PK\x03\x04" or start + size > self._length:
            raise ValueError(f"the header of record {name} is damaged")
        return start, size

    def _bytes(self, start: int, size: int) -> bytes:
        if start + size > self._length:
            raise ValueError("it ends too early")
        if start + size <= len(self._head):
            return self._head[start : start + size]
        before = self._length - len(self._tail)
        if start >= before:
            return self._tail[start - before : start - before + size]
        return self._read(start, size)

    def _directory(self) -> dict[str, tuple[int, int]]:
        """For each record, without the archive's name, where its header is and how long its data."""
        end = self._length - _END_RECORD.size
        signature, count, size, start = _END_RECORD.unpack(self._bytes(max(end, 0), _END_RECORD.size))
        if signature != b"PK\x05\x06":
            raise ValueError("it is not a zip file of torch.save, or it is truncated")
        signature, place = _LOCATOR.unpack(self._bytes(end - _LOCATOR.size, _LOCATOR.size))
        if signature == b"PK\x06\x07":
            signature, count, size, start = _END_RECORD_64.unpack(self._bytes(place, _END_RECORD_64.size))
            if signature != b"PK\x06\x06":
                raise ValueError("its directory is damaged")
        if size > _LONGEST_DIRECTORY:
            raise ValueError(f"its directory has {size} bytes")
        directory = self._bytes(start, size)
        records, position = {}, 0
        for _ in range(count):
            name, place, size, position = _entry(directory, position)
            records[name] = (place, size)
        return records


def _entry(directory: bytes, position: int) -> tuple[str, int, int, int]:
    """One entry of a zip's directory: name, position of its header, length, and where the next begins."""
    signature, method, stored, size, name, extra, comment, place = _CENTRAL.unpack_from(directory, position)
    if signature != b"PK\x01\x02" or method != 0 or stored != size:
        raise ValueError("its directory is damaged or names compressed records")
    start = position + _CENTRAL.size
    text = directory[start : start + name].decode()
    more = directory[start + name : start + name + extra]
    if _UNKNOWN in (size, place):
        size, place = _long_fields(more, size, place)
    return text.partition("/")[2], place, size, start + name + extra + comment


def _long_fields(extra: bytes, size: int, place: int) -> tuple[int, int]:
    """What does not fit into 32 bits is in a field with tag 1: length, stored length, position."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            if size == _UNKNOWN:
                size = values.pop(0)
                values.pop(0)
            return size, values.pop(0) if place == _UNKNOWN else place
        position += 4 + length
    raise ValueError("its directory is damaged")


# --- the pickle of a tensor -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as its pickle describes it.

    Attributes:
        storage: Name of the record that has its elements, below ``data/``.
        dtype_name: Its element type, without ``torch.``.
        offset: How many elements precede its first one in the record.
        shape: Its shape.
        stride: Its strides, in elements.
        plain: Whether the stored elements are its values as they are.
    """

    storage: str
    dtype_name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    plain: bool


def _describe(
    storage: tuple[str, str],
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    *more: Any,
) -> DescribedTensor:
    """Called in place of torch's ``_rebuild_tensor_v2`` and ``_rebuild_tensor_v3``."""
    key, dtype_name = storage
    names = [value for value in more if isinstance(value, str)]
    flags = [value for value in more if isinstance(value, Mapping) and value]
    return DescribedTensor(
        key, names[0] if names else dtype_name, offset, tuple(shape), tuple(stride), not flags
    )


def _first(value: Any, *more: Any) -> Any:
    """Called in place of torch's ``_rebuild_parameter``."""
    return value


class _TensorUnpickler(pickle.Unpickler):
    """Knows how torch pickles tensors, and nothing else."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _describe
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _first
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if module in ("torch", "torch.storage") and (name == "UntypedStorage" or name.islower()):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a plain tensor")

    @override
    def persistent_load(self, pid: Any, /) -> tuple[str, str]:
        _, dtype_name, key, *_ = pid
        return key, dtype_name


def describe_tensor(archive: TorchArchive) -> DescribedTensor:
    """What the pickle says of the tensor.

    Raises:
        ValueError: The file holds something else.
        pickle.UnpicklingError: The same, or it is damaged or malicious.
    """
    described = _TensorUnpickler(archive.record("data.pkl", _LONGEST_PICKLE)).load()
    if not isinstance(described, DescribedTensor):
        raise ValueError(f"it holds a {type(described).__name__} instead of a tensor")
    if archive.byte_order not in (b"", b"little"):
        raise ValueError("its bytes are in big-endian order")
    return described

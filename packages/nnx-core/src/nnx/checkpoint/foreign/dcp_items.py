"""Items in the data files of a DCP directory: where the elements of a tensor lie, and objects.

Every item is a little zip file of ``torch.save``. For a tensor only its directory and its pickle are read,
a few hundred bytes at its two ends, and the pickle by an unpickler that knows nothing but tensors; so
opening is quick with many thousands of items. Objects go through torch's restricted unpickler.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from nnx.box import Box, find_fault
from nnx.checkpoint.foreign.dcp_metadata import Item, StoredTensor
from nnx.checkpoint.foreign.torch_file import (
    DescribedTensor,
    TorchArchive,
    describe_tensor,
    load_torch_file,
    refuse_swollen,
)
from nnx.checkpoint.index import Piece, TensorEntry
from nnx.checkpoint.reader import Fetcher, PlainFiles, Wanted
from nnx.checkpoint.storage.files import FileReader, is_file, require_inside
from nnx.errors import CheckpointError

__all__ = ["Items", "LocatedTensor"]


_SMALL = 1 << 20
"""Bytes that parts may share beyond four times their file's; each part is read by itself."""


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor whose elements were found in the data files.

    Attributes:
        shape: Its shape.
        dtype_name: Its element type, without ``torch.``.
        pieces: Where its boxes are; without those that are not in row-major order.
        resident: The complete tensor, where some box is not in row-major order.
    """

    shape: tuple[int, ...]
    dtype_name: str
    pieces: tuple[Piece, ...]
    resident: Tensor | None = None

    def read(self) -> Tensor:
        """Read it into new memory."""
        if self.resident is not None:
            return self.resident
        entry = TensorEntry("", self.shape, self.dtype_name, self.pieces)
        tensor = torch.empty(self.shape, dtype=entry.dtype)
        Fetcher(PlainFiles()).fetch([Wanted(entry, Box.whole(self.shape), tensor)])
        return tensor


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensor of one item."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype_name: str
    start: int
    nbytes: int
    plain: bool
    """Whether its elements are in row-major order, and are its values as they are."""


class Items:
    """Reads items of one directory, whose files stay open meanwhile.

    Args:
        directory: The checkpoint.
        weights_only: False unpickles objects freely.
    """

    def __init__(self, directory: Path, *, weights_only: bool) -> None:
        self._directory = directory
        self._weights_only = weights_only
        self._readers: dict[str, FileReader] = {}
        self._objects: dict[bytes, Any] = {}
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers.values():
            reader.close()

    def check_lengths(self, items: Iterable[Item]) -> None:
        """Make sure that every file is there and reaches as far as its items.

        Raises:
            CheckpointError: A file is missing or too short.
        """
        ends: dict[str, int] = {}
        claimed: dict[str, int] = {}
        for item in items:
            ends[item.file] = max(ends.get(item.file, 0), item.start + item.length)
            claimed[item.file] = claimed.get(item.file, 0) + item.length
        for file, end in sorted(ends.items()):
            path = self._directory / file
            if is_file(path):
                require_inside(path, self._directory)
            else:
                raise CheckpointError(
                    f"'{path}' is missing, and the metadata says that data is in it.",
                    remedy="Restore the files of all ranks, or resume from another checkpoint.",
                )
            size = self._sizes[file] = path.stat().st_size
            if size < end:
                raise CheckpointError(
                    f"'{path}' is truncated: it has {size} bytes, and the metadata says "
                    f"that data reaches to {end}.",
                    remedy="Restore it from a backup, or resume from another checkpoint.",
                )
            if claimed[file] > 4 * size + _SMALL:
                raise CheckpointError(
                    f"'{path}' has {size:,} bytes, and the metadata says that parts of {claimed[file]:,} "
                    "bytes are in it.",
                    remedy="Resume from another checkpoint; torch writes each part once.",
                )

    def load(self, name: str, item: Item) -> Any:
        """Read an object; equal bytes are unpickled once.

        Tensors in an object that has a file to itself stay there, as `FileTensor`.
        """
        if item.start == 0 and item.length == self._sizes[item.file]:
            return load_torch_file(self._directory / item.file, weights_only=self._weights_only)
        raw = self._read(item, 0, item.length)
        if raw not in self._objects:
            self._objects[raw] = self._unpickle(name, item, raw)
        return deepcopy(self._objects[raw])

    def locate(self, tensor: StoredTensor) -> LocatedTensor:
        """Find the elements of a tensor.

        Raises:
            CheckpointError: An item is damaged or is not what the metadata says, or a part is missing.
        """
        fault = find_fault(tensor.shape, {chunk.box for chunk in tensor.chunks})
        if fault:
            raise CheckpointError(
                f"the files of '{self._directory}' do not make up tensor '{tensor.name}' of shape "
                f"{tensor.shape}: {fault}.",
                remedy="Make sure that the files of all ranks are there.",
            )
        found = [(chunk, self._find(tensor.name, chunk.box, chunk.item)) for chunk in tensor.chunks]
        types = {part.dtype_name for _, part in found} or {tensor.dtype_name}
        if len(types) > 1:
            raise CheckpointError(
                f"the parts of tensor '{tensor.name}' in '{self._directory}' have different element types: "
                f"{', '.join(sorted(types))}.",
                remedy="The files are of different saves; resume from another checkpoint.",
            )
        pieces = tuple(
            Piece(chunk.box, str(self._directory / chunk.item.file), part.start, part.nbytes)
            for chunk, part in found
            if part.plain
        )
        resident = None
        if len(pieces) < len(found):
            resident = torch.empty(tensor.shape, dtype=getattr(torch, next(iter(types))))
            for chunk, _ in found:
                raw = self._read(chunk.item, 0, chunk.item.length)
                resident[chunk.box.slices] = self._unpickle(tensor.name, chunk.item, raw)
        return LocatedTensor(tensor.shape, types.pop(), pieces, resident)

    # --- one item ---------------------------------------------------------------------------------

    def _find(self, name: str, box: Box, item: Item) -> _Found:
        try:
            archive = TorchArchive(lambda start, size: self._read(item, start, size), item.length)
            found = _placed(describe_tensor(archive), archive, item)
        except CheckpointError:
            raise
        except Exception as error:  # whatever damage makes the code above raise
            remedy = "Restore it from a backup, or resume from another checkpoint."
            raise self._unreadable(name, item, str(error) or type(error).__name__, remedy) from error
        if found.shape != box.size:
            why = f"it holds shape {found.shape}, and the metadata says {box.size}"
            raise self._unreadable(
                name, item, why, "The files are of different saves; use another checkpoint."
            )
        return found

    def _unpickle(self, name: str, item: Item, raw: bytes) -> Any:
        try:
            if self._weights_only:
                refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=str(self._directory / item.file))
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=self._weights_only)
        except CheckpointError:
            raise
        except Exception as error:  # whatever damage or the pickle makes it raise
            reason = str(error).strip().split("\n")[0]
            raise self._unreadable(
                name,
                item,
                f"{type(error).__name__}: {reason}",
                "If it is whole and you trust whoever wrote it, pass `weights_only=False`."
                if self._weights_only
                else "Restore it from a backup, or resume from another checkpoint.",
            ) from error

    def _read(self, item: Item, start: int, size: int) -> bytes:
        if item.file not in self._readers:
            self._readers[item.file] = FileReader(self._directory / item.file)
        data = bytearray(size)
        self._readers[item.file].read_into(item.start + start, memoryview(data))
        return bytes(data)

    def _unreadable(self, name: str, item: Item, why: str, remedy: str) -> CheckpointError:
        place = f"'{self._directory / item.file}' at byte {item.start}"
        return CheckpointError(f"cannot read '{name}' in {place}: {why}.", remedy=remedy)


def _placed(tensor: DescribedTensor, archive: TorchArchive, item: Item) -> _Found:
    itemsize = getattr(torch, tensor.dtype_name).itemsize
    start, size = archive.place(f"data/{tensor.storage}")
    nbytes = math.prod(tensor.shape) * itemsize
    first = tensor.offset * itemsize
    if first + nbytes > size:
        raise ValueError(f"it has {size} bytes of data for shape {tensor.shape} of {tensor.dtype_name}")
    plain = tensor.plain and _is_row_major(tensor.shape, tensor.stride)
    return _Found(tensor.shape, tensor.stride, tensor.dtype_name, item.start + start + first, nbytes, plain)


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= extent
    return True

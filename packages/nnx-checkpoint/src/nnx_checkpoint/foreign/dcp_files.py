"""Read the files of a DCP directory: their tensors, objects, and the positions of elements.

torch's own reader does not fit: it unpickles ``.metadata`` without restriction, and reads the complete chunk
for every slice of it. So a restricted unpickler reads the metadata, and a few hundred bytes of every tensor
give the position of its elements. `nnx_checkpoint.foreign.dcp_directory` interprets the items. torch's own
planner and writer write them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from nnx_base.box import Box, find_fault
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import LocatedTensor
from nnx_checkpoint.foreign.dcp_metadata import Item, StoredTensor
from nnx_checkpoint.foreign.safetensors_header import read_header
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.storage.files import FileReader, is_file, require_inside
from nnx_checkpoint.unpickling.cost import refuse_swollen
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file, locate_tensor

__all__ = [
    "Items",
    "read_shards",
    "shard_files",
]


# Every item is a small zip file of ``torch.save``. Tensors stay in the file; torch's restricted unpickler
# reads objects.


_SMALL = 1 << 20
"""Bytes that items may claim in addition to four times their file (each item is read separately)."""


class Items:
    """Reads items of one directory, whose files stay open meanwhile.

    Args:
        directory: The checkpoint.
        weights_only: False unpickles objects without restriction.
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
        """Check that every file exists and contains its items.

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
                    f"'{path}' is missing, and the metadata refers to it.",
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
        raw = self._read(item)
        if raw not in self._objects:
            trust = " If it is intact and you trust its author, pass `weights_only=False`."
            with self._explained(name, item, trust if self._weights_only else ""):
                self._objects[raw] = self._unpickle(item, raw)
        return deepcopy(self._objects[raw])

    def locate(self, name: str, tensor: StoredTensor) -> FileTensor | LocatedTensor | Tensor:
        """Find the elements of a tensor.

        Returns:
            The positions of the elements; the tensor itself if an item is not in row-major order.

        Raises:
            CheckpointError: An item is missing, damaged, or differs from the metadata.
        """
        require_cover(self._directory, name, tensor.shape, tensor.chunks)
        parts = {box: self._part(name, box, item) for box, item in tensor.chunks.items()}
        types = {part.dtype for part in parts.values()} or {tensor.dtype}
        if len(types) > 1:
            raise CheckpointError(
                f"the parts of tensor '{name}' in '{self._directory}' have different element types: "
                f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in types))}.",
                remedy="The files are from different saves; resume from another checkpoint.",
            )
        if len(parts) == 1:
            return next(iter(parts.values()))
        (dtype,) = types
        if all(isinstance(part, FileTensor) and part.is_contiguous for part in parts.values()):
            pieces = [
                replace(part.entry(name).pieces[0], box=box)
                for box, part in parts.items()
                if isinstance(part, FileTensor)
            ]
            return LocatedTensor(tensor.shape, dtype, tuple(pieces))
        whole = torch.empty(tensor.shape, dtype=dtype)
        for box, part in parts.items():
            whole[box.slices] = part.read() if isinstance(part, FileTensor) else part
        return whole

    def _part(self, name: str, box: Box, item: Item) -> FileTensor | Tensor:
        with self._explained(name, item):
            path = self._directory / item.file
            part: Any = locate_tensor(self._reader(item.file), path, item.start, item.length)
            if part is None:
                part = self._unpickle(item, self._read(item))
            if tuple(part.shape) != box.size:
                raise ValueError(
                    f"it holds shape {tuple(part.shape)}, and the metadata says {box.size}; "
                    "the files may be from different saves"
                )
        return part  # type: ignore[no-any-return]

    def _unpickle(self, item: Item, raw: bytes) -> Any:
        if self._weights_only:
            refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=str(self._directory / item.file))
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=self._weights_only)

    def _read(self, item: Item) -> bytes:
        data = bytearray(item.length)
        self._reader(item.file).read_into(item.start, memoryview(data))
        return bytes(data)

    def _reader(self, file: str) -> FileReader:
        if file not in self._readers:
            self._readers[file] = FileReader(self._directory / file)
        return self._readers[file]

    @contextmanager
    def _explained(self, name: str, item: Item, more: str = "") -> Iterator[None]:
        """Context manager that converts any error of a damaged or malicious pickle into one with the file."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            raise CheckpointError(
                f"cannot read '{name}' in '{self._directory / item.file}' at byte {item.start}: {reason}.",
                remedy=f"Restore it from a backup, or resume from another checkpoint.{more}",
            ) from error


def require_cover(directory: Path, name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Raise unless boxes partition a tensor."""
    fault = find_fault(shape, boxes)
    if fault:
        raise CheckpointError(
            f"the files of '{directory}' do not make up tensor '{name}' of shape {shape}: {fault}.",
            remedy="Make sure that the files of all ranks are there.",
        )


# ``HuggingFaceStorageWriter(save_distributed=True)`` writes safetensors files without common metadata. Each
# file has the offset of its data in its tensors, and the shapes of the tensors follow from all files
# together. So reading detects a missing file in the middle, but not the loss of the last slice of every
# tensor.


_FILES = "shard-*-model-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"


def shard_files(directory: Path) -> list[Path]:
    """Return the files with torch's names for such shards."""
    return sorted(directory.glob(_FILES))


def read_shards(directory: Path) -> dict[str, LocatedTensor]:
    """Find every tensor of a directory.

    Raises:
        CheckpointError: A file is damaged, or the files do not cover the tensors.
    """
    pieces: dict[str, dict[Box, Piece]] = {}
    types: dict[str, torch.dtype] = {}
    for file in shard_files(directory):
        header = read_header(file)
        try:
            offsets = {
                name: tuple(map(int, entry["saved_offsets"]))
                for name, entry in load_json(header.metadata[_OFFSETS].encode()).items()
            }
            for tensor in header.tensors:
                box = Box(offsets[tensor.name], tensor.shape)
                dtype = getattr(torch, tensor.dtype_name)
                if types.setdefault(tensor.name, dtype) != dtype:
                    raise ValueError(f"'{tensor.name}' has another element type than in other files")
                piece = Piece(box, str(file), tensor.start, tensor.nbytes)
                pieces.setdefault(tensor.name, {}).setdefault(box, piece)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"'{file}' has no valid offsets of its tensors: {type(error).__name__}: {error}.",
                remedy="Restore it from a backup, or use another checkpoint.",
            ) from error
    found = {}
    for name, parts in pieces.items():
        ends = [[start + size for start, size in zip(box.offset, box.size, strict=True)] for box in parts]
        shape = tuple(max(extents) for extents in zip(*ends, strict=True))
        require_cover(directory, name, shape, parts)
        stored = tuple(piece for piece in parts.values() if piece.box.numel)
        found[name] = LocatedTensor(shape, types[name], stored)
    return found

"""The files of a DCP directory: which tensors and objects they claim to hold, and where the elements lie.

Nothing of torch is called to find that out, and no data is read but for a few hundred bytes of every item.
What the parts mean is the matter of `nnx_checkpoint.foreign.dcp_contents`.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from nnx_checkpoint._torch_compat import DCP_RECORDS
from nnx_checkpoint.box import Box, find_fault
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.foreign.safetensors import read_header
from nnx_checkpoint.foreign.torch_file import (
    DescribedTensor,
    TorchArchive,
    describe_tensor,
    load_torch_file,
    refuse_endless,
    refuse_swollen,
)
from nnx_checkpoint.index import Piece, TensorEntry
from nnx_checkpoint.manifest import load_json
from nnx_checkpoint.reader import Fetcher, PlainFiles, Wanted
from nnx_checkpoint.storage.files import FileReader, explained, is_file, require_inside

__all__ = [
    "METADATA",
    "DcpMetadata",
    "Items",
    "Keys",
    "LocatedTensor",
    "metadata_files",
    "read_metadata",
    "read_shards",
    "shard_files",
]


# --- the file ``.metadata`` -----------------------------------------------------------------------
# It is a pickle. It is read by an unpickler that knows the few classes which such metadata is made of, and
# replaces each by a record that does nothing; nothing of torch is called. Its claims are checked against
# each other, and the data files are not looked into.


METADATA = ".metadata"
_OF_ONE_RANK = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_DTYPE = re.compile(r"bool|[a-z]+\d\w*")
_MAJOR = "1"

Keys = tuple["str | int", ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one data file.

    Attributes:
        file: Name of the file in the directory.
        start: Position of the first byte.
        length: The number of them.
    """

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One box of a tensor and the item that holds it."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the metadata describes it.

    Attributes:
        name: Its flat name.
        shape: Its shape.
        dtype_name: Its element type; where there are items, these know better.
        chunks: Its boxes that have elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    chunks: tuple[StoredChunk, ...]

    @property
    def position(self) -> tuple[str, int]:
        """Where it begins, so that tensors can be looked up in the order of the files."""
        return min(((chunk.item.file, chunk.item.start) for chunk in self.chunks), default=("", 0))


@dataclass(slots=True)
class DcpMetadata:
    """What a DCP directory claims to hold.

    Attributes:
        tensors: By flat name, such as ``model.layers.0.weight``.
        objects: Items that are not tensors, by flat name.
        keys: The keys and list positions that lead to each name in the state dict that was saved.
        files: Every metadata file that was read.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, Item] = field(default_factory=dict)
    keys: dict[str, Keys] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    @property
    def items(self) -> list[Item]:
        """Every item, those of tensors first."""
        chunks = [chunk.item for tensor in self.tensors.values() for chunk in tensor.chunks]
        return [*chunks, *self.objects.values()]

    @property
    def data_files(self) -> set[str]:
        """Names of the files that hold the items."""
        return {item.file for item in self.items}

    @property
    def world_size(self) -> int:
        """How many ranks wrote, as far as the names of their files tell."""
        ranks = [int(match[1]) for item in self.items if (match := _DATA_FILE.fullmatch(item.file))]
        return max(ranks, default=0) + 1


def metadata_files(directory: Path) -> list[Path]:
    """The metadata of all ranks together, or, where each rank saved for itself, of each."""
    whole = directory / METADATA
    if whole.is_file():
        return [whole]
    with explained("list", directory):
        names = [(int(match[1]), path) for path in directory.iterdir() if (match := _one_rank(path))]
    return [path for _, path in sorted(names)]


def _one_rank(path: Path) -> re.Match[str] | None:
    return _OF_ONE_RANK.fullmatch(path.name)


def read_metadata(directory: Path, *, weights_only: bool = True) -> DcpMetadata:
    """Read what a directory claims to hold.

    Args:
        directory: The checkpoint.
        weights_only: False imports and runs whatever the pickle names beyond the classes of DCP.

    Raises:
        CheckpointError: There is no metadata, it is damaged or malicious, or it contradicts itself.
    """
    found = DcpMetadata(files=metadata_files(directory))
    if not found.files:
        raise CheckpointError(
            f"'{directory}' has data files but no '{METADATA}': its save was interrupted.",
            remedy="Resume from an earlier checkpoint; nothing tells what is in this one.",
        )
    for path in found.files:
        record = _unpickle(path, weights_only)
        refuse_endless(record, nbytes=path.stat().st_size, source=str(path), records=(_Record,))
        try:
            _add(found, record)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a record of another shape makes the code above raise
            raise CheckpointError(
                f"'{path}' is not the metadata of a DCP checkpoint, or it is damaged: {error!r}.",
                remedy="Resume from another checkpoint.",
            ) from error
    return found


# --- the pickle -----------------------------------------------------------------------------------


class _Record:
    """Stands in for a class of the metadata: keeps its state and does nothing."""

    state: Any = None

    def __init__(self, *values: Any) -> None:
        self.state = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]

    def get(self, name: str) -> Any:
        """A field that not every version of torch writes."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def _same(value: Any) -> Any:
    return value


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _ignored(*values: Any) -> None:
    return None


_RECORDS: dict[str, type[_Record]] = {name: type(name, (_Record,), {}) for name in DCP_RECORDS}
_STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _same,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _ignored,  # how some versions of Python pickle members of enums
    **{
        (module, name): _joined
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, all of them replaced by what does nothing."""

    def __init__(self, raw: bytes, weights_only: bool) -> None:
        super().__init__(io.BytesIO(raw))
        self._weights_only = weights_only

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if module.startswith("torch.distributed.") and name in _RECORDS:
            return _RECORDS[name]
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if not self._weights_only:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not among the classes of such metadata")


def _unpickle(path: Path, weights_only: bool) -> _Record:
    with explained("read", path):
        raw = path.read_bytes()
    if weights_only:
        refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=str(path))
    try:
        record: Any = _MetadataUnpickler(raw, weights_only).load()
        if type(record) is not _RECORDS["Metadata"]:
            raise pickle.UnpicklingError(f"it holds a {type(record).__name__}")
    except Exception as error:  # whatever damage or the pickle makes it raise
        raise CheckpointError(
            f"cannot read '{path}': {type(error).__name__}: {error}.",
            remedy="If it is whole and you trust whoever wrote it, pass `weights_only=False`."
            if weights_only
            else "Restore it from a backup, or use another checkpoint.",
        ) from error
    version = record.get("version")
    if version is not None and str(version).split(".")[0] != _MAJOR:
        raise CheckpointError(
            f"'{path}' is of version {version} of DCP's format; version {_MAJOR} is known.",
            remedy="Update nnx-core, or save it again with an older torch.",
        )
    return record


# --- its claims -----------------------------------------------------------------------------------


def _add(found: DcpMetadata, record: _Record) -> None:
    """Add one metadata file; where several ranks have an object of one name, the first rank's counts."""
    places: dict[str, dict[tuple[int, ...] | None, Item]] = {}
    for index, info in record["storage_data"].items():
        offset = index["offset"] if "offset" in index.state else None
        item = _item(info, index["fqn"])
        places.setdefault(index["fqn"], {})[None if offset is None else tuple(offset)] = item
    planned = record.get("planner_data")
    for name, entry in record["state_dict_metadata"].items():
        if "chunks" in (entry.state or ()):
            _add_tensor(found, name, entry, places.get(name, {}))
        else:
            found.objects.setdefault(name, _place(places.get(name, {}), None, name))
        path = planned.get(name, (name,)) if isinstance(planned, Mapping) else (name,)
        found.keys.setdefault(name, _checked_keys(path))


def _add_tensor(
    found: DcpMetadata, name: str, entry: _Record, places: Mapping[tuple[int, ...] | None, Item]
) -> None:
    chunks = []
    for chunk in entry["chunks"]:
        box = Box(tuple(chunk["offsets"]), tuple(chunk["sizes"]))
        if box.numel or not box.size:
            chunks.append(StoredChunk(box, _place(places, box.offset, name)))
    known = found.tensors.get(name)
    shape = Box.whole(entry["size"]).size
    if known is not None and known.shape != shape:
        raise CheckpointError(
            f"the ranks disagree about the shape of tensor '{name}': {known.shape} and {shape}.",
            remedy="The metadata files are of different saves; resume from another checkpoint.",
        )
    dtype_name = str(entry["properties"].state[0])
    found.tensors[name] = StoredTensor(name, shape, dtype_name, (*(known.chunks if known else ()), *chunks))


def _place(places: Mapping[tuple[int, ...] | None, Item], offset: tuple[int, ...] | None, name: str) -> Item:
    item = places.get(offset) or places.get(None)
    if item is None:
        what = "object" if offset is None else f"the part at {offset} of tensor"
        raise CheckpointError(
            f"the metadata has no place for {what} '{name}'.",
            remedy="The save was not complete; resume from another checkpoint.",
        )
    return item


def _item(info: _Record, name: str) -> Item:
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"'{name}' was saved through {', '.join(info['transform_descriptors'])}, an extension of DCP "
            "that changes the bytes.",
            remedy="Load it with torch and the extension, and save it again without.",
        )
    file, start, length = info["relative_path"], info["offset"], info["length"]
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise ValueError(f"item of {name!r}")
    parts = PurePosixPath(file).parts
    if not parts or file.startswith("/") or ".." in parts:
        raise ValueError(f"{file!r} lies outside the directory")
    return Item(file, start, length)


def _checked_keys(path: Sequence[Any]) -> Keys:
    if not path or not all(type(key) in (str, int) for key in path):
        raise ValueError(f"path {reprlib.repr(path)}")
    return tuple(path)


# --- items in the data files ----------------------------------------------------------------------
# Every item is a little zip file of ``torch.save``. For a tensor only its directory and its pickle are
# read, a few hundred bytes at its two ends, and the pickle by an unpickler that knows nothing but tensors;
# so opening is quick with many thousands of items. Objects go through torch's restricted unpickler.


_SMALL = 1 << 20
"""Bytes that parts may share beyond four times their file's; each part is read by itself."""


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor whose elements were found in the data files.

    Attributes:
        shape: Its shape.
        dtype_name: Its element type, without ``torch.``.
        pieces: Its boxes and where they are, without those that are not in row-major order.
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


# --- directories in safetensors files -------------------------------------------------------------
# ``HuggingFaceStorageWriter(save_distributed=True)`` writes them. They have no metadata of their own: each
# file says where in its tensors its data begins, and the sizes of the tensors follow from all files
# together. So a file that is missing in the middle is noticed, but the loss of the last part of every
# tensor is not.


_FILES = "shard-*-model-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"


def shard_files(directory: Path) -> list[Path]:
    """Files with the names that torch gives them."""
    return sorted(directory.glob(_FILES))


def read_shards(directory: Path) -> dict[str, LocatedTensor]:
    """Find every tensor of a directory.

    Raises:
        CheckpointError: A file is damaged, or the files do not make up the tensors.
    """
    pieces: dict[str, dict[Box, Piece]] = {}
    types: dict[str, str] = {}
    for file in shard_files(directory):
        header = read_header(file)
        try:
            offsets = {
                name: tuple(map(int, entry["saved_offsets"]))
                for name, entry in load_json(header.metadata[_OFFSETS].encode()).items()
            }
            for tensor in header.tensors:
                box = Box(offsets[tensor.name], tensor.shape)
                if types.setdefault(tensor.name, tensor.dtype_name) != tensor.dtype_name:
                    raise ValueError(f"'{tensor.name}' has another element type than in other files")
                piece = Piece(box, str(file), tensor.start, tensor.nbytes)
                pieces.setdefault(tensor.name, {}).setdefault(box, piece)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"'{file}' does not say where its tensors belong: {type(error).__name__}: {error}.",
                remedy="Restore it from a backup, or use another checkpoint.",
            ) from error
    return {name: _located(directory, name, types[name], parts) for name, parts in pieces.items()}


def _located(directory: Path, name: str, dtype_name: str, parts: dict[Box, Piece]) -> LocatedTensor:
    ends = [tuple(a + b for a, b in zip(box.offset, box.size, strict=True)) for box in parts]
    shape = tuple(max(extents) for extents in zip(*ends, strict=True))
    fault = find_fault(shape, parts)
    if fault:
        raise CheckpointError(
            f"the files of '{directory}' do not make up tensor '{name}' of shape {shape}: {fault}.",
            remedy="Make sure that the files of all ranks are there.",
        )
    return LocatedTensor(shape, dtype_name, tuple(piece for piece in parts.values() if piece.box.numel))

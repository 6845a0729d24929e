"""The files of a DCP directory: which tensors and objects they hold, where elements lie, and writing them.

Torch's own reader is of no use here: it unpickles ``.metadata`` freely, and of a part of a tensor it reads
the whole chunk that the part is in, anew for every part. So the metadata are read by a restricted unpickler,
and of every item that is a tensor a few hundred bytes, which tell where its elements are. What the parts mean
is the matter of `nnx_checkpoint.foreign.dcp_directory`. Torch's own planner and writer write them.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import Self, override

from nnx_base.box import Box, find_fault
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint._torch_compat import storage_info
from nnx_checkpoint.foreign.contents import LocatedTensor
from nnx_checkpoint.foreign.dcp import Handle
from nnx_checkpoint.foreign.lightning_file import write_torch_file
from nnx_checkpoint.foreign.safetensors import read_header
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.reading.formats import Progress
from nnx_checkpoint.reading.naming import Described, StoredName
from nnx_checkpoint.reading.slabs import SLAB, Part, read_in_order, row_boxes
from nnx_checkpoint.storage.files import FileReader, explained, is_file, require_inside
from nnx_checkpoint.unpickling.cost import refuse_swollen
from nnx_checkpoint.unpickling.torch_file import (
    FileTensor,
    load_torch_file,
    locate_tensor,
    map_tree,
    refuse_endless,
)

__all__ = [
    "DcpMetadata",
    "Items",
    "metadata_files",
    "read_metadata",
    "read_shards",
    "shard_files",
    "write_dcp_files",
]

METADATA = ".metadata"
_OF_ONE_RANK = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")

Keys = tuple["str | int", ...]


# --- the file ``.metadata`` -----------------------------------------------------------------------
# It is a pickle of torch's `Metadata`. Its claims are checked against each other here; the data files are not
# looked into.


class Item(NamedTuple):
    """Bytes of one data file: its name in the directory, the position of the first one, and their number."""

    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor as the metadata describe it.

    Attributes:
        shape: Its shape.
        dtype: Its element type; where there are items, these know better.
        chunks: The item of each box that has elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, Item]


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
        chunks = [item for tensor in self.tensors.values() for item in tensor.chunks.values()]
        return [*chunks, *self.objects.values()]

    @property
    def data_files(self) -> set[str]:
        """Names of the files that hold the items."""
        return {item.file for item in self.items}

    @property
    def world_size(self) -> int:
        """How many ranks wrote, as far as the names of their files tell."""
        ranks = [int(match[1]) for file in self.data_files if (match := _DATA_FILE.fullmatch(file))]
        return max(ranks, default=0) + 1


def metadata_files(directory: Path) -> list[Path]:
    """The metadata of all ranks together, or, where each rank saved for itself, of each."""
    whole = directory / METADATA
    if whole.is_file():
        return [whole]
    with explained("list", directory):
        names = [(path, _OF_ONE_RANK.fullmatch(path.name)) for path in directory.iterdir()]
    return [path for _, path in sorted((int(match[1]), path) for path, match in names if match)]


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


class _Properties(TensorProperties):
    """Keeps the element type; the rest is deprecated."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


def _nothing(*values: Any) -> None:
    """Called in place of what makes fields that are of no use here."""


_DTYPE = re.compile(r"bool|[a-z]+\d\w*")
_KINDS = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta)
_CLASSES: dict[str, type] = {
    **{kind.__name__: kind for kind in (*_KINDS, TensorStorageMetadata, storage_info())},
    "TensorProperties": _Properties,
}
_UNUSED = {
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "torch.serialization": ("_get_layout",),
    "builtins": ("getattr",),  # how some versions of Python pickle members of enums
}


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, which hold data and run nothing.

    Each load gets subclasses of its own in their places, because a pickle can set attributes of a class that
    it names. Where older versions of torch had a class in another module, its name was the same.
    """

    def __init__(self, raw: bytes, weights_only: bool) -> None:
        super().__init__(io.BytesIO(raw))
        self._weights_only = weights_only
        self._classes = {name: type(name, (kind,), {}) for name, kind in _CLASSES.items()}

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if module.startswith("torch.distributed."):
            if name in self._classes:
                return self._classes[name]
            if name.lstrip("_") == "MEM_FORMAT_ENCODING":
                return _nothing
        if module == "torch" and _DTYPE.fullmatch(name):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if name in _UNUSED.get(module, ()):
            return _nothing
        if not self._weights_only:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not among the classes of such metadata")


def _unpickle(path: Path, weights_only: bool) -> Metadata:
    with explained("read", path):
        raw = path.read_bytes()
    if weights_only:
        refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=str(path))
    try:
        record: Any = _MetadataUnpickler(raw, weights_only).load()
        if not isinstance(record, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(record).__name__}")
    except Exception as error:  # whatever damage or the pickle makes it raise
        raise CheckpointError(
            f"cannot read '{path}': {type(error).__name__}: {error}.",
            remedy="If it is whole and you trust whoever wrote it, pass `weights_only=False`."
            if weights_only
            else "Restore it from a backup, or use another checkpoint.",
        ) from error
    refuse_endless(record, nbytes=len(raw), source=str(path), records=tuple(_CLASSES.values()))
    if record.version is not None and str(record.version).split(".")[0] != "1":
        raise CheckpointError(
            f"'{path}' is of version {record.version} of DCP's format; version 1 is known.",
            remedy="Update nnx-checkpoint, or save it again with an older torch.",
        )
    return record


def _add(found: DcpMetadata, record: Metadata) -> None:
    """Add one metadata file; where several ranks have an object of one name, the first rank's counts."""
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): _item(info, index.fqn)
        for index, info in record.storage_data.items()
    }

    def place(name: str, offset: tuple[int, ...] | None) -> Item:
        item = places.get((name, offset)) or places.get((name, None))
        if item is None:
            what = "object" if offset is None else f"the part at {offset} of tensor"
            raise CheckpointError(
                f"the metadata has no place for {what} '{name}'.",
                remedy="The save was not complete; resume from another checkpoint.",
            )
        return item

    planned = record.planner_data if isinstance(record.planner_data, Mapping) else {}
    for name, entry in record.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            chunks = {box: place(name, box.offset) for box in boxes if box.numel or not box.size}
            _add_tensor(found, name, StoredTensor(Box.whole(entry.size).size, entry.properties.dtype, chunks))
        elif isinstance(entry, BytesStorageMetadata):
            found.objects.setdefault(name, place(name, None))
        else:
            raise TypeError(f"entry {reprlib.repr(entry)}")
        found.keys.setdefault(name, _checked_keys(planned.get(name, (name,))))


def _add_tensor(found: DcpMetadata, name: str, tensor: StoredTensor) -> None:
    known = found.tensors.get(name, tensor)
    if known.shape != tensor.shape:
        raise CheckpointError(
            f"the ranks disagree about the shape of tensor '{name}': {known.shape} and {tensor.shape}.",
            remedy="The metadata files are of different saves; resume from another checkpoint.",
        )
    if not isinstance(tensor.dtype, torch.dtype):
        raise TypeError(f"element type {reprlib.repr(tensor.dtype)}")
    found.tensors[name] = tensor._replace(chunks={**tensor.chunks, **known.chunks})


def _item(info: Any, name: str) -> Item:
    if info.transform_descriptors:
        raise CheckpointError(
            f"'{name}' was saved through {', '.join(info.transform_descriptors)}, an extension of DCP "
            "that changes the bytes.",
            remedy="Load it with torch and the extension, and save it again without.",
        )
    item = Item(info.relative_path, info.offset, info.length)
    if type(item.start) is not int or type(item.length) is not int or min(item.start, item.length) < 0:
        raise ValueError(f"item of {name!r}")
    parts = PurePosixPath(item.file).parts
    if not parts or item.file.startswith("/") or ".." in parts:
        raise ValueError(f"{item.file!r} lies outside the directory")
    return item


def _checked_keys(path: Sequence[Any]) -> Keys:
    if not path or not all(type(key) in (str, int) for key in path):
        raise ValueError(f"path {reprlib.repr(path)}")
    return tuple(path)


# --- items in the data files ----------------------------------------------------------------------
# Every item is a little zip file of ``torch.save``. Tensors stay where they are; objects go through torch's
# restricted unpickler.


_SMALL = 1 << 20
"""Bytes that parts may share beyond four times their file's; each part is read by itself."""


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
        raw = self._read(item)
        if raw not in self._objects:
            trust = " If it is whole and you trust whoever wrote it, pass `weights_only=False`."
            with self._explained(name, item, trust if self._weights_only else ""):
                self._objects[raw] = self._unpickle(item, raw)
        return deepcopy(self._objects[raw])

    def locate(self, name: str, tensor: StoredTensor) -> FileTensor | LocatedTensor | Tensor:
        """Find the elements of a tensor.

        Returns:
            Where they are in the files; the tensor itself if some part is not in row-major order.

        Raises:
            CheckpointError: An item is damaged or is not what the metadata says, or a part is missing.
        """
        require_cover(self._directory, name, tensor.shape, tensor.chunks)
        parts = {box: self._part(name, box, item) for box, item in tensor.chunks.items()}
        types = {part.dtype for part in parts.values()} or {tensor.dtype}
        if len(types) > 1:
            raise CheckpointError(
                f"the parts of tensor '{name}' in '{self._directory}' have different element types: "
                f"{', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in types))}.",
                remedy="The files are of different saves; resume from another checkpoint.",
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

    # --- one item ---------------------------------------------------------------------------------

    def _part(self, name: str, box: Box, item: Item) -> FileTensor | Tensor:
        with self._explained(name, item):
            path = self._directory / item.file
            part: Any = locate_tensor(self._reader(item.file), path, item.start, item.length)
            if part is None:
                part = self._unpickle(item, self._read(item))
            if tuple(part.shape) != box.size:
                raise ValueError(
                    f"it holds shape {tuple(part.shape)}, and the metadata says {box.size}; "
                    "the files may be of different saves"
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
        """Turn whatever damage or a malicious pickle raises into an error that says where it is."""
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
    """Make sure that the parts of a tensor make it up."""
    fault = find_fault(shape, boxes)
    if fault:
        raise CheckpointError(
            f"the files of '{directory}' do not make up tensor '{name}' of shape {shape}: {fault}.",
            remedy="Make sure that the files of all ranks are there.",
        )


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
                f"'{file}' does not say where its tensors belong: {type(error).__name__}: {error}.",
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


# --- writing --------------------------------------------------------------------------------------
# Torch's writer keeps every tensor of a file until the file is complete. Those that it gets here are views of
# the two slabs of a few megabytes that the source is read into, one chunk after the other; so they take no
# memory of their own. It must ask for a chunk only when the last one is written: hence no copying ahead.


_OBJECT = "__0_1.distcp"
"""The file that holds the trainer's objects; torch names its only data file ``__0_0.distcp``."""


class _StoredHandle(Handle):
    """Stands for a tensor of a checkpoint until its chunks are written."""

    source: StoredName

    @classmethod
    def of(cls, source: StoredName) -> _StoredHandle:
        """The handle for a tensor, in chunks as `read_in_order` gives them."""
        entry = source.stored.entry(source.key)
        boxes = tuple(row_boxes(entry.shape, entry.itemsize, SLAB))
        views = tuple(torch.empty(box.size, dtype=entry.dtype, device="meta") for box in boxes)
        handle = cls(Shard(entry.shape, entry.dtype, boxes, views))
        handle.source = StoredName(source.stored, entry.name)
        return handle


class _Planner(DefaultSavePlanner):
    """Plans a state dict of `StoredName`, and reads the chunks of their tensors when they are due.

    Args:
        checkpoint: The checkpoint that the tensors are read from.
        progress: Told how many bytes of tensors are done.
    """

    def __init__(self, checkpoint: Described, progress: Progress) -> None:
        super().__init__()
        self._checkpoint, self._progress = checkpoint, progress
        self.parts: Iterator[Part] = iter(())
        """The chunks that are not written yet."""
        self.tied: dict[str, str] = {}
        """Names of tensors that are stored under another name already."""

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        handles = map_tree(state_dict, lambda v: _StoredHandle.of(v) if isinstance(v, StoredName) else v)
        try:
            super().set_up_planner(handles, storage_meta, is_coordinator)
        except ValueError as error:
            raise CheckpointError(
                f"two entries of '{self._checkpoint.path}' would have one name in a DCP directory: {error}.",
                remedy="Convert to another format.",
            ) from error
        names: dict[str, str] = {}
        for name, value in list(self.state_dict.items()):
            if isinstance(value, _StoredHandle) and names.setdefault(value.source.key, name) != name:
                self.tied[name] = names[value.source.key]
                del self.state_dict[name]
        self.parts = read_in_order(self._checkpoint, names, progress=self._progress)

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self.state_dict[write_item.index.fqn]
        if not isinstance(value, _StoredHandle):
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        data, size = next(self.parts).data, write_item.tensor_data.chunk.sizes
        flat = torch.frombuffer(data, dtype=value.dtype) if data else torch.empty(0, dtype=value.dtype)
        return flat.view(size)

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        whole = map_tree(
            object, lambda v: v.source.stored.read(v.source.key) if isinstance(v, _StoredHandle) else v
        )
        try:
            return super().transform_object(write_item, whole)
        except Exception as error:  # pickle raises what the object's own methods raise
            raise CheckpointError(
                f"'{write_item.index.fqn}' cannot be pickled: {type(error).__name__}: {error}.",
                remedy="Convert to another format, or to the weights alone.",
            ) from error


def write_dcp_files(
    directory: Path,
    checkpoint: Described,
    state: Mapping[str, Any],
    *,
    objects: tuple[str, Any] | None = None,
    progress: Progress,
) -> None:
    """Write the files of a DCP directory.

    Args:
        directory: The directory to write into, which is empty.
        checkpoint: The checkpoint that each `StoredName` in the others is read from.
        state: The state dict.
        objects: A further key, and one object for it that is stored as a whole, in a file of its own.
        progress: Told how many bytes of tensors are done.

    Raises:
        CheckpointError: An object cannot be pickled, or reading or writing failed.
    """
    planner = _Planner(checkpoint, progress)
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0, overwrite=False)  # it is empty
    planner.set_up_planner(dict(state), is_coordinator=True)
    with explained("write", directory):
        writer.set_up_storage_writer(True)
        local = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([local])
        (plan,) = writer.prepare_global_plan(plans)
        try:
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
        except (
            RuntimeError
        ) as error:  # where the system refused to write, torch says that a position is wrong
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        list(planner.parts)  # none is left; that the last one is done is told now
        results += _tie(planner.tied, metadata, results)
        if objects is not None:
            name, tree = objects
            path = directory / _OBJECT
            write_torch_file(path, tree, checkpoint, name="archive", progress=lambda done, total: None)
            size = path.stat().st_size
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.planner_data[name] = (name,)
            results.append(WriteResult(MetadataIndex(name), size, storage_info()(_OBJECT, 0, size)))
        writer.finish(metadata, [results])


def _tie(tied: Mapping[str, str], metadata: Metadata, results: Sequence[WriteResult]) -> list[WriteResult]:
    """Give tensors further names, under which the same items are found."""
    names: dict[str, list[str]] = {}
    for name, first in tied.items():
        names.setdefault(first, []).append(name)
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
    return [
        replace(result, index=replace(result.index, fqn=name))
        for result in results
        for name in names.get(result.index.fqn, ())
    ]

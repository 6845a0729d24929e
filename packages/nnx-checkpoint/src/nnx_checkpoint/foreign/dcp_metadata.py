"""Read the file `.metadata` of a DCP directory without running code."""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint._torch_compat import storage_info
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.unpickling.allowed import Inert, refuse_endless
from nnx_checkpoint.unpickling.cost import refuse_swollen

METADATA = ".metadata"


_OF_ONE_RANK = re.compile(r"__(\d+)\.metadata")


_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")


Keys = tuple["str | int", ...]


# `.metadata` is a pickle of torch's `Metadata`. This module checks its claims against each other, and reads
# no data files.


class Item(NamedTuple):
    """A range of bytes in a data file: the file's name, the first position and the length."""

    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """The metadata of one tensor.

    Attributes:
        shape: Its shape.
        dtype: Its element type according to the metadata; items override it.
        chunks: The item of each box that has elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Box, Item]


@dataclass(slots=True)
class DcpMetadata:
    """The claimed content of a DCP directory.

    Attributes:
        tensors: Tensors by flat name, such as ``model.layers.0.weight``.
        objects: Items that are not tensors, by flat name.
        keys: The path (keys and list positions) of each name in the saved state dict.
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
        """The number of ranks that wrote files, according to the files' names."""
        ranks = [int(match[1]) for file in self.data_files if (match := _DATA_FILE.fullmatch(file))]
        return max(ranks, default=0) + 1


def metadata_files(directory: Path) -> list[Path]:
    """Return the common metadata file, or one for each rank if ranks saved separately."""
    whole = directory / METADATA
    if whole.is_file():
        return [whole]
    with explained("list", directory):
        names = [(path, _OF_ONE_RANK.fullmatch(path.name)) for path in directory.iterdir()]
    return [path for _, path in sorted((int(match[1]), path) for path, match in names if match)]


def read_metadata(directory: Path, *, weights_only: bool = True) -> DcpMetadata:
    """Read the metadata of a directory.

    Args:
        directory: The checkpoint.
        weights_only: False imports and runs any name in the pickle, not only the classes of DCP.

    Raises:
        CheckpointError: The metadata is missing, damaged, malicious, or contradicts itself.
    """
    found = DcpMetadata(files=metadata_files(directory))
    if not found.files:
        raise CheckpointError(
            f"'{directory}' has data files but no '{METADATA}': its save was interrupted.",
            remedy="Resume from an earlier checkpoint; the content of this one is unknown.",
        )
    for path in found.files:
        record = _unpickle(path, weights_only)
        try:
            _add(found, record)
        except CheckpointError:
            raise
        except Exception as error:  # a malformed record may raise anything above
            raise CheckpointError(
                f"'{path}' is not the metadata of a DCP checkpoint, or it is damaged: {error!r}.",
                remedy="Resume from another checkpoint.",
            ) from error
    return found


class _Properties(TensorProperties):
    """Properties of a tensor, of which only the element type is read."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


def _nothing(*values: Any) -> None:
    """Replace the constructors of unused fields."""


_DTYPE = re.compile(r"bool|[a-z]+\d\w*")


_KINDS = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta)


_CLASSES: dict[str, type] = {
    **{kind.__name__: kind for kind in (*_KINDS, TensorStorageMetadata, storage_info())},
    "TensorProperties": _Properties,
}


_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Classes of the plans that Megatron-LM keeps in the metadata to save faster; they are not read."""


_UNUSED = {
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "torch.serialization": ("_get_layout",),
    "builtins": ("getattr",),  # some versions of Python pickle enum members so
}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler for the classes of DCP's metadata, which hold data and run nothing.

    Each load uses its own subclasses of them, because a pickle can set attributes of a class that it names.
    Older versions of torch had some classes in another module under the same name.
    """

    def __init__(self, raw: bytes, weights_only: bool) -> None:
        super().__init__(io.BytesIO(raw))
        self._weights_only = weights_only
        kinds = {**_CLASSES, **dict.fromkeys(_PLANS, Inert)}
        self._classes = {name: type(name, (kind,), {}) for name, kind in kinds.items()}

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
        raise pickle.UnpicklingError(f"{module}.{name} is not a class of DCP's metadata")


def _unpickle(path: Path, weights_only: bool) -> Metadata:
    with explained("read", path):
        raw = path.read_bytes()
    if weights_only:
        refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=str(path))
    try:
        record: Any = _MetadataUnpickler(raw, weights_only).load()
        if not isinstance(record, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(record).__name__}")
    except Exception as error:  # damage or a pickle may raise anything
        raise CheckpointError(
            f"cannot read '{path}': {type(error).__name__}: {error}.",
            remedy="If it is intact and you trust its author, pass `weights_only=False`."
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
    """Add one metadata file (of objects with one name, the first rank's is kept)."""
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
            remedy="The metadata files are from different saves; resume from another checkpoint.",
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

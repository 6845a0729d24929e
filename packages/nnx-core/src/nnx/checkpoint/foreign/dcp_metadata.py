"""The ``.metadata`` of a DCP directory: which tensors and objects it claims to hold, and where.

The file is a pickle. It is read by an unpickler that knows the few classes which such metadata is made of,
and replaces each by a record that does nothing; nothing of torch is called. This module owns that and
checks the claims against each other. It never looks into the data files.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import override

from nnx.box import Box
from nnx.checkpoint._torch_compat import DCP_RECORDS
from nnx.checkpoint.foreign.torch_file import refuse_swollen
from nnx.checkpoint.storage.files import explained
from nnx.errors import CheckpointError

__all__ = [
    "METADATA",
    "DcpMetadata",
    "Item",
    "StoredChunk",
    "StoredTensor",
    "metadata_files",
    "read_metadata",
]

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
        length: How many.
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
    shape = tuple(entry["size"])
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

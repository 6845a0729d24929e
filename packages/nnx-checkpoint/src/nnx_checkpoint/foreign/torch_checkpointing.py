"""Read and write directories of `torch_checkpointing` 0.1, Meta's successor of DCP.

Every rank has a file for each item of the saved dict, such as ``model_0.pt``. ``metadata.pkl`` is a pickle of
plain data about the part of each tensor that a rank has. The reader needs no library and unpickles no classes
from it. The library itself writes.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import json
import pickle
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
from typing_extensions import override

from nnx_base.box import Box, find_fault
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, LocatedTensor, malformed_explained
from nnx_checkpoint.foreign.dcp_directory import (
    holds_tensors_only,
    interpret,
    is_optimizer,
    items_to_write,
)
from nnx_checkpoint.foreign.dcp_state_dict import OURS, TRAINER, add_parts, is_ours, restore_ours
from nnx_checkpoint.foreign.safetensors_header import read_header
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress
from nnx_checkpoint.reading.naming import Described, StoredName
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_directory, read_in_order
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.unpickling.allowed import refuse_endless
from nnx_checkpoint.unpickling.cost import refuse_swollen
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file, map_tree

_METADATA = "metadata.pkl"
_ITEM = re.compile(r"(.+)_(\d+)\.(pt|json)")
_Keys = tuple["str | int", ...]


class TorchCheckpointing(CheckpointFormat):
    """A directory with ``metadata.pkl`` and files such as ``model_0.pt``."""

    name = "torch_checkpointing"
    can_write = True

    @override
    def guess_can_open(self, path: str | Any) -> bool:
        place = Path(path)
        if not place.is_dir():
            return False
        return (place / "model_0.pt").is_file() or (
            (place / _METADATA).is_file() and any(_ITEM.fullmatch(file.name) for file in place.iterdir())
        )

    @override
    def open(self, path: str | Any, *, weights_only: bool = True) -> ForeignCheckpoint:
        place = Path(path)
        with malformed_explained(place, self.name):
            found = _Directory(place, weights_only)
            tree = {key: found.item(key) for key in found.files}
        contents = Contents(place, self.name)
        beside = tree.pop(TRAINER) if is_ours(tree.get(TRAINER)) else {}
        parts = interpret(tree, keys=beside.get(OURS, {}).get("fabric"))
        origin = restore_ours(contents, beside)
        with malformed_explained(place, self.name):
            add_parts(contents, parts, beside)
        if origin is None:
            contents.rank_objects |= found.of_ranks
            origin = {"world_size": found.world_size, "provenance": {"keys": parts.keys}}
        return contents.opened(**origin)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | Any,
        *,
        progress: Progress = lambda done, total: None,
        parameter_names: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """Write a directory with `torch_checkpointing` itself, which has to be installed.

        The items are ``model``, ``optimizer`` (``optimizer_0``, ... of several) and ``trainer``. Any number
        of ranks loads the first two with the library's resharder. Tensors are in files beside the target
        while it is written, so the disk needs room for two copies, and memory for none.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Function of the bytes done and their total.
            parameter_names: The names of parameters for each optimizer that only numbers them.
            **options: No other options exist.

        Raises:
            CheckpointError: The library is missing, or reading or writing failed.
        """
        self.refuse_options(options)
        if importlib.util.find_spec("torch_checkpointing") is None:
            raise CheckpointError(
                "torch_checkpointing, which writes this format, is not installed.",
                remedy="Run `pip install torch_checkpointing`, or choose another format.",
            )
        described = Described(checkpoint)
        state, beside = items_to_write(described, parameter_names)
        with new_directory(path) as directory:
            (mapped := directory / "tensors").mkdir()
            with explained("write", directory):
                tensors = _mapped(described, {**state, TRAINER: beside}, mapped, progress)
                items = map_tree(
                    {**state, TRAINER: beside},
                    lambda value: tensors[_name_of(value)] if isinstance(value, StoredName) else value,
                )
                _save(directory / "written", items, resharded=list(state))
                for file in (directory / "written").iterdir():
                    file.rename(directory / file.name)
            (directory / "written").rmdir()
            shutil.rmtree(mapped)


def _mapped(checkpoint: Described, tree: Any, directory: Path, progress: Progress) -> dict[str, torch.Tensor]:
    """Copy every tensor of a tree into a file of its own, mapped into memory."""
    names: dict[str, None] = {}
    map_tree(
        tree, lambda value: names.setdefault(_name_of(value)) if isinstance(value, StoredName) else value
    )
    made: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        entry = checkpoint.entry(name)
        file = directory / str(number)
        file.write_bytes(b"")
        flat = torch.empty(0, dtype=entry.dtype)
        if entry.numel:
            flat = torch.from_file(str(file), shared=True, size=entry.numel, dtype=entry.dtype)
        made[name] = flat.view(entry.shape)
    done = dict.fromkeys(names, 0)
    for part in read_in_order(checkpoint, list(names), progress=progress):
        if part.data:
            flat = made[part.name].view(-1).view(torch.uint8)
            start = done[part.name]
            done[part.name] = stop = start + len(part.data)
            flat[start:stop] = torch.frombuffer(part.data, dtype=torch.uint8)
    return made


def _name_of(value: StoredName) -> str:
    """Return the name under which a tensor is stored, the same for tied ones."""
    return value.stored.entry(value.key).name


def _save(directory: Path, items: dict[str, Any], *, resharded: Sequence[str]) -> None:
    """Save with the library: synchronously, from this process alone, through the page cache."""
    library: Any = importlib.import_module("torch_checkpointing")
    reshard: Any = importlib.import_module("torch_checkpointing.default_resharder")
    storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    spec = library.ItemSpec(resharder=reshard.DefaultResharder())
    writer = library.CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    manager = library.CheckpointManager.Config(
        items=dict.fromkeys(resharded, spec),
        save=library.SyncCheckpointSaverConfig(writer_config=writer),
        storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    try:
        manager.save(str(directory), items)
    finally:
        manager.close()


@dataclass(frozen=True)
class _Part:
    """A box of a tensor in the file of one rank, and its position in the tensor there."""

    box: Box
    local: tuple[int, ...]


class _Directory:
    """The items of a directory.

    Attributes:
        files: The file of each rank by item; None for a rank without one.
        of_ranks: Items that differ between ranks, by rank and key.
        world_size: The number of ranks.
    """

    def __init__(self, place: Path, weights_only: bool) -> None:
        self.place = place
        self.weights_only = weights_only
        self.claims: dict[str, dict[_Keys, Any]] = {}
        self.of_ranks: dict[int, dict[str, Any]] = {}
        self.files: dict[str, dict[int, str]] = defaultdict(dict)
        claimed = _read_metadata(place / _METADATA) if (place / _METADATA).is_file() else None
        if claimed is not None:
            for key, item in claimed["metadata"].items():
                claims = {
                    tuple(json.loads(path)): each for path, each in item["nested_path_to_metadata"].items()
                }
                joined: dict[_Keys, Any] = {(".".join(map(str, path)),): claims[path] for path in claims}
                self.claims[key] = {**joined, **claims}  # safetensors join nested keys
                for rank, layout in item["rank_to_layout_info"].items():
                    self.files[key][int(rank)] = f"{key}_{rank}.pt" if layout is None else layout["file_path"]
        known = {name for files in self.files.values() for name in files.values()}
        for file in sorted(place.iterdir()):
            match = _ITEM.fullmatch(file.name)
            if match and file.name not in known:
                self.files[match[1]][int(match[2])] = file.name
        ranks = {rank for files in self.files.values() for rank in files}
        self.world_size = max(ranks, default=0) + 1 if claimed is None else int(claimed["world_size"])
        for name in known:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise CheckpointError(f"'{place}' names files outside of itself.", remedy="Do not use it.")

    def item(self, key: str) -> Any:
        """Return one item, with tensors still in the files."""
        values = {rank: self._load(name) for rank, name in sorted(self.files[key].items())}
        if key in self.claims:
            return self._merged(key, values, ())
        if len(values) == 1:
            return next(iter(values.values()))
        first = values[min(values)]
        if holds_tensors_only(first) or is_optimizer(first):
            raise CheckpointError(
                f"'{self.place}' has item {key!r} of {len(values)} ranks, without a record of their parts.",
                remedy="Save it with `ItemSpec(resharder=DefaultResharder())` in `Config.items`.",
            )
        if any(value != first for value in values.values()):
            for rank, value in values.items():
                self.of_ranks.setdefault(rank, {})[key] = value
        return first

    def _load(self, name: str) -> Any:
        file = self.place / name
        if name.endswith(".json"):
            with explained("read", file):
                return json.loads(file.read_bytes())
        if name.endswith(".safetensors"):
            return {
                tensor.name: FileTensor(
                    tensor.shape,
                    getattr(torch, tensor.dtype_name),
                    _row_major(tensor.shape),
                    file,
                    tensor.start,
                )
                for tensor in read_header(file).tensors
            }
        return load_torch_file(file, weights_only=self.weights_only, local=True)

    def _merged(self, key: str, values: Mapping[int, Any], path: _Keys) -> Any:
        """Merge the same place in the files of all ranks."""
        records = self.claims[key].get(path)
        if records is not None:
            return self._tensor(key, values, path, records)
        first = next(iter(values.values()))
        if isinstance(first, dict):
            keys = dict.fromkeys(k for value in values.values() for k in value)
            return {
                k: self._merged(key, {r: v[k] for r, v in values.items() if k in v}, (*path, k)) for k in keys
            }
        if isinstance(first, list):
            return [
                self._merged(key, {r: v[i] for r, v in values.items()}, (*path, i)) for i in range(len(first))
            ]
        if isinstance(first, FileTensor):
            raise _malformed(self.place, f"it has no record of '{key}', {list(path)}")
        return first

    def _tensor(self, key: str, values: Mapping[int, Any], path: _Keys, records: Any) -> LocatedTensor:
        """Return a tensor from the parts of all ranks."""
        pieces: list[Piece] = []
        shape: tuple[int, ...] = ()
        dtypes = set()
        for group in records:
            claim = group["sharding_metadata"]
            shape = tuple(claim["data"]["global_shape"])
            for rank in group["ranks"]:
                value = values.get(rank)
                if not isinstance(value, FileTensor):
                    raise _malformed(self.place, f"rank {rank} has no tensor '{key}', {list(path)}")
                dtypes.add(value.dtype)
                for part in _parts(claim, rank, self.place):
                    if part.box.numel:
                        pieces.append(_piece(value, part, self.place))
        entry = LocatedTensor(shape, dtypes.pop(), tuple(pieces))
        fault = find_fault(shape, entry.entry("").copies)
        if fault or dtypes:
            raise _malformed(
                self.place, f"the parts of '{key}', {list(path)}, do not make up its shape {shape}: {fault}"
            )
        return entry


def _piece(value: FileTensor, part: _Part, place: Path) -> Piece:
    """Return the place of a part in the file of a rank."""
    if any(a + n > full for a, n, full in zip(part.local, part.box.size, value.shape, strict=True)):
        raise _malformed(place, f"a part of {part.box.size} at {part.local} is not in {value.shape}")
    first = sum(a * stride for a, stride in zip(part.local, value.stride, strict=True))
    view = FileTensor(
        part.box.size, value.dtype, value.stride, value.path, value.start + first * value.dtype.itemsize
    )
    if not view.is_contiguous:
        raise CheckpointError(
            f"'{value.path}' has a part of shape {view.shape} with strides {view.stride}, which has gaps.",
            remedy="Save contiguous tensors, or load it with torch_checkpointing.",
        )
    return Piece(part.box, str(view.path), view.start, view.numel * view.dtype.itemsize)


def _parts(claim: Mapping[str, Any], rank: int, place: Path) -> Iterator[_Part]:
    """Yield the parts of a tensor that a rank has."""
    data = claim["data"]
    if claim["type"] == "default_tensor_v1":
        for offset, local, size in zip(
            data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True
        ):
            yield _Part(Box(tuple(offset), tuple(size)), tuple(local))
        return
    if claim["type"] != "DTensorShardingMetadata":
        raise _unknown(place, f"parts of kind {claim['type']!r}")
    offset, size = [0] * len(data["global_shape"]), list(data["global_shape"])
    mesh = data["mesh_spec"]
    places = itertools.product(*(range(extent) for extent in mesh["mesh_shape"]))
    coordinates = dict(zip(mesh["mesh_data"], places, strict=True))[rank]
    for extent, coordinate, placement in zip(
        mesh["mesh_shape"], coordinates, data["placements"], strict=True
    ):
        if placement["type"] == "Replicate":
            continue
        if placement["type"] != "Shard":
            raise _unknown(place, f"the placement {placement['type']!r}")
        dim = placement["dim"]
        rows = -(-size[dim] // extent)
        start = min(coordinate * rows, size[dim])
        offset[dim] += start
        size[dim] = min(start + rows, size[dim]) - start
    yield _Part(Box(tuple(offset), tuple(size)), (0,) * len(size))


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of plain data, which names no class."""

    @override
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def _read_metadata(file: Path) -> dict[str, Any]:
    with explained("read", file):
        raw = file.read_bytes()
    refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=str(file))
    try:
        found = _PlainUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # damage or a pickle may raise anything
        raise CheckpointError(
            f"cannot read '{file}': {type(error).__name__}: {error}.",
            remedy="Restore it from a backup, or use another checkpoint.",
        ) from error
    refuse_endless(found, nbytes=len(raw), source=str(file))
    if not isinstance(found, dict) or found.get("version") != "2.0":
        version = found.get("version") if isinstance(found, dict) else type(found).__name__
        raise _unknown(file, f"version {version!r}, and 2.0 is known")
    return found


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(reversed(list(strides)))[: len(shape)] if shape else ()


def _unknown(place: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"'{place}' has {what}, which nnx does not read.",
        remedy="Load it with torch_checkpointing and save it again, or update nnx-checkpoint.",
    )


def _malformed(place: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"'{place}' is not a whole directory of torch_checkpointing: {why}.",
        remedy="Make sure that the files of all ranks are there, of one save.",
    )

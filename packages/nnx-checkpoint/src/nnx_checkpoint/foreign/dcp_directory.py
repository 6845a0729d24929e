"""Directories of `torch.distributed.checkpoint`, as ``dcp.save`` writes them, and Lightning's sharded ones.

They are read by what `nnx_checkpoint.foreign.dcp_files` finds in them. Torch's own planner and writer
write them, from a checkpoint of any format and tensor after tensor.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from nnx_checkpoint._torch_compat import storage_info
from nnx_checkpoint.dcp import Handle
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint
from nnx_checkpoint.foreign.dcp_contents import (
    OURS,
    TRAINER,
    Parts,
    add_parts,
    interpret,
    is_ours,
    nest,
    restore_ours,
    state_to_write,
)
from nnx_checkpoint.foreign.dcp_files import (
    DcpMetadata,
    Items,
    metadata_files,
    read_metadata,
    read_shards,
    shard_files,
)
from nnx_checkpoint.foreign.torch_file import load_torch_file, map_tree
from nnx_checkpoint.foreign.torch_writer import write_torch_file
from nnx_checkpoint.formats import CheckpointFormat, Progress
from nnx_checkpoint.naming import FABRIC_KEYS, StoredName, stored_optimizer_states
from nnx_checkpoint.reader import Checkpoint
from nnx_checkpoint.shard import Shard
from nnx_checkpoint.slabs import SLAB, Part, new_directory, read_in_order, row_boxes
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.views import Described

__all__ = ["DcpDirectory", "LightningSharded"]

log = logging.getLogger("nnx.checkpoint")

_SUFFIX = ".distcp"


# --- reading a directory --------------------------------------------------------------------------


def looks_like_dcp(path: str | os.PathLike[str]) -> bool:
    """Whether there are files with the names that DCP gives them."""
    directory = Path(path)
    if "://" in os.fspath(path) or not directory.is_dir():
        return False
    return bool(metadata_files(directory)) or any(file.suffix == _SUFFIX for file in directory.iterdir())


def read_directory(directory: Path, *, weights_only: bool) -> tuple[DcpMetadata, dict[str, Any]]:
    """Find every tensor and read every object of a directory.

    Args:
        directory: The checkpoint.
        weights_only: False executes what its pickles bring along.

    Returns:
        The metadata, and the state dict that was saved, with tensors still in the files.

    Raises:
        CheckpointError: It is incomplete, damaged, malicious, or of two saves.
    """
    metadata = read_metadata(directory, weights_only=weights_only)
    with Items(directory, weights_only=weights_only) as items:
        items.check_lengths(metadata.items)
        check_ages([directory / file for file in metadata.data_files], metadata.files)
        values = {name: items.load(name, item) for name, item in metadata.objects.items()}
        values |= {name: items.locate(name, tensor) for name, tensor in metadata.tensors.items()}
    return metadata, nest({name: values[name] for name in metadata.keys}, metadata.keys)


def opened(
    path: str | os.PathLike[str],
    format: str,
    metadata: DcpMetadata,
    parts: Parts,
    beside: Mapping[str, Any],
) -> ForeignCheckpoint:
    """The checkpoint, from its parts.

    Args:
        path: The directory.
        format: Name of its format.
        metadata: The metadata, which say what it claims to hold.
        parts: The state dict, taken apart.
        beside: Objects of the trainer that lie beside the state dict.
    """
    contents = Contents(path, format)
    beside = dict(beside)
    origin = restore_ours(contents, beside)
    add_parts(contents, parts, beside)
    if origin is not None:
        return contents.opened(**origin)
    directory = Path(path)
    unused = sorted(
        file.name
        for file in directory.iterdir()
        if file.suffix == _SUFFIX and file.name not in metadata.data_files
    )
    provenance: dict[str, Any] = {"keys": parts.keys}
    if unused:
        provenance["files of another save"] = unused
    return contents.opened(world_size=metadata.world_size, provenance=provenance)


_PAUSE = 10.0
"""Seconds that may pass between two files of a copy, beside the time that the second one takes."""
_SLOWEST = 10e6
"""Bytes per second below which nobody copies a checkpoint."""


def check_ages(earlier: Iterable[Path], later: Sequence[Path]) -> None:
    """Refuse files of two saves, as far as their times tell.

    DCP overwrites a directory's files one by one under the same names, and its metadata last. When that is
    interrupted, data of two steps lies side by side, and torch reads it without a word. Only the times betray
    it: data that is newer than the metadata, after a pause. A copy may have times in any order, but no pause.

    Args:
        earlier: Files that were complete before any of `later` was written.
        later: The others.

    Raises:
        CheckpointError: They were written in the wrong order, with a pause between.
    """
    with explained("read", later[-1]):
        end = max(path.stat().st_mtime for path in later)
        found = sorted((path.stat().st_mtime - end, path.stat().st_size, path) for path in earlier)
    late = [(age, size, path) for age, size, path in found if age > 0]
    previous = 0.0
    for number, (age, size, path) in enumerate(late):
        if age - previous > _PAUSE + size / _SLOWEST:
            raise CheckpointError(
                f"'{path.parent}' holds files of two saves: {_names(late[number:])} were written "
                f"{age - previous:.0f} seconds after the rest, by a save into the same directory that was "
                "interrupted.",
                remedy=f"Resume from another checkpoint. If you know that it is whole, `touch {later[-1]}`.",
            )
        previous = age
    if late:
        log.warning(
            "%s in %s is newer than %s. That is so in a copy; otherwise the files are of two saves.",
            _names(late),
            later[-1].parent,
            later[-1].name,
        )


def _names(late: Sequence[tuple[float, int, Path]]) -> str:
    return ", ".join(path.name for _, _, path in late[:4]) + (", ..." if len(late) > 4 else "")


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
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
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


# --- the formats ----------------------------------------------------------------------------------


class DcpDirectory(CheckpointFormat):
    """What ``dcp.save`` writes: ``.metadata`` and files of every rank, or safetensors files without it."""

    name = "dcp"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return looks_like_dcp(path) or bool(shard_files(Path(path)))

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        if not looks_like_dcp(path):
            return opened(path, self.name, DcpMetadata(), interpret(read_shards(Path(path))), {})
        metadata, tree = read_directory(Path(path), weights_only=weights_only)
        beside = tree.pop(TRAINER) if is_ours(tree.get(TRAINER)) else {}
        parts = interpret(tree, keys=beside.get(OURS, {}).get("fabric"))
        if "state_dict" in parts.models and parts.optimizers:
            log.warning(
                "%s was written by Lightning but lacks its meta.pt: step, schedulers and callbacks are lost.",
                path,
            )
        return opened(path, self.name, metadata, parts, beside)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        parameter_names: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """Write a directory that ``dcp.load`` and ``dcp_to_torch_save`` read.

        The model is under ``model`` and the optimizer under ``optimizer``, both by parameter name, as torch's
        ``get_state_dict`` has them; several are ``optimizer_0``, ``optimizer_1`` and so on. What Trainer and
        nnx need besides is under ``trainer``.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            parameter_names: The names of parameters for each optimizer that only numbers them.
            **options: There are no others.

        Raises:
            CheckpointError: An object cannot be pickled, or reading or writing failed.
        """
        self.refuse_options(options)
        described = Described(checkpoint)
        several = len(stored_optimizer_states(described) or ()) > 1
        state, beside = state_to_write(
            described,
            model_key="model",
            optimizer_key="optimizer_{}" if several else "optimizer",
            parameter_names=parameter_names,
        )
        with new_directory(path) as directory:
            write_dcp_files(directory, described, state, objects=(TRAINER, beside), progress=progress)


# --- the format ``lightning_sharded`` -------------------------------------------------------------
# Sharded directories of Lightning's ModelParallelStrategy and FSDPStrategy, from Trainer and from Fabric,
# are DCP directories with the rest of Lightning's dict beside, in ``meta.pt``.


_META = "meta.pt"
_MODEL_KEY = {"model_parallel": "state_dict", "fsdp": "model"}
_VERSION = "pytorch-lightning_version"


class LightningSharded(CheckpointFormat):
    """A DCP directory with ``meta.pt``."""

    name = "lightning_sharded"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return looks_like_dcp(path) and (Path(path) / _META).is_file()

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        directory = Path(path)
        meta: Any = load_torch_file(directory / _META, weights_only=weights_only)
        if not isinstance(meta, dict):
            raise CheckpointError(
                f"'{directory / _META}' holds a {type(meta).__name__}, not the rest of a checkpoint.",
                remedy="Restore it from a backup, or resume from another checkpoint.",
            )
        metadata, tree = read_directory(directory, weights_only=weights_only)
        check_ages(metadata.files, [directory / _META])
        if is_ours(meta):
            return opened(path, self.name, metadata, interpret(tree, keys=meta[OURS]["fabric"]), meta)
        by_fabric = _VERSION not in meta
        parts = interpret(tree, every_model=by_fabric)
        keys = {FABRIC_KEYS: parts.keys} if by_fabric else {}
        return opened(path, self.name, metadata, parts, {**meta, **keys})

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        strategy: Literal["model_parallel", "fsdp"] = "model_parallel",
        parameter_names: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        """Write a directory that Trainer resumes from with one of Lightning's own sharding strategies.

        A checkpoint that Fabric saved is written under the keys that its user chose, for Fabric.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            strategy: The strategy that is to read it: they look for the model under different keys.
            parameter_names: The names of parameters for each optimizer that only numbers them.
            **options: There are no others.

        Raises:
            CheckpointError: An optimizer's parameters have no names, an object cannot be pickled, or reading
                or writing failed.
        """
        self.refuse_options(options)
        if strategy not in _MODEL_KEY:
            raise CheckpointError(
                f"Lightning has no sharding strategy {strategy!r}.",
                remedy=f"Use one of {', '.join(_MODEL_KEY)}.",
            )
        described = Described(checkpoint)
        state, meta = state_to_write(
            described,
            model_key=_MODEL_KEY[strategy],
            optimizer_key="optimizer_{}",
            parameter_names=parameter_names,
            named_only=True,
        )
        with new_directory(path) as directory:
            write_dcp_files(directory, described, state, progress=progress)
            nothing: Progress = lambda done, total: None  # noqa: E731
            write_torch_file(directory / _META, meta, described, name="archive", progress=nothing)

"""Write a DCP directory.

torch's writer keeps every tensor of a file until the file is complete. Here it gets views of two slabs of a
few megabytes, which the source is read into chunk by chunk, so that they take no further memory. It must
request a chunk only after writing the last one, so its copy-ahead is disabled.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint._torch_compat import storage_info
from nnx_checkpoint.foreign.dcp import Handle
from nnx_checkpoint.foreign.torch_archive import write_torch_file
from nnx_checkpoint.reading.formats import Progress
from nnx_checkpoint.reading.naming import Described, StoredName
from nnx_checkpoint.reading.slabs import SLAB, Part, read_in_order, row_boxes
from nnx_checkpoint.storage.files import explained
from nnx_checkpoint.unpickling.torch_file import map_tree

_OBJECT = "__0_1.distcp"
"""The file of the trainer's objects; torch's only data file is ``__0_0.distcp``."""


class _StoredHandle(Handle):
    """A handle for a tensor of a checkpoint until its chunks are written."""

    source: StoredName

    @classmethod
    def of(cls, source: StoredName) -> _StoredHandle:
        """Return the handle for a tensor, in the chunks of `read_in_order`."""
        entry = source.stored.entry(source.key)
        boxes = tuple(row_boxes(entry.shape, entry.itemsize, SLAB))
        views = tuple(torch.empty(box.size, dtype=entry.dtype, device="meta") for box in boxes)
        handle = cls(Shard(entry.shape, entry.dtype, boxes, views))
        handle.source = StoredName(source.stored, entry.name)
        return handle


class _Planner(DefaultSavePlanner):
    """Plans a state dict of `StoredName`, and reads each chunk when the writer requests it.

    Args:
        checkpoint: The checkpoint to read the tensors from.
        progress: Function of the bytes of tensors done and their total.
    """

    def __init__(self, checkpoint: Described, progress: Progress) -> None:
        super().__init__()
        self._checkpoint, self._progress = checkpoint, progress
        self.parts: Iterator[Part] = iter(())
        """The chunks still to write."""
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
        whole = map_tree(object, lambda v: v.source.read() if isinstance(v, _StoredHandle) else v)
        try:
            return super().transform_object(write_item, whole)
        except Exception as error:  # the object's own methods may raise anything
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
        directory: The empty directory to write into.
        checkpoint: The checkpoint to read each `StoredName` from.
        state: The state dict.
        objects: A further key, and one object for it, which gets its own file.
        progress: Function of the bytes of tensors done and their total.

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
        except RuntimeError as error:  # after a failed write, torch complains about a wrong position
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        list(planner.parts)  # all chunks are read: report the last one as done
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
    """Add further names of tensors, which refer to the same items."""
    names: dict[str, list[str]] = {}
    for name, first in tied.items():
        names.setdefault(first, []).append(name)
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
    return [
        replace(result, index=replace(result.index, fqn=name))
        for result in results
        for name in names.get(result.index.fqn, ())
    ]

"""Provide our storage to users of plain `torch.distributed.checkpoint`.

``dcp.save(state, storage_writer=Writer(path))`` writes an nnx checkpoint, with its checksums and its
atomic commit; ``dcp.load(state, storage_reader=Reader(path))`` reads any nnx checkpoint. `Handle` lets a
shard that is not a DTensor (such as a range of a flat buffer) enter such a state dict.
This module only translates between DCP's plans and the storage.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_base.shard import Box, Shard
from nnx_checkpoint._torch_compat import WithoutData
from nnx_checkpoint.format.codec import Encoder
from nnx_checkpoint.format.index import index_of
from nnx_checkpoint.format.manifest import FileEntry, rank_file
from nnx_checkpoint.format.rankfile import write_rank_file
from nnx_checkpoint.format.rankfile_header import Entry
from nnx_checkpoint.reading.formats import open_checkpoint
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.storage.locations import place_of
from nnx_checkpoint.writing.transaction import Transaction, begin
from nnx_checkpoint.writing.writer import write_objects, writer_info

_OBJECTS, _PATHS = "dcp.objects", "dcp.paths"


class Handle(WithoutData):
    """A tensor that represents a `Shard` in a state dict for `torch.distributed.checkpoint`.

    ``Handle(shard)`` has the global shape and dtype but no data of its own; DCP reads and fills the views of
    the local shard.
    """

    shard: Shard

    @staticmethod
    def __new__(cls: type[Handle], shard: Shard) -> Handle:  # noqa: D102
        device = shard.data[0].device if shard.data else torch.device("cpu")
        made: Handle = cls.shaped(torch.Size(shard.shape), shard.dtype, device)
        made.shard = shard
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={self.shard.shape}, boxes={list(self.shard.boxes)})"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.shard.dtype)
        size = torch.Size(self.shard.shape)
        return [
            WriteItem(
                MetadataIndex(fqn, box.offset, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for i, (box, chunk) in enumerate(zip(self.shard.boxes, self._chunks(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, view in zip(self.shard.boxes, self.shard.data, strict=True):
            if index.offset is None or box.offset == tuple(index.offset):
                return view
        raise CheckpointError(f"this rank holds no box at {index.offset} of tensor '{index.fqn}'.")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.shard.boxes]


@dataclass(frozen=True, slots=True)
class _Written:
    """The report of a rank for one item: a stored box, or an object in typed JSON."""

    box: Entry | None
    tree: Any
    files: dict[str, FileEntry]
    """The files of the rank, with its first item only."""


class Writer(StorageWriter):
    """Writes an nnx checkpoint under DCP's planner.

    Every rank stores the boxes that DCP assigns to it. Objects that are not tensors are stored as typed
    JSON; an object without such an encoding is an error.

    Args:
        path: Directory of the checkpoint: new, empty, or a checkpoint to replace.
        keep_previous: The number of earlier saves at this path to keep on disk.
        provenance: Plain JSON about the origin of the checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_previous: int = 0,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.checkpoint_id: str | os.PathLike[str] = path
        self._keep_previous = keep_previous
        self._provenance = dict(provenance or {})
        self._transaction: Transaction | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        if self._transaction is not None:  # of a save that failed on another rank
            self._transaction.discard()
        self._transaction = None

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._transaction = begin(place_of(self.checkpoint_id))
        save_id = self._transaction.save_id
        return [replace(plan, storage_data=(save_id, rank)) for rank, plan in enumerate(plans)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save_id, rank = plan.storage_data
        boxes: list[Entry] = []
        data: list[Tensor] = []
        results: list[_Written] = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                results.append(_Written(None, _encode(item.index.fqn, planner, item), {}))
            else:
                box = _stored_box(item)
                boxes.append(box)
                data.append(cast(Tensor, planner.resolve_data(item)).detach())
                results.append(_Written(box, None, {}))
        files = write_rank_file(place_of(self.checkpoint_id) / save_id, rank, boxes, data)
        if results:
            results[0] = replace(results[0], files=files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, result.box.nbytes if result.box else 0, result)
                for item, result in zip(plan.items, results, strict=True)
            ]
        )
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            raise CheckpointError(
                "this writer has no save plan.", remedy="Call dcp.save(...) with this writer."
            )
        try:
            self._finish(transaction, metadata, results)
        except BaseException as error:
            standing = transaction.discard()
            if isinstance(error, CheckpointError):
                error.add(standing)
            raise

    def _finish(self, transaction: Transaction, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        directory = transaction.directory
        files: dict[str, FileEntry] = {}
        stored: dict[str, dict[Box, list[str]]] = {}
        trees: dict[str, Any] = {}
        for rank, of_rank in enumerate(results):
            written = [cast(_Written, result.storage_data) for result in of_rank]
            for result, item in zip(of_rank, written, strict=True):
                files |= item.files
                if item.box is None:
                    trees[result.index.fqn] = item.tree
                else:
                    boxes = stored.setdefault(item.box.name, {})
                    boxes.setdefault(item.box.box, []).append(rank_file(rank))
        paths = Encoder("paths").encode(metadata.planner_data)
        files |= write_objects(directory, None, {_OBJECTS: trees, _PATHS: paths}, {})
        tensors = {
            name: (_dtype_name(entry.properties.dtype), tuple(entry.size), stored.get(name, {}))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        transaction.finish(
            index_of(tensors),
            files,
            writer=writer_info(len(results)),
            provenance=self._provenance,
            keep_previous=self._keep_previous,
        )

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads an nnx checkpoint under DCP's planner.

    Args:
        path: The checkpoint's directory, or a link to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.checkpoint_id: str | os.PathLike[str] = path
        self._opened: Checkpoint | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._opened = None

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        checkpoint = self._checkpoint()
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in checkpoint.tensors.items():
            properties = TensorProperties(dtype=entry.dtype)
            chunks = [_chunk(box) for box in entry.boxes]
            entries[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        objects, paths = self._objects()
        entries |= {name: BytesStorageMetadata() for name in objects}
        planner_data = {name: (name,) for name in entries} | (paths or {})
        return Metadata(entries, planner_data=planner_data)

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._checkpoint()
        objects, _ = self._objects()
        parts: dict[str, tuple[list[Box], list[Tensor]]] = {}
        filled: list[tuple[Any, Tensor]] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(objects[item.storage_index.fqn]))
                continue
            target = planner.resolve_tensor(item).detach()
            boxes, views = parts.setdefault(item.storage_index.fqn, ([], []))
            boxes.append(_stored_region(item))
            views.append(target)
            filled.append((item, target))
        checkpoint.fill(
            {
                name: Shard(checkpoint.entry(name).shape, views[0].dtype, tuple(boxes), tuple(views))
                for name, (boxes, views) in parts.items()
            }
        )
        for item, target in filled:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            self._opened = open_checkpoint(self.checkpoint_id)
        return self._opened

    def _objects(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        tree = self._checkpoint().objects
        if not isinstance(tree, dict) or _OBJECTS not in tree:
            return {}, None
        return tree[_OBJECTS], tree[_PATHS]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))


def _stored_region(item: ReadItem) -> Box:
    """Return the box of an item in the logical tensor (DCP counts from the start of a stored chunk)."""
    chunk = item.storage_index.offset or torch.Size([0] * len(item.lengths))
    offset = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
    return Box(offset, tuple(item.lengths))


def _stored_box(item: WriteItem) -> Entry:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"DCP planned no chunk for tensor '{item.index.fqn}'.")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Entry(item.index.fqn, tuple(data.size), _dtype_name(data.properties.dtype), box)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode(name: str, planner: SavePlanner, item: WriteItem) -> Any:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise CheckpointError(
            f"'{name}' is not a tensor, and {type(planner).__name__} provides it only as a pickle.",
            remedy="Use a planner derived from DefaultSavePlanner.",
        )
    return Encoder(name).encode(lookup(item.index), (name,))


def _pickled(value: Any) -> io.BytesIO:
    """Return a pickle of a value decoded from JSON, for DCP's planner."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer

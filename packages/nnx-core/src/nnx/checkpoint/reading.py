"""Reading a checkpoint: only the bytes that are asked for, each verified before it counts.

Opening checks the manifest, that every file is there with its length, and the index. Filling copies
the intersections of stored boxes and wanted boxes straight into the caller's memory. Nothing here
communicates and no pickle is executed unless the caller allows it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnx.checkpoint.codec import decode
from nnx.checkpoint.fetch import Fetcher, Wanted
from nnx.checkpoint.index import Index, TensorEntry
from nnx.checkpoint.manifest import Manifest
from nnx.checkpoint.saving import objects_file
from nnx.checkpoint.source import Source
from nnx.errors import CheckpointError
from nnx.layout import Box, Shard

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
    """Open a checkpoint and check all that can be checked without reading tensor data.

    Args:
        path: Its directory, or a link to it.
        weights_only: With False, objects that were saved with ``opaque="pickle"`` may run any code that
            whoever wrote the checkpoint put there. True restricts them to what torch knows to be safe.

    Returns:
        A handle that reads on demand.

    Raises:
        CheckpointError: There is no checkpoint, it is of a newer format, or a file is missing, truncated
            or damaged.
    """
    return Checkpoint(Source.open(Path(path)), weights_only=weights_only)


class Checkpoint:
    """A committed checkpoint; made by `open_checkpoint`."""

    def __init__(self, source: Source, *, weights_only: bool) -> None:
        self._source = source
        self._weights_only = weights_only

    @property
    def path(self) -> Path:
        """The directory that was opened."""
        return self._source.path

    @property
    def manifest(self) -> Manifest:
        """Who wrote the checkpoint, when, and its files."""
        return self._source.manifest

    @property
    def index(self) -> Index:
        """Where every tensor is stored."""
        return self._source.index

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Every logical tensor by name, those lifted out of objects included."""
        return self.index.tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names, mapped to the name under which the data is stored."""
        return self.index.aliases

    @property
    def world_size(self) -> int:
        """How many ranks wrote the checkpoint."""
        return int(self.manifest.writer.get("world_size", 1))

    @cached_property
    def objects(self) -> Any:
        """The tree that was saved as `objects`, with its tensors."""
        return self._decoded(None)

    def rank_objects(self, rank: int) -> Any | None:
        """The tree that one rank saved for itself; None if it saved none."""
        return self._decoded(rank) if objects_file(rank) in self.manifest.files else None

    def entry(self, name: str) -> TensorEntry:
        """The tensor of a name, which may be an alias.

        Raises:
            CheckpointError: There is none.
        """
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            raise self._missing([name])
        return found

    def fill(self, shards: Mapping[str, Shard]) -> None:
        """Copy stored data into shards, in place.

        Each rank fills its own and reads only the bytes it needs, whatever world wrote them. After an
        error some of the shards may be filled and others not.

        Args:
            shards: What to fill, by name or alias.

        Raises:
            CheckpointError: A name is missing, a shape or dtype differs, or a file is damaged.
        """
        missing = [name for name in shards if self.aliases.get(name, name) not in self.tensors]
        if missing:
            raise self._missing(missing)
        wanted: list[Wanted] = []
        for name, shard in shards.items():
            entry = self.entry(name)
            _require_same(entry, name, shard, self.path)
            wanted += [
                Wanted(entry, box, view)
                for box, view in zip(shard.boxes, shard.data, strict=True)
                if box.numel
            ]
        Fetcher(self._source).fetch(wanted)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read one tensor, or one box of it, into new memory on the CPU."""
        entry = self.entry(name)
        box = box or Box.whole(entry.shape)
        tensor = torch.empty(box.size, dtype=entry.dtype)
        self.fill({name: Shard(entry.shape, entry.dtype, (box,), (tensor,))})
        return tensor

    def _decoded(self, rank: int | None) -> Any:
        name = objects_file(rank)
        place = str(self._source.directory / name)
        try:
            tree = json.loads(self._source.read_file(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"'{place}' is malformed: {error}.") from error
        opaque = _Opaque(self._source, f"{name.rsplit('.', 1)[0]}.bin", self._weights_only)
        return decode(tree, tensor=self.read, opaque=opaque, source=place)

    def _missing(self, names: list[str]) -> CheckpointError:
        shown = ", ".join(f"'{name}'" for name in names[:10]) + (", ..." if len(names) > 10 else "")
        return CheckpointError(
            f"checkpoint '{self.path}' has no tensor {shown} ({len(names)} missing).",
            remedy="Check that it belongs to this model; `nnx ckpt inspect` lists what it holds.",
        )


class _Opaque:
    """Objects that were stored by pickle, unpickled on first use."""

    def __init__(self, source: Source, name: str, weights_only: bool) -> None:
        self._source, self._name, self._weights_only = source, name, weights_only
        self._objects: dict[str, Any] | None = None

    def __call__(self, place: str) -> Any:
        if self._objects is None:
            data = io.BytesIO(self._source.read_file(self._name))
            try:
                self._objects = torch.load(data, map_location="cpu", weights_only=self._weights_only)
            except Exception as error:  # whatever the pickle makes it raise
                raise self._refusal(place, error) from error
        assert self._objects is not None
        return self._objects[place]

    def _refusal(self, place: str, error: Exception) -> CheckpointError:
        reason = str(error).strip().split("\n")[0]
        return CheckpointError(
            f"'{self._source.directory / self._name}' holds the object at '{place}' as a pickle that was "
            f"not loaded: {type(error).__name__}: {reason}",
            remedy="If you trust whoever wrote the checkpoint, pass weights_only=False.",
        )


def _require_same(entry: TensorEntry, name: str, shard: Shard, path: Path) -> None:
    if entry.shape != tuple(shard.shape):
        raise CheckpointError(
            f"tensor '{name}' has shape {entry.shape} in checkpoint '{path}', "
            f"but shape {tuple(shard.shape)} in the model.",
            remedy="Build the model with the same sizes as the one that was saved.",
        )
    if entry.dtype != shard.dtype:
        raise CheckpointError(
            f"tensor '{name}' is {entry.dtype} in checkpoint '{path}', but {shard.dtype} in the model.",
            remedy="Load with the precision that was saved, and convert the model afterwards.",
        )
    for box in shard.boxes:
        if any(a + n > full for a, n, full in zip(box.offset, box.size, entry.shape, strict=True)):
            raise CheckpointError(
                f"{box} lies outside tensor '{name}' of shape {entry.shape}.", remedy="Ask for a box inside."
            )

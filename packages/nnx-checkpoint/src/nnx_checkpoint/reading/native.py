"""Open a checkpoint of our own format.

Opening checks the manifest, the presence and length of every file, and the index. Filling copies the
intersections of stored and wanted boxes straight into the caller's memory, and verifies each block.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.codec import decode
from nnx_checkpoint.format.index import Index, TensorEntry
from nnx_checkpoint.format.manifest import Manifest, load_json, objects_file
from nnx_checkpoint.format.source import Source
from nnx_checkpoint.reading.fetching import Fetcher, Wanted
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.storage import Location
from nnx_checkpoint.unpickling.allowed import refuse_endless
from nnx_checkpoint.unpickling.cost import refuse_swollen


def open_native(path: Location, *, weights_only: bool = True) -> NativeCheckpoint:
    """Open a checkpoint of our own format and check all that can be checked without reading tensor data.

    Args:
        path: The checkpoint's directory, or a link to it.
        weights_only: False executes code that the author of the checkpoint may have put into objects saved
            with ``opaque="pickle"``. True restricts them to classes that torch considers safe.

    Returns:
        A handle that reads on demand.

    Raises:
        CheckpointError: The checkpoint does not exist, has a newer format, or a file of it is missing,
            truncated or damaged.
    """
    return NativeCheckpoint(Source.open(path), weights_only=weights_only)


class NativeCheckpoint(Checkpoint):
    """A committed checkpoint of our own format; made by `open_native`."""

    format = "nnx"

    def __init__(self, source: Source, *, weights_only: bool) -> None:
        self._source = source
        self._weights_only = weights_only

    @property
    @override
    def path(self) -> Path | str:
        """The opened directory, or its URL."""
        return self._source.path.location

    @property
    def manifest(self) -> Manifest:
        """The writer and date of the checkpoint, and its files."""
        return self._source.manifest

    @property
    def index(self) -> Index:
        """The storage position of every tensor."""
        return self._source.index

    @property
    @override
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self.index.tensors

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return self.index.aliases

    @property
    @override
    def world_size(self) -> int:
        return int(self.manifest.writer.get("world_size", 1))

    @property
    @override
    def own_ranks(self) -> Sequence[int]:
        return [rank for rank in range(self.world_size) if objects_file(rank) in self.manifest.files]

    @property
    @override
    def provenance(self) -> Mapping[str, Any]:
        return self.manifest.provenance

    @override
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        Fetcher(self._source).fetch(wanted)

    @override
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        name = objects_file(rank)
        if rank is not None and name not in self.manifest.files:
            return None
        place = str(self._source.directory / name)
        try:
            tree = load_json(self._source.read_file(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"'{place}' is malformed: {error}.") from error
        opaque = _Opaque(self._source, f"{name.rsplit('.', 1)[0]}.bin", self._weights_only)
        return decode(tree, tensor=tensor, opaque=opaque, source=place)


class _Opaque:
    """Objects stored by pickle, which are unpickled on first use."""

    def __init__(self, source: Source, name: str, weights_only: bool) -> None:
        self._source, self._name, self._weights_only = source, name, weights_only
        self._objects: dict[str, Any] | None = None

    def __call__(self, place: str) -> Any:
        if self._objects is None:
            raw, source = self._source.read_file(self._name), str(self._source.directory / self._name)
            if self._weights_only:
                refuse_swollen(io.BytesIO(raw), nbytes=len(raw), source=source)
            try:
                loaded = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=self._weights_only)
            except Exception as error:  # a pickle may raise anything
                raise self._refusal(place, error) from error
            refuse_endless(loaded, nbytes=len(raw), source=source)
            self._objects = loaded
        assert self._objects is not None
        return self._objects[place]

    def _refusal(self, place: str, error: Exception) -> CheckpointError:
        reason = str(error).strip().split("\n")[0]
        return CheckpointError(
            f"'{self._source.directory / self._name}' holds the object at '{place}' as a pickle that was "
            f"not loaded: {type(error).__name__}: {reason}",
            remedy="If you trust the author of the checkpoint, pass weights_only=False.",
        )

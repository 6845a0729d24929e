"""Our own format as a `CheckpointFormat`: opened as usual, and written from one process by streaming.

Training saves through `nnx.checkpoint.writer`, from all ranks. This is for converting: what is written was
never all in memory, and the objects of every rank that wrote the source come along.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from typing_extensions import override

from nnx.checkpoint.cells import Kind, OddBox, OddTensor, Stored
from nnx.checkpoint.foreign.leftovers import StoredEncoder
from nnx.checkpoint.formats import CheckpointFormat, Progress
from nnx.checkpoint.index import INDEX, encode_index, required
from nnx.checkpoint.manifest import BLOCK, FileEntry, Manifest, digest, rank_file
from nnx.checkpoint.places import LocalPlace, place_of
from nnx.checkpoint.rankfile import StoredBox, file_order, write_in_order
from nnx.checkpoint.reader import Checkpoint, open_native
from nnx.checkpoint.slabs import new_directory, read_in_order
from nnx.checkpoint.source import is_checkpoint
from nnx.checkpoint.storage import Place
from nnx.checkpoint.transaction import Attempt, begin, now
from nnx.checkpoint.views import Described
from nnx.checkpoint.writer import Files, write_objects, writer_info
from nnx.errors import CheckpointError
from nnx.layout import Box

__all__ = ["Native"]


class Native(CheckpointFormat):
    """The shared checkpoint directory."""

    name = "nnx"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return is_checkpoint(path)

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        return open_native(path, weights_only=weights_only)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        opaque: Literal["error", "pickle"] = "error",
        **options: Any,
    ) -> None:
        """Write a checkpoint of our own format.

        Args:
            checkpoint: What to write, of any format.
            path: A path or URL where nothing is.
            progress: Told how far it is.
            opaque: ``"pickle"`` stores objects that have no safe encoding; ``"error"`` refuses them.
            **options: There are no others.

        Raises:
            CheckpointError: An object has no JSON form, or reading or writing failed.
        """
        if options:
            raise CheckpointError(f"format 'nnx' has no option {next(iter(options))!r}.")
        described = Described(checkpoint)
        with _target(path) as place:
            attempt = begin(place)
            try:
                _Writing(described, attempt, progress, opaque).run()
            except BaseException:
                attempt.discard()
                raise


@contextlib.contextmanager
def _target(path: str | os.PathLike[str]) -> Iterator[Place]:
    """Where to write; behind a URL at once, since the manifest, which is last, makes it a checkpoint."""
    place = place_of(path)
    if isinstance(place, LocalPlace):
        with new_directory(path) as directory:
            yield LocalPlace(directory)
        return
    if is_checkpoint(path):
        raise CheckpointError(
            f"cannot write '{place}': it exists already.", remedy="Choose a new URL, or remove it first."
        )
    yield place


class _Writing:
    """One checkpoint on its way into a save directory."""

    def __init__(
        self, checkpoint: Described, attempt: Attempt, progress: Progress, opaque: Literal["error", "pickle"]
    ) -> None:
        self.checkpoint = checkpoint
        self.attempt = attempt
        self.progress = progress
        self.opaque: Literal["error", "pickle"] = opaque

    def run(self) -> None:
        files = self._write_objects()
        files |= self._write_tensors()
        header = files[rank_file(0)].digested if rank_file(0) in files else 0
        stored = self._stored()
        index = encode_index(stored, [header] if stored.files else [], BLOCK, self.checkpoint.aliases)
        (self.attempt.directory / INDEX).write(index)
        files[INDEX] = FileEntry(len(index), digest(index), len(index))
        manifest = Manifest(
            save_id=self.attempt.save_id,
            created=now().isoformat(timespec="microseconds"),
            files=files,
            # Whose objects these are depends on how many ranks there were, not on who converts.
            writer=writer_info(self.checkpoint.world_size),
            provenance=self.checkpoint.provenance,
            requires=required(stored),
        )
        self.attempt.commit(manifest, keep_previous=0)

    def _write_objects(self) -> Files:
        """First, because an object that cannot be stored should be told at once."""
        trees: dict[int | None, Any] = {None: self.checkpoint.objects}
        trees |= {rank: self.checkpoint.rank_objects(rank) for rank in range(self.checkpoint.world_size)}
        files: Files = {}
        for rank, tree in trees.items():
            if rank is None or tree is not None:
                encoder = StoredEncoder("objects" if rank is None else f"rank.{rank}", self.opaque)
                encoded = encoder.encode(tree)
                files |= write_objects(self.attempt.directory, rank, encoded, encoder.opaque_objects)
        return files

    def _write_tensors(self) -> Files:
        entries = self.checkpoint.tensors.values()
        boxes = [StoredBox(e.name, e.shape, e.dtype_name, Box.whole(e.shape)) for e in entries]
        ordered = [boxes[i] for i in file_order(boxes)]
        parts = read_in_order(self.checkpoint, [box.name for box in ordered], progress=self.progress)
        data = ((part.data for part in group) for _, group in groupby(parts, key=lambda part: part.name))
        return write_in_order(self.attempt.directory, 0, ordered, data)

    def _stored(self) -> Stored:
        """Every tensor is whole, in the one file; only those without elements need be listed by their box."""
        kinds: dict[Kind, int] = {}
        regular: dict[str, int] = {}
        odd: dict[str, OddTensor] = {}
        for name, entry in sorted(self.checkpoint.tensors.items()):
            if entry.numel:
                kind = Kind(entry.dtype_name, entry.shape, entry.shape, 0)
                regular[name] = kinds.setdefault(kind, len(kinds))
            else:
                box = OddBox(Box.whole(entry.shape), 0)
                odd[name] = OddTensor(entry.dtype_name, entry.shape, (box,))
        files = [rank_file(0)] if regular or odd else []
        return Stored(files, [{(): (0,)}] if regular else [], [*kinds], regular, odd)

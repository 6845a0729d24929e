"""Convert and merge checkpoints from any readable into any writable format, in bounded memory.

This module also writes our own format, streaming from one process. Training saves through
`nnx_checkpoint.writing.writer`, from all ranks. A conversion never has all data in memory, and keeps the
objects of every rank that wrote the source.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from nnx_base.errors import CheckpointError
from nnx_base.shard import Box
from nnx_checkpoint.foreign.extras import StoredEncoder
from nnx_checkpoint.format.index import index_of
from nnx_checkpoint.format.manifest import rank_file
from nnx_checkpoint.format.rankfile import write_in_order
from nnx_checkpoint.format.rankfile_header import Entry, file_order
from nnx_checkpoint.format.source import is_checkpoint
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress, get_format, open_checkpoint
from nnx_checkpoint.reading.naming import Described, WeightsOnly
from nnx_checkpoint.reading.native import open_native
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_directory, read_in_order, refuse_existing
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.locations import LocalPlace, place_of
from nnx_checkpoint.writing.transaction import Transaction, begin
from nnx_checkpoint.writing.writer import Files, write_objects, writer_info

_Path: TypeAlias = "str | os.PathLike[str]"
_SAFETENSORS = ".safetensors"
_TORCH_FILES = (".ckpt", ".pt", ".pth", ".bin")


def convert(
    source: _Path,
    target: _Path,
    *,
    to: str | None = None,
    weights_only: bool = True,
    save_weights_only: bool | None = None,
    progress: Progress | None = None,
    source_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint in another format.

    Data is read and written a few megabytes at a time, for any size; `target` appears only when it is
    complete. Entries without a place in the format are kept beside its own, so converting back gives
    the same checkpoint.

    Args:
        source: A checkpoint of any known format.
        target: The path to write to, which must not exist.
        to: Name of the format. None guesses from the target's name: ``.ckpt``, ``.pt``, ``.pth`` and ``.bin``
            are ``"lightning"``, ``.safetensors`` is ``"safetensors"``, anything else is ``"nnx"``.
        weights_only: False executes code that the author of the source may have put there.
        save_weights_only: True omits optimizers, schedulers, state of callbacks and of ranks. None omits them
            if the target is one ``.safetensors`` file.
        progress: Function of the bytes done so far and their total.
        source_options: Options for reading the source, as in `open_checkpoint`.
        **options: Options of the format, such as ``max_shard_size`` of ``"safetensors"``.

    Raises:
        CheckpointError: The source cannot be read, the target exists or cannot be written, or the format
            cannot hold the source's content.
    """
    form = get_format(to or _guess(target, otherwise="nnx"))
    _check_target(source, target)
    checkpoint = open_checkpoint(source, weights_only=weights_only, **(source_options or {}))
    _write(checkpoint, form, target, save_weights_only, progress, options)


def merge(
    source: _Path | Sequence[_Path],
    target: _Path,
    *,
    to: str | None = None,
    weights_only: bool = True,
    save_weights_only: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Make one file of a checkpoint that is spread over several, in bounded memory.

    Args:
        source: A checkpoint of any known format, or all its files, which must be in one directory.
        target: The file: ``.safetensors`` for the weights alone, anything else for Lightning's single file.
        to: ``"lightning"`` or ``"safetensors"``; None guesses from the target's name.
        weights_only: False executes code that the author of the source may have put there.
        save_weights_only: True omits optimizers, schedulers, state of callbacks and of ranks. None omits them
            if the target is one ``.safetensors`` file.
        progress: Function of the bytes done so far and their total.

    Raises:
        CheckpointError: `convert` failed, or the files are in several directories.
    """
    form = to or _guess(target, otherwise="lightning")
    if form == "safetensors" and Path(target).suffix != _SAFETENSORS:
        raise CheckpointError(
            f"'{target}' would be a directory, and merging writes one file.",
            remedy=f"Let its name end in {_SAFETENSORS}, or use `convert`.",
        )
    if form not in ("safetensors", "lightning"):
        raise CheckpointError(
            f"merging writes one file, and format {form!r} is a directory.",
            remedy="Use 'lightning' or 'safetensors', or `convert`.",
        )
    path = _one_path(source)
    _check_target(path, target)
    checkpoint = open_checkpoint(path, weights_only=weights_only)
    _write(checkpoint, get_format(form), target, save_weights_only, progress, {})


def _guess(target: _Path, *, otherwise: str) -> str:
    suffix = Path(target).suffix
    if suffix == _SAFETENSORS:
        return "safetensors"
    return "lightning" if suffix in _TORCH_FILES else otherwise


def _check_target(source: _Path, target: _Path) -> None:
    """Refuse a target that cannot be written before anything is read."""
    here, there = place_of(source), place_of(target)
    if not isinstance(there, LocalPlace):
        return
    refuse_existing(there.path)
    with there.explained("look at"):
        inside = isinstance(here, LocalPlace) and there.path.resolve().is_relative_to(here.path.resolve())
    if inside:
        raise CheckpointError(
            f"cannot write '{target}': it is inside the source checkpoint.",
            remedy=f"Choose a path outside of '{source}'.",
        )


def _write(
    checkpoint: Checkpoint,
    form: CheckpointFormat,
    target: _Path,
    save_weights_only: bool | None,
    progress: Progress | None,
    options: dict[str, Any],
) -> None:
    if save_weights_only is None:
        save_weights_only = form.name == "safetensors" and Path(target).suffix == _SAFETENSORS
    form.write(
        WeightsOnly(checkpoint) if save_weights_only else checkpoint,
        target,
        progress=progress or _ignore,
        **options,
    )


def _ignore(done: int, total: int) -> None:
    """Ignore progress."""


def _one_path(source: _Path | Sequence[_Path]) -> _Path:
    """Return the checkpoint itself, or the directory of its files."""
    if isinstance(source, (str, os.PathLike)):
        return source
    files = [Path(file) for file in source]
    missing = [file for file in files if not file.exists()]
    directories = {file.parent.resolve() for file in files}
    if missing or len(directories) != 1:
        why = f"'{missing[0]}' is missing" if missing else f"they are in {len(directories)} directories"
        raise CheckpointError(
            f"{len(files)} files are not one checkpoint: {why}.",
            remedy="Name the files of one checkpoint, all in its directory.",
        )
    return files[0] if len(files) == 1 else directories.pop()


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
            checkpoint: The checkpoint to write, of any format.
            path: A path or URL that does not exist.
            progress: Function of the bytes done and their total.
            opaque: ``"pickle"`` stores objects that have no safe encoding; ``"error"`` refuses them.
            **options: No other options exist.

        Raises:
            CheckpointError: An object has no JSON form, or reading or writing failed.
        """
        self.refuse_options(options)
        described = Described(checkpoint)
        with _target(path) as place:
            transaction = begin(place)
            try:
                _Writing(described, transaction, progress, opaque).run()
            except BaseException:
                transaction.discard()
                raise


@contextlib.contextmanager
def _target(path: str | os.PathLike[str]) -> Iterator[Place]:
    """Yield the place to write to (a URL needs no temporary name: the manifest is uploaded last)."""
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
    """The writing of one checkpoint into a save directory."""

    def __init__(
        self,
        checkpoint: Described,
        transaction: Transaction,
        progress: Progress,
        opaque: Literal["error", "pickle"],
    ) -> None:
        self.checkpoint = checkpoint
        self.transaction = transaction
        self.progress = progress
        self.opaque: Literal["error", "pickle"] = opaque

    def run(self) -> None:
        files = self._write_objects()
        files |= self._write_tensors()
        tensors = {
            name: (entry.dtype_name, entry.shape, {Box.whole(entry.shape): [rank_file(0)]})
            for name, entry in self.checkpoint.tensors.items()
        }
        self.transaction.finish(
            replace(index_of(tensors), aliases=self.checkpoint.aliases),
            files,
            # The rank objects belong to the ranks of the source, not to this process.
            writer=writer_info(self.checkpoint.world_size),
            provenance=self.checkpoint.provenance,
        )

    def _write_objects(self) -> Files:
        """Write the objects (first, so that an object that cannot be stored fails early)."""
        trees: dict[int | None, Any] = {None: self.checkpoint.objects}
        trees |= {rank: self.checkpoint.rank_objects(rank) for rank in self.checkpoint.own_ranks}
        files: Files = {}
        for rank, tree in trees.items():
            if rank is None or tree is not None:
                encoder = StoredEncoder("objects" if rank is None else f"rank.{rank}", self.opaque)
                encoded = encoder.encode(tree)
                files |= write_objects(self.transaction.directory, rank, encoded, encoder.opaque_objects)
        return files

    def _write_tensors(self) -> Files:
        entries = self.checkpoint.tensors.values()
        whole = [Entry(e.name, e.shape, e.dtype_name, Box.whole(e.shape)) for e in entries]
        ordered = [whole[i] for i in file_order(whole)]
        parts = read_in_order(self.checkpoint, [entry.name for entry in ordered], progress=self.progress)
        data = ((part.data for part in group) for _, group in groupby(parts, key=lambda part: part.name))
        return write_in_order(self.transaction.directory, 0, ordered, data)

"""Read and write safetensors: a single file, or a directory in Hugging Face's layout.

The model's weights are in plain safetensors files that any program reads. All other state is in
``training_state.safetensors`` and ``training_state.json`` beside them. Tied tensors are stored once and named
in the metadata, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, Lifted
from nnx_checkpoint.foreign.extras import unpack
from nnx_checkpoint.foreign.safetensors_header import Header, StoredTensor, read_header
from nnx_checkpoint.foreign.safetensors_writing import (
    INDEX,
    MODEL,
    PREFIX_KEY,
    SHARD_SIZE,
    SUFFIX,
    TRAINING,
    WEIGHTS,
    SafetensorsWriting,
)
from nnx_checkpoint.format.index import Piece, TensorEntry
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress
from nnx_checkpoint.reading.naming import Described, WeightsOnly
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_directory, new_file
from nnx_checkpoint.storage.files import read_exactly


class SafetensorsFiles(CheckpointFormat):
    """One ``.safetensors`` file, or a directory with one or with several and an index."""

    name = "safetensors"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        if place.is_dir():
            return weight_files(place) is not None
        return place.suffix == SUFFIX and place.is_file()

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> ForeignCheckpoint:
        place = Path(path)
        contents = Contents(place, self.name)
        headers, metadata = read_headers(place)
        for header in headers.values():
            metadata |= header.metadata
        prefix = f"{MODEL}{metadata.get(PREFIX_KEY, '')}"
        contents.objects["extra"] = {}
        for file, header in headers.items():
            for tensor in header.tensors:
                add_stored(contents, f"{prefix}{tensor.name}", tensor, file)
        for alias, name in metadata.items():
            add_alias(contents, f"{prefix}{alias}", f"{prefix}{name}")
        origin: dict[str, Any] = {"provenance": {"format": self.name}}
        if place.is_dir() and (place / f"{TRAINING}.json").exists():
            origin = add_training_state(contents, place)
        return contents.opened(**origin)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        max_shard_size: int = SHARD_SIZE,
        prefix: str = "",
        **options: Any,
    ) -> None:
        """Write a directory, or, where the path ends in ``.safetensors``, the weights alone as one file.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Called with the bytes done and the total.
            max_shard_size: The most bytes of weights in one file; more are split over several, with an index.
            prefix: The prefix to remove from names in the model's ``state_dict``, such as ``"net."``; entries
                without it are kept with the training state.
            **options: No other options exist.

        Raises:
            CheckpointError: No name has the prefix, a single file cannot hold all entries, an object has no
                JSON form, or reading or writing failed.
        """
        self.refuse_options(options)
        recorded = {PREFIX_KEY: prefix} if prefix else {}
        job = SafetensorsWriting(Described(checkpoint), f"{MODEL}{prefix}", progress, recorded)
        if not job.weights:
            raise CheckpointError(
                f"'{checkpoint.path}' has no weights{f' that begin with {prefix!r}' if prefix else ''}.",
                remedy="`nnx ckpt inspect` lists the names.",
            )
        if Path(path).suffix == SUFFIX:
            if not isinstance(checkpoint, WeightsOnly):
                raise CheckpointError(
                    f"'{path}' would be one file with the weights, and '{checkpoint.path}' holds more.",
                    remedy="Pass save_weights_only=True to omit the rest, or name a directory.",
                )
            with new_file(path) as temporary:
                job.write_file(temporary, job.weights)
            return
        with new_directory(path) as directory:
            job.write_weights(directory, max_shard_size)
            if not isinstance(checkpoint, WeightsOnly):
                job.write_training_state(directory)


def weight_files(directory: Path) -> tuple[Path, bool] | None:
    """Return the index or the only file with weights, and True for an index; None without either."""
    names = sorted(name for name in os.listdir(directory) if not name.startswith(("_", ".", TRAINING)))  # noqa: PTH208
    for suffix, is_index in ((INDEX, True), (SUFFIX, False)):
        found = [name for name in names if name.endswith(suffix)]
        preferred = f"{WEIGHTS}{suffix}"
        if preferred in found or len(found) == 1:
            return directory / (preferred if preferred in found else found[0]), is_index
    return None


def located(place: Path) -> tuple[list[Path], Mapping[str, str], dict[str, str]]:
    """Return the files with weights, the file of each weight in the index, and the index's metadata."""
    if not place.is_dir():
        return [place], {}, {}
    found = weight_files(place)
    if found is None:
        raise CheckpointError(
            f"'{place}' has no file '{WEIGHTS}{SUFFIX}' and no index '{WEIGHTS}{INDEX}'.",
            remedy="Check the path.",
        )
    file, is_index = found
    if not is_index:
        return [file], {}, {}
    try:
        body = load_json(read_exactly(file, file.stat().st_size))
        weight_map = {str(name): str(held) for name, held in body["weight_map"].items()}
        metadata = {str(key): str(value) for key, value in body.get("metadata", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"'{file}' is malformed: {type(error).__name__}: {error}.",
            remedy="Restore it from a backup, or use another checkpoint.",
        ) from error
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"'{file}' names files outside its directory.", remedy="Do not use it.")
    return [place / name for name in names], weight_map, metadata


def read_headers(place: Path) -> tuple[dict[Path, Header], dict[str, str]]:
    """Return the header of each file with weights, and the index's metadata.

    Raises:
        CheckpointError: A file is missing or damaged, or lacks a tensor of the index.
    """
    files, index, metadata = located(place)
    headers = {file: read_header(file) for file in files}
    _require_complete(place, index, headers)
    return headers, metadata


def _require_complete(place: Path, index: Mapping[str, str], headers: Mapping[Path, Header]) -> None:
    """Raise if a file lacks a tensor that the index lists there."""
    there = {file.name: {tensor.name for tensor in header.tensors} for file, header in headers.items()}
    for tensor, file in index.items():
        if tensor not in there[file]:
            raise CheckpointError(
                f"'{place / file}' lacks tensor '{tensor}', which the index lists there.",
                remedy="Restore the files from a backup, or use another checkpoint.",
            )


def add_stored(contents: Contents, name: str, tensor: StoredTensor, file: Path) -> None:
    """Add a tensor of a file under a logical name; refuse a second one of the same name."""
    if name in contents.entries:
        raise CheckpointError(
            f"'{contents.path}' holds tensor '{name}' twice.", remedy="Remove the file that does not belong."
        )
    piece = Piece(Box.whole(tensor.shape), str(file), tensor.start, tensor.nbytes)
    contents.entries[name] = TensorEntry(name, tensor.shape, tensor.dtype_name, (piece,))


def add_alias(contents: Contents, alias: str, name: str) -> None:
    """Add an alias from the metadata, which is free text (an alias has a tensor on one side only)."""
    if name in contents.entries and alias not in contents.entries:
        contents.aliases[alias] = name


def add_training_state(contents: Contents, directory: Path) -> dict[str, Any]:
    """Add all state except the weights; return world size and provenance for `Contents.opened`."""
    file, text = directory / f"{TRAINING}{SUFFIX}", directory / f"{TRAINING}.json"
    for tensor in read_header(file).tensors:
        add_stored(contents, tensor.name, tensor, file)
    raw = read_exactly(text, text.stat().st_size).decode(errors="replace")
    return unpack(raw, contents, Lifted, source=str(text))

"""Read and write safetensors: a single file, or a directory in Hugging Face's layout.

The model's weights are in plain safetensors files that any program reads. All other state is in
``training_state.safetensors`` and ``training_state.json`` beside them. Tied tensors are stored once and named
in the metadata, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, Lifted
from nnx_checkpoint.foreign.extras import pack, unpack
from nnx_checkpoint.foreign.safetensors_header import Header, StoredTensor, encode_header, read_header
from nnx_checkpoint.format.index import Piece, TensorEntry
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.reading.formats import CheckpointFormat, Progress
from nnx_checkpoint.reading.naming import Described, WeightsOnly
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import new_directory, new_file, read_in_order, stream_to
from nnx_checkpoint.storage.files import read_exactly, write_file

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_WEIGHTS = "model"
_TRAINING = "training_state"
_MODEL = "model."
_PREFIX_KEY = "nnx.prefix"
_SHARD_SIZE = 5_000_000_000


class SafetensorsFiles(CheckpointFormat):
    """One ``.safetensors`` file, or a directory with one or with several and an index."""

    name = "safetensors"
    can_write = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        if place.is_dir():
            return _weight_files(place) is not None
        return place.suffix == _SUFFIX and place.is_file()

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> ForeignCheckpoint:
        place = Path(path)
        contents = Contents(place, self.name)
        files, index, metadata = _located(place)
        headers = {file: read_header(file) for file in files}
        _require_complete(place, index, headers)
        for header in headers.values():
            metadata |= header.metadata
        prefix = f"{_MODEL}{metadata.get(_PREFIX_KEY, '')}"
        contents.objects["extra"] = {}
        for file, header in headers.items():
            for tensor in header.tensors:
                _add(contents, f"{prefix}{tensor.name}", tensor, file)
        for alias, name in metadata.items():
            _add_alias(contents, f"{prefix}{alias}", f"{prefix}{name}")
        origin: dict[str, Any] = {"provenance": {"format": self.name}}
        if place.is_dir() and (place / f"{_TRAINING}.json").exists():
            origin = _add_training_state(contents, place)
        return contents.opened(**origin)

    @override
    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        max_shard_size: int = _SHARD_SIZE,
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
        job = _Writing(Described(checkpoint), f"{_MODEL}{prefix}", progress)
        if not job.weights:
            raise CheckpointError(
                f"'{checkpoint.path}' has no weights{f' that begin with {prefix!r}' if prefix else ''}.",
                remedy="`nnx ckpt inspect` lists the names.",
            )
        if Path(path).suffix == _SUFFIX:
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


def _weight_files(directory: Path) -> tuple[Path, bool] | None:
    """Return the index or the only file with weights, and True for an index; None without either."""
    names = sorted(name for name in os.listdir(directory) if not name.startswith(("_", ".", _TRAINING)))  # noqa: PTH208
    for suffix, is_index in ((_INDEX, True), (_SUFFIX, False)):
        found = [name for name in names if name.endswith(suffix)]
        preferred = f"{_WEIGHTS}{suffix}"
        if preferred in found or len(found) == 1:
            return directory / (preferred if preferred in found else found[0]), is_index
    return None


def _located(place: Path) -> tuple[list[Path], Mapping[str, str], dict[str, str]]:
    """Return the files with weights, the file of each weight in the index, and the index's metadata."""
    if not place.is_dir():
        return [place], {}, {}
    found = _weight_files(place)
    if found is None:
        raise CheckpointError(
            f"'{place}' has no file '{_WEIGHTS}{_SUFFIX}' and no index '{_WEIGHTS}{_INDEX}'.",
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


def _require_complete(place: Path, index: Mapping[str, str], headers: Mapping[Path, Header]) -> None:
    there = {file.name: {tensor.name for tensor in header.tensors} for file, header in headers.items()}
    for tensor, file in index.items():
        if tensor not in there[file]:
            raise CheckpointError(
                f"'{place / file}' lacks tensor '{tensor}', which the index lists there.",
                remedy="Restore the files from a backup, or use another checkpoint.",
            )


def _add(contents: Contents, name: str, tensor: StoredTensor, file: Path) -> None:
    if name in contents.entries:
        raise CheckpointError(
            f"'{contents.path}' holds tensor '{name}' twice.", remedy="Remove the file that does not belong."
        )
    piece = Piece(Box.whole(tensor.shape), str(file), tensor.start, tensor.nbytes)
    contents.entries[name] = TensorEntry(name, tensor.shape, tensor.dtype_name, (piece,))


def _add_alias(contents: Contents, alias: str, name: str) -> None:
    """Add an alias from the metadata, which is free text (an alias has a tensor on one side only)."""
    if name in contents.entries and alias not in contents.entries:
        contents.aliases[alias] = name


def _add_training_state(contents: Contents, directory: Path) -> dict[str, Any]:
    file, text = directory / f"{_TRAINING}{_SUFFIX}", directory / f"{_TRAINING}.json"
    for tensor in read_header(file).tensors:
        _add(contents, tensor.name, tensor, file)
    raw = read_exactly(text, text.stat().st_size).decode(errors="replace")
    return unpack(raw, contents, Lifted, source=str(text))


@dataclass
class _Writing:
    """The writing of one checkpoint into files.

    Attributes:
        checkpoint: The checkpoint.
        prefix: The prefix of the logical names of exported weights.
        progress: Function of the bytes done and their total, over all files.
    """

    checkpoint: Described
    prefix: str
    progress: Progress

    def __post_init__(self) -> None:
        tensors, aliases = self.checkpoint.tensors, self.checkpoint.aliases
        self.weights = [name for name in tensors if name.startswith(self.prefix)]
        self.rest = [name for name in tensors if not name.startswith(self.prefix)]
        self.tied = {
            alias: name
            for alias, name in aliases.items()
            if alias.startswith(self.prefix) and name.startswith(self.prefix)
        }
        self._done = 0
        self._total = sum(tensors[name].nbytes for name in self.weights)

    def write_weights(self, directory: Path, max_shard_size: int) -> None:
        """Write all weights into one file, or into several and an index."""
        shards = list(self._shards(max_shard_size))
        if len(shards) == 1:
            self.write_file(directory / f"{_WEIGHTS}{_SUFFIX}", shards[0])
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"{_WEIGHTS}-{number:05d}-of-{len(shards):05d}{_SUFFIX}"
            self.write_file(directory / file, names)
            weight_map |= {name.removeprefix(self.prefix): file for name in names}
        metadata = {"total_size": self._total, **self._metadata(self.weights)}
        body = {"metadata": metadata, "weight_map": weight_map}
        write_file(directory / f"{_WEIGHTS}{_INDEX}", (json.dumps(body, indent=2) + "\n").encode())

    def _shards(self, limit: int) -> Iterator[list[str]]:
        shard: list[str] = []
        size = 0
        for name in self.weights:
            nbytes = self.checkpoint.tensors[name].nbytes
            if shard and size + nbytes > limit:
                yield shard
                shard, size = [], 0
            shard.append(name)
            size += nbytes
        yield shard

    def _metadata(self, names: Sequence[str]) -> dict[str, str]:
        """Return the metadata of a file: aliases, and the removed prefix."""
        held, start = set(names), len(self.prefix)
        tied = {alias[start:]: name[start:] for alias, name in self.tied.items() if name in held}
        prefix = self.prefix.removeprefix(_MODEL)
        return {**tied, **({_PREFIX_KEY: prefix} if prefix else {})}

    def write_training_state(self, directory: Path) -> None:
        """Write all state except the weights."""
        self._total += sum(self.checkpoint.tensors[name].nbytes for name in self.rest)
        aliases = {k: v for k, v in self.checkpoint.aliases.items() if k not in self.tied}
        text = pack(self.checkpoint, self.checkpoint.objects, aliases)
        write_file(directory / f"{_TRAINING}.json", f"{text}\n".encode())
        self.write_file(directory / f"{_TRAINING}{_SUFFIX}", self.rest)

    def write_file(self, file: Path, names: Sequence[str]) -> None:
        """Write one file, with the prefix removed from the weights' names."""
        entries = [self.checkpoint.tensors[name] for name in names]
        renamed = {name: name.removeprefix(self.prefix) for name in names}
        order, header = encode_header(entries, renamed, self._metadata(names))
        before = self._done
        with stream_to(file, size=len(header) + sum(entry.nbytes for entry in entries)) as stream:
            stream.append(memoryview(header))
            for part in read_in_order(self.checkpoint, order):
                stream.append(part.data)
                self._done += len(part.data)
                self.progress(self._done, self._total)
            stream.finish()
        self._done = before + sum(entry.nbytes for entry in entries)

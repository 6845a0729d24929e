"""Write safetensors files: the weights, with an index for several files, and the other state beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nnx_checkpoint.foreign.extras import pack
from nnx_checkpoint.foreign.safetensors_header import encode_header
from nnx_checkpoint.reading.formats import Progress
from nnx_checkpoint.reading.naming import Described
from nnx_checkpoint.reading.slabs import read_in_order, stream_to
from nnx_checkpoint.storage.files import write_file

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
WEIGHTS = "model"
TRAINING = "training_state"
MODEL = "model."
PREFIX_KEY = "nnx.prefix"
SHARD_SIZE = 5_000_000_000


@dataclass
class SafetensorsWriting:
    """The writing of one checkpoint into files.

    Attributes:
        checkpoint: The checkpoint.
        prefix: The prefix of the logical names of exported weights.
        progress: Function of the bytes done and their total, over all files.
        metadata: Further entries of the metadata of every file with weights.
    """

    checkpoint: Described
    prefix: str
    progress: Progress
    metadata: Mapping[str, str] = field(default_factory=dict)

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
            self.write_file(directory / f"{WEIGHTS}{SUFFIX}", shards[0])
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
            self.write_file(directory / file, names)
            weight_map |= {name.removeprefix(self.prefix): file for name in names}
        metadata = {"total_size": self._total, **self._metadata(self.weights)}
        body = {"metadata": metadata, "weight_map": weight_map}
        write_file(directory / f"{WEIGHTS}{INDEX}", (json.dumps(body, indent=2) + "\n").encode())

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
        """Return the metadata of a file: aliases, and the entries of all files."""
        held, start = set(names), len(self.prefix)
        tied = {alias[start:]: name[start:] for alias, name in self.tied.items() if name in held}
        return {**tied, **self.metadata}

    def write_training_state(self, directory: Path) -> None:
        """Write all state except the weights."""
        self._total += sum(self.checkpoint.tensors[name].nbytes for name in self.rest)
        aliases = {k: v for k, v in self.checkpoint.aliases.items() if k not in self.tied}
        text = pack(self.checkpoint, self.checkpoint.objects, aliases)
        write_file(directory / f"{TRAINING}.json", f"{text}\n".encode())
        self.write_file(directory / f"{TRAINING}{SUFFIX}", self.rest)

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

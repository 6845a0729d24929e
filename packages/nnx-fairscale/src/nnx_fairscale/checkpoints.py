"""Read sharded weights that programs saved with fairscale's FSDP, under their original names.

Each rank's file of ``torch.save`` holds the results of ``local_state_dict()`` and ``local_metadata_dict()``,
under keys of the program's choice. Full state dicts, and optimizer state that OSS has consolidated, have
torch's own format, and the core's formats read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_base.box import Box
from nnx_checkpoint import Checkpoint, CheckpointFormat, Contents
from nnx_checkpoint.foreign.contents import malformed_explained
from nnx_checkpoint.foreign.flat_buffers import pieces_of_range
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file, mentions
from nnx_core.errors import CheckpointError

_SUFFIXES = (".pt", ".pth", ".bin", ".torch", ".ckpt")
_SIGNS = ("param_metadata", "no_broadcast_optim_state")


@dataclass(frozen=True, slots=True)
class _Rank:
    """The file of one rank."""

    path: Path
    weights: Mapping[str, Any]
    metadata: Mapping[str, Any]


class FairscaleShards(CheckpointFormat):
    """A directory with one file of fairscale's sharded weights for each rank; read only, weights only."""

    name = "fairscale"

    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        """Return True if the first file of a directory mentions the keys of fairscale's metadata."""
        files = _files(Path(path))
        return bool(files) and mentions(files[0], *_SIGNS)

    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        """Locate each parameter's elements in the files of all ranks.

        Raises:
            CheckpointError: Files are missing, or do not belong together.
        """
        ranks = [_read(file, weights_only=weights_only) for file in _files(Path(path))]
        contents = Contents(path, self.name)
        with malformed_explained(path, "fairscale"):
            _fill(contents, ranks)
        return contents.opened(world_size=len(ranks), provenance={"strategy": "fairscale FSDP"})


def _files(path: Path) -> list[Path]:
    """Return the files of a directory, ordered by the last number in their names, which is the rank."""
    if not path.is_dir():
        return []
    found = [file for file in path.iterdir() if file.suffix in _SUFFIXES and re.search(r"\d", file.stem)]
    return sorted(found, key=lambda file: int(re.findall(r"\d+", file.stem)[-1]))


def _read(file: Path, *, weights_only: bool) -> _Rank:
    held = load_torch_file(file, weights_only=weights_only)
    mappings = (
        [value for value in held.values() if isinstance(value, Mapping)] if isinstance(held, Mapping) else []
    )
    metadata = next((each for each in mappings if "param_metadata" in each), None)
    weights = next((m for m in mappings if any(isinstance(v, FileTensor) for v in m.values())), None)
    if metadata is None or weights is None:
        raise CheckpointError(
            f"'{file}' does not hold both the weights and the metadata of a rank.",
            remedy="Save on each rank both `model.local_state_dict()` and `model.local_metadata_dict()`.",
        )
    return _Rank(file, weights, metadata)


def _fill(contents: Contents, ranks: Sequence[_Rank]) -> None:
    units, weights = ranks[0].metadata["param_metadata"], ranks[0].weights
    for index, unit in enumerate(units):
        for flat_name in unit["params"]:
            _add_flat(contents, ranks, index, flat_name)
    for unit in units:
        for source, alias in unit.get("shared_param_info", ()):
            contents.aliases[_key(unit, alias)] = _key(unit, source)
    for name in ranks[0].metadata["buffer_names"]:
        if name in weights:  # a persistent buffer, the same on every rank
            contents.add(f"model.{name}", weights[name])


def _add_flat(contents: Contents, ranks: Sequence[_Rank], unit: int, flat_name: str) -> None:
    """Add the parameters of one flat parameter, each as ranges of the ranks' shards."""
    metadata = ranks[0].metadata["param_metadata"][unit]
    layout = metadata["params"][flat_name]
    path = metadata["fsdp_path"]
    name = f"{path}.{flat_name}" if path else flat_name
    shards = list(_shards(ranks, unit, flat_name, name))
    begin = 0
    for own, shape, numel in zip(layout["names"], layout["shapes"], layout["numels"], strict=True):
        dtype = str(shards[0][0].dtype).removeprefix("torch.")
        pieces = list(_pieces(shards, begin, tuple(shape), numel))
        contents.add_pieces(_key(metadata, own), tuple(shape), dtype, pieces)
        begin += numel


def _shards(ranks: Sequence[_Rank], unit: int, flat_name: str, name: str) -> Iterator[tuple[FileTensor, int]]:
    for rank in ranks:
        units = rank.metadata["param_metadata"]
        tensor = rank.weights.get(name)
        is_known = unit < len(units) and flat_name in units[unit]["params"]
        if tensor is None or not is_known or tensor.dtype != ranks[0].weights[name].dtype:
            raise CheckpointError(
                f"'{rank.path}' has no '{name}' like that of '{ranks[0].path.name}'.",
                remedy="Keep the files of all ranks of one checkpoint in a directory of their own.",
            )
        yield tensor, tensor.numel - units[unit]["params"][flat_name]["padding"]


def _pieces(
    shards: Sequence[tuple[FileTensor, int]], begin: int, shape: tuple[int, ...], numel: int
) -> Iterator[Piece]:
    at = 0
    for tensor, length in shards:
        first, last = max(begin, at), min(begin + numel, at + length)
        if first < last:
            yield from pieces_of_range(tensor, first - at, Box.whole(shape), first - begin, last - begin)
        at += length


def _key(unit: Mapping[str, Any], name: str) -> str:
    path = unit["fsdp_path"]
    return f"model.{path}.{name}" if path else f"model.{name}"

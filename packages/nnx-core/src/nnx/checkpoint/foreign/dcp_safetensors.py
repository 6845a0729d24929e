"""DCP directories in safetensors files, as ``HuggingFaceStorageWriter(save_distributed=True)`` writes them.

They have no metadata of their own: each file says where in its tensors its data begins, and the sizes of the
tensors follow from all files together. So a file that is missing in the middle is noticed, but the loss of
the last part of every tensor is not.
"""

from __future__ import annotations

from pathlib import Path

from nnx.box import Box, find_fault
from nnx.checkpoint.foreign.dcp_items import LocatedTensor
from nnx.checkpoint.foreign.safetensors import read_header
from nnx.checkpoint.index import Piece
from nnx.checkpoint.manifest import load_json
from nnx.errors import CheckpointError

__all__ = ["read_shards", "shard_files"]

_FILES = "shard-*-model-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"


def shard_files(directory: Path) -> list[Path]:
    """Files with the names that torch gives them."""
    return sorted(directory.glob(_FILES))


def read_shards(directory: Path) -> dict[str, LocatedTensor]:
    """Find every tensor of a directory.

    Raises:
        CheckpointError: A file is damaged, or the files do not make up the tensors.
    """
    pieces: dict[str, dict[Box, Piece]] = {}
    types: dict[str, str] = {}
    for file in shard_files(directory):
        header = read_header(file)
        try:
            offsets = {
                name: tuple(map(int, entry["saved_offsets"]))
                for name, entry in load_json(header.metadata[_OFFSETS].encode()).items()
            }
            for tensor in header.tensors:
                box = Box(offsets[tensor.name], tensor.shape)
                if types.setdefault(tensor.name, tensor.dtype_name) != tensor.dtype_name:
                    raise ValueError(f"'{tensor.name}' has another element type than in other files")
                piece = Piece(box, str(file), tensor.start, tensor.nbytes)
                pieces.setdefault(tensor.name, {}).setdefault(box, piece)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"'{file}' does not say where its tensors belong: {type(error).__name__}: {error}.",
                remedy="Restore it from a backup, or use another checkpoint.",
            ) from error
    return {name: _located(directory, name, types[name], parts) for name, parts in pieces.items()}


def _located(directory: Path, name: str, dtype_name: str, parts: dict[Box, Piece]) -> LocatedTensor:
    ends = [tuple(a + b for a, b in zip(box.offset, box.size, strict=True)) for box in parts]
    shape = tuple(max(extents) for extents in zip(*ends, strict=True))
    fault = find_fault(shape, parts)
    if fault:
        raise CheckpointError(
            f"the files of '{directory}' do not make up tensor '{name}' of shape {shape}: {fault}.",
            remedy="Make sure that the files of all ranks are there.",
        )
    return LocatedTensor(shape, dtype_name, tuple(piece for piece in parts.values() if piece.box.numel))

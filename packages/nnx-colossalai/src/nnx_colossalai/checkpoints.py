"""Read ColossalAI's sharded checkpoints, which rank zero writes in `Booster.save_model` and its relatives.

One index names the file of every weight. Another names the file of every parameter's optimizer state, by
number; the param groups have a file of their own. If a directory lacks an index, its subdirectories are
searched, because training loops usually save model, optimizer and scheduler side by side. The reader follows
the source of GeminiPlugin, LowLevelZeroPlugin and the general CheckpointIO; it was not tested with files that
ColossalAI wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, malformed_explained
from nnx_checkpoint.foreign.flat_buffers import as_step
from nnx_checkpoint.foreign.safetensors_header import read_header
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.reading.formats import CheckpointFormat
from nnx_checkpoint.storage.files import read_exactly
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file

_MODEL_INDEX = re.compile(r"(pytorch_model\.bin|model\.safetensors)\.index(\..+)?\.json")
_OPTIMIZER_INDEX = re.compile(r"pytorch_optim\.bin\.index(\..+)?\.json")
_ASYNC_INDEX = re.compile(r"optimizer\.safetensors\.index(\..+)?\.json")
_SCHEDULER = "lr_scheduler"
_RUNNING = "running_states.json"
_SAFETENSORS = ".safetensors"


class ColossalAI(CheckpointFormat):
    """The format of a directory with indexes, or of one with directories for model and optimizer.

    Hugging Face's older directories with ``pytorch_model.bin.index.json`` have the same format.
    """

    name = "colossalai"
    reaches_below = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        if not place.is_dir():
            return False
        if any(_find(directory, _OPTIMIZER_INDEX) for directory in _directories(place)):
            return True
        return any(file.name.startswith("pytorch") for file in _find(place, _MODEL_INDEX))

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> ForeignCheckpoint:
        place = Path(path)
        with malformed_explained(path, "ColossalAI"):
            contents = Contents(place, self.name)
            model, optimizer = _only(place, _MODEL_INDEX), _only(place, _OPTIMIZER_INDEX)
            if model is None and optimizer is None:
                raise CheckpointError(f"'{place}' has no index of a model or an optimizer.")
            if model is not None:
                _add_model(contents, _read_index(model), weights_only)
            if optimizer is not None:
                _add_optimizer(contents, _read_index(optimizer), weights_only)
            contents.set_trainer(_trainer(place, weights_only))
            return contents.opened(provenance={"format": self.name})


def _directories(place: Path) -> Iterator[Path]:
    yield place
    yield from sorted(child for child in place.iterdir() if child.is_dir())


def _find(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(file for file in directory.iterdir() if pattern.fullmatch(file.name))
    # A directory may be unreadable, such as `lost+found` beside model and optimizer.
    except OSError:
        return []


def _only(place: Path, pattern: re.Pattern[str]) -> Path | None:
    """Return the only index of a kind, in a directory or directly below it."""
    for directory in _directories(place):
        if _find(directory, _ASYNC_INDEX):
            raise CheckpointError(
                f"'{directory}' holds an optimizer that was saved with `use_async`, which nnx cannot read.",
                remedy="Save it without `use_async`.",
            )
    found = _find(place, pattern) or [i for child in _directories(place) for i in _find(child, pattern)]
    if len(found) > 1:
        raise CheckpointError(
            f"'{place}' holds {len(found)} checkpoints: {', '.join(repr(str(file)) for file in found)}.",
            remedy="Open the directory of one of them.",
        )
    return found[0] if found else None


@dataclass(frozen=True)
class _Index:
    """One index file and its map of names to files."""

    file: Path
    metadata: Mapping[str, Any]
    weight_map: Mapping[str, str]

    def path(self, name: str) -> Path:
        """Return the path of a file in the same directory."""
        # A name with a directory could lead the reader out of the checkpoint.
        if Path(name).name != name:
            kind = "shards of distributed tensors" if name.startswith("dtensor/") else "a file elsewhere"
            raise CheckpointError(
                f"'{self.file}' names {kind}: '{name}'.", remedy="Gather the tensors when saving them."
            )
        return self.file.parent / name

    def shards(self) -> Iterator[tuple[Path, set[str]]]:
        """Yield every file with the names that it must hold."""
        for name in sorted(set(self.weight_map.values())):
            yield self.path(name), {key for key, file in self.weight_map.items() if file == name}


def _read_index(file: Path) -> _Index:
    body = load_json(read_exactly(file, file.stat().st_size))
    return _Index(file, dict(body.get("metadata", {})), dict(body["weight_map"]))


def _require_same(index: _Index, shard: Path, wanted: set[str], found: set[str]) -> None:
    for name in sorted(wanted ^ found):
        missing = f"'{shard}' has no '{name}', which '{index.file.name}' lists for it"
        unlisted = f"'{shard}' holds '{name}', which '{index.file.name}' does not list for it"
        raise CheckpointError(
            f"{missing if name in wanted else unlisted}.",
            remedy="Index and files are of different saves; restore them from a backup.",
        )


def _add_model(contents: Contents, index: _Index, weights_only: bool) -> None:
    contents.objects["extra"] = {}
    for shard, wanted in index.shards():
        if shard.suffix != _SAFETENSORS:
            state = load_torch_file(shard, weights_only=weights_only)
            _require_same(index, shard, wanted, set(state))
            contents.add_model(state)
            continue
        tensors = read_header(shard).tensors
        _require_same(index, shard, wanted, {tensor.name for tensor in tensors})
        for tensor in tensors:
            piece = Piece(Box.whole(tensor.shape), str(shard), tensor.start, tensor.nbytes)
            contents.add_pieces(f"model.{tensor.name}", tensor.shape, tensor.dtype_name, [piece])


def _add_optimizer(contents: Contents, index: _Index, weights_only: bool) -> None:
    # Parameters keep their numbers, because the files have no names for them.
    groups = load_torch_file(index.path(index.metadata["param_groups"]), weights_only=weights_only)
    state: dict[int, dict[str, Any]] = {}
    for shard, wanted in index.shards():
        loaded = load_torch_file(shard, weights_only=weights_only)
        _require_same(index, shard, wanted, {str(number) for number in loaded})
        for number, entries in loaded.items():
            state[int(number)] = {key: _checked(key, value, shard) for key, value in entries.items()}
    numbers = [number for group in groups for number in group["params"]]
    unknown = sorted(set(state) - set(numbers))
    if unknown:
        raise CheckpointError(
            f"'{index.file}' has state for parameters {unknown}, which no param group holds.",
            remedy="Index and files are of different saves; restore them from a backup.",
        )
    contents.add_optimizer({"state": state, "param_groups": groups})


def _checked(key: str, value: Any, shard: Path) -> Any:
    if value is None or isinstance(value, (bool, int, float, FileTensor, Tensor)):
        return as_step(value) if key == "step" else value
    raise CheckpointError(
        f"'{shard}' holds state '{key}' of type {type(value).__name__}, expected tensors and numbers.",
        remedy="Restore it from a backup, or use another checkpoint.",
    )


def _trainer(place: Path, weights_only: bool) -> dict[str, Any]:
    """Read schedulers and progress, as ColossalAI's examples save them beside model and optimizer."""
    trainer: dict[str, Any] = {}
    if (place / _SCHEDULER).is_file():
        scheduler = load_torch_file(place / _SCHEDULER, weights_only=weights_only)
        trainer["lr_schedulers"] = [scheduler]
    if (place / _RUNNING).is_file():
        file = place / _RUNNING
        trainer["colossalai"] = load_json(read_exactly(file, file.stat().st_size))
    return trainer

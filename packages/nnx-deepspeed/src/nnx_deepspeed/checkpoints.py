"""Read DeepSpeed's checkpoint directories: ZeRO stages 0 to 3, also universal ones.

The reader indexes the ranks' files and does not load them: each parameter is located in the flat tensors that
hold it. Values that Lightning or the user saved become the trainer's state. The reader executes no code from
the files, and keeps objects of DeepSpeed's own classes as inert data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, load_rank_file, malformed_explained
from nnx_checkpoint.foreign.flat_buffers import (
    add_shared_state,
    pieces_of_range,
    split_evenly,
)
from nnx_checkpoint.reading.formats import CheckpointFormat
from nnx_checkpoint.storage.files import require_inside
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file
from nnx_deepspeed.checkpoint_files import Files, holds_checkpoints, model_file, scan, tag_directory
from nnx_deepspeed.checkpoint_shards import OWN_CLASSES, Shapes, StoredPartitions, contradiction

__all__ = ["DeepSpeed"]


# ``ds_to_universal.py`` makes a universal checkpoint from the files of all ranks. ``zero/<parameter>/`` holds
# one file with the full fp32 master and one for each full state tensor of the optimizer.
# ``zero/optimizer_state.pt`` holds the param groups. Stage 3 stores flat tensors and no step per parameter.


_MASTER = "fp32"


class Universal:
    """The parameters of a universal checkpoint.

    Args:
        directory: The tag's directory.
        shapes: The ``param_shapes`` of the model file.

    Attributes:
        stage: The ZeRO stage of the checkpoint before its conversion.
        groups: The optimizer's param groups, with the names of their parameters.
    """

    def __init__(self, directory: Path, shapes: Shapes) -> None:
        self._directory = directory
        self._shapes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        self._group_of = {name: i for i, group in enumerate(shapes) for name in group}
        common = load_torch_file(directory / "zero" / "optimizer_state.pt", inert=OWN_CLASSES)
        flat = common.get("optimizer_state_dict")
        self.stage = 3 if flat is not None else 2
        self._states: Mapping[Any, Any] = flat["state"] if flat is not None else {}
        numbers = [number for group in common["param_groups"] for number in group["params"]]
        names: dict[Any, list[str]] = {
            number: list(group) for number, group in zip(numbers, shapes, strict=False)
        }
        self._numbers = numbers
        self.groups = [
            {**group, "params": [name for number in group["params"] for name in names.get(number, ())]}
            for group in common["param_groups"]
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def add_master(self, contents: Contents, name: str, key: str) -> None:
        """Add the fp32 master of a parameter under a logical name."""
        self._add(contents, name, key, self._load(name, f"{_MASTER}.pt"))

    def add_states(self, contents: Contents, name: str, prefix: str) -> dict[str, Any]:
        """Add the optimizer's state of a parameter, and return the values that are no tensors."""
        values: dict[str, Any] = {}
        folder = self._folder(name)
        keys = sorted(file.stem for file in folder.glob("*.pt") if file.stem != _MASTER)
        for key in keys:
            value = self._load(name, f"{key}.pt")
            if (
                isinstance(value, FileTensor)
                and value.numel == math.prod(self._shapes[name])
                and key != "step"
            ):
                self._add(contents, name, f"{prefix}.{key}", value)
            else:
                add_shared_state(contents, f"{prefix}.{key}", value, values)
        state = self._states.get(self._numbers[self._group_of[name]], {}) if self._states else {}
        if "step" in state and "step" not in keys:
            add_shared_state(contents, f"{prefix}.step", state["step"], values)
        return values

    def _load(self, name: str, file: str) -> Any:
        found = load_torch_file(self._folder(name) / file, inert=OWN_CLASSES)
        return found["param"] if isinstance(found, Mapping) else found

    def _folder(self, name: str) -> Path:
        """Return the folder of a parameter's files. Its name comes from a file, so it must stay inside."""
        folder = self._directory / "zero" / name
        require_inside(folder, self._directory)
        return folder

    def _add(self, contents: Contents, name: str, key: str, value: Any) -> None:
        shape = self._shapes[name]
        if not isinstance(value, FileTensor) or value.numel != math.prod(shape):
            raise contradiction(self._directory, f"the tensor of '{name}' has not its shape {shape}")
        pieces = pieces_of_range(value, 0, Box.whole(shape), 0, value.numel)
        contents.add_pieces(key, shape, str(value.dtype).removeprefix("torch."), pieces)


_WRAPPER = "_forward_module."
"""The prefix of every name in Lightning before 2.1."""

_ENGINE_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *(
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
    ),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "sparse_tensor_module_names", "csr_tensor_module_names", "universal_checkpoint_info"),
    *("ds_autoep_layers", "autoep_layers", "num_experts", "folding"),
}
"""DeepSpeed's own keys in a model file; all other keys belong to its caller."""
_KEPT = ("skipped_steps", "global_steps", "global_samples", "data_sampler", "random_ltd")


class DeepSpeed(CheckpointFormat):
    """A DeepSpeed checkpoint, or the directory of one of its tags."""

    name = "deepspeed"
    reaches_below = True

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return holds_checkpoints(Path(path))

    @override
    def open(
        self,
        path: str | os.PathLike[str],
        *,
        weights_only: bool = True,
        tag: str | None = None,
        weights: Literal["master", "model"] = "master",
    ) -> ForeignCheckpoint:
        """Open a checkpoint without reading tensor data.

        Args:
            path: The directory that ``save_checkpoint`` got, or the directory of one of its tags.
            weights_only: False to unpickle any value that DeepSpeed's caller saved along with the model.
            tag: The tag of one of several saves. Default: the tag in the file ``latest``.
            weights: ``"master"`` for the fp32 weights that the optimizer steps. ``"model"`` for the weights
                in the model's precision, which ZeRO 3 does not save.

        Raises:
            CheckpointError: A file is missing or damaged, or the tag is ambiguous.
        """
        with malformed_explained(path, "DeepSpeed"):
            return _open(Path(path), tag, weights, weights_only)


def _open(path: Path, tag: str | None, weights: str, weights_only: bool) -> ForeignCheckpoint:
    files = scan(tag_directory(path, tag))
    main = _load_model(model_file(files, 0), weights_only)
    partitions = _partitions(files, main)
    world_size = int(main.get("dp_world_size", 1))
    contents = Contents(path, DeepSpeed.name)
    _add_model(contents, main, partitions, _frozen(files, main, world_size, weights_only), weights)
    _add_optimizer(contents, main, partitions)
    contents.set_trainer(_trainer(main))
    origin = {
        "format": DeepSpeed.name,
        "deepspeed": str(main.get("ds_version")),
        "zero_stage": partitions.stage if partitions is not None else 0,
        "tag": files.directory.name,
    }
    return contents.opened(world_size=world_size, provenance=origin)


def _load_model(path: Path, weights_only: bool) -> dict[str, Any]:
    loaded = load_rank_file(path, weights_only=weights_only, own=_ENGINE_KEYS, inert=OWN_CLASSES)
    if "module" not in loaded:
        raise CheckpointError(
            f"'{path}' is not a model file of DeepSpeed: it has no entry 'module'.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return loaded


def _partitions(files: Files, main: Mapping[str, Any]) -> StoredPartitions | Universal | None:
    """Return the optimizer's files, or None without ZeRO."""
    shapes = main.get("param_shapes")
    if shapes is None:
        return None
    if (files.directory / "zero").is_dir():
        return Universal(files.directory, shapes)
    loaded = {
        rank: load_torch_file(path, inert=OWN_CLASSES) for rank, path in sorted(files.optimizers.items())
    }
    states = {rank: file["optimizer_state_dict"] for rank, file in loaded.items()}
    counts = {rank: _partition_count(state) for rank, state in states.items()}
    world = max([*counts.values(), int(main.get("dp_world_size", 1)) if not counts else 1])
    prefix = "bf16_" if any(path.name.startswith("bf16_") for path in files.optimizers.values()) else ""
    missing = [rank for rank in range(world) if rank not in states]
    if missing:
        names = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in missing]
        raise CheckpointError(
            f"'{files.directory}' was written by {world} ranks, but "
            f"{', '.join(repr(name) for name in names)} {'is' if len(names) == 1 else 'are'} missing.",
            remedy="Restore the missing files; reading the model needs every rank's files.",
        )
    stale = [files.optimizers[rank].name for rank in states if rank >= world or counts[rank] != world]
    if stale:
        raise CheckpointError(
            f"'{files.directory}' was written by {world} ranks, but has '{stale[0]}' of another save.",
            remedy="Delete the files of an earlier save with another number of ranks.",
        )
    return StoredPartitions(files.directory, list(states.values()), shapes)


def _partition_count(state: Mapping[str, Any]) -> int:
    """Return the number of partitions; stages 1 and 2 record it for each group."""
    counts = state["partition_count"]
    counts = counts if isinstance(counts, (list, tuple)) else [counts]
    if len(set(counts)) != 1:
        raise CheckpointError(
            f"the param groups have {list(counts)} partitions: experts have groups of their own.",
            remedy="Only data-parallel checkpoints (ZeRO) can be read.",
        )
    return int(counts[0])


def _add_model(
    contents: Contents,
    main: Mapping[str, Any],
    partitions: StoredPartitions | Universal | None,
    frozen: _Frozen,
    weights: str,
) -> None:
    if weights not in ("master", "model"):
        raise CheckpointError(f"weights={weights!r} is neither 'master' nor 'model'.")
    if weights == "model" and partitions is not None and partitions.stage == 3:
        raise CheckpointError(
            f"'{contents.path}' is from ZeRO stage 3, which saves no weights in the model's precision.",
            remedy="Open it with weights='master'.",
        )
    masters = partitions if weights == "master" and partitions is not None else ()
    tied = main.get("shared_params") or {}
    for name, value in main["module"].items():
        target = tied.get(name)
        if partitions is not None and name in masters:
            partitions.add_master(contents, name, _logical(name))
        elif name in frozen:
            frozen.add(contents, name, _logical(name))
        elif target is not None and (target in masters or target in frozen):
            contents.aliases[_logical(name)] = _logical(target)
        else:
            contents.add_model({name.removeprefix(_WRAPPER): value})


def _logical(name: str) -> str:
    return f"model.{name.removeprefix(_WRAPPER)}"


class _Frozen:
    """Parameters that the optimizer does not step. In stage 3 each rank's model file holds a shard of them.

    Args:
        models: The model files in order of rank; empty for other stages.
        shapes: The parameters' shapes by name.
    """

    def __init__(self, models: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> None:
        self._fragments = [model["frozen_param_fragments"] for model in models]
        self._shapes = shapes if models else {}

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def add(self, contents: Contents, name: str, key: str) -> None:
        shape = tuple(self._shapes[name])
        shards = [fragments[name] for fragments in self._fragments]
        pieces = [
            piece
            for span in split_evenly(0, math.prod(shape), len(shards))
            for piece in pieces_of_range(shards[span.rank], 0, Box.whole(shape), span.start, span.stop)
        ]
        contents.add_pieces(key, shape, str(shards[0].dtype).removeprefix("torch."), pieces)


def _frozen(files: Files, main: Mapping[str, Any], world_size: int, weights_only: bool) -> _Frozen:
    shapes = main.get("frozen_param_shapes") or {}
    if None in files.models or not shapes:
        return _Frozen((), {})
    others = (_load_model(model_file(files, rank), weights_only) for rank in range(1, world_size))
    return _Frozen([main, *others], shapes)


def _add_optimizer(
    contents: Contents, main: Mapping[str, Any], partitions: StoredPartitions | Universal | None
) -> None:
    if partitions is None:
        if main.get("optimizer") is not None:
            contents.add_optimizer(main["optimizer"])
        return
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group in partitions.groups:
        names = _original_order(group["params"], main, partitions)
        for name in names:
            stored = name.removeprefix(_WRAPPER)
            found = partitions.add_states(contents, name, f"optim.0.state.{stored}")
            if "step" in group and f"optim.0.state.{stored}.step" not in contents.entries:
                add_shared_state(contents, f"optim.0.state.{stored}.step", group["step"], found)
            if found:
                values[stored] = found
        groups.append({**group, "params": [name.removeprefix(_WRAPPER) for name in names]})
    contents.objects["optim"] = [{"groups": groups, "values": values}]


def _original_order(
    names: Sequence[str], main: Mapping[str, Any], partitions: StoredPartitions | Universal
) -> list[str]:
    """Return the order in which the optimizer got its parameters, before DeepSpeed distributed them."""
    config = main.get("ds_config")
    zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else {}
    if partitions.stage == 3 or not zero.get("round_robin_gradients"):
        return list(names)
    world_size = int(main.get("dp_world_size", 1))
    round_robin = [index for rank in range(world_size) for index in range(rank, len(names), world_size)]
    return [name for _, name in sorted(zip(round_robin, names, strict=True))]


def _trainer(main: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that DeepSpeed's caller saved, and the engine's counters under ``"deepspeed"``."""
    trainer = {key: value for key, value in main.items() if key not in _ENGINE_KEYS}
    engine = {key: main[key] for key in _KEPT if main.get(key) is not None}
    scheduler = main.get("lr_scheduler")
    if scheduler is not None and "lr_schedulers" not in trainer:
        trainer["lr_schedulers"] = [scheduler]
    elif scheduler is not None:
        engine["lr_scheduler"] = scheduler
    if "global_steps" in main:
        trainer.setdefault("global_step", main["global_steps"])
    return {**trainer, "deepspeed": engine}

"""DeepSpeed's checkpoint directories: ZeRO stages 0 to 3, universal ones too. Read only.

The ranks' files are indexed, not loaded: every parameter is found in the flat tensors that hold it
(`nnx.checkpoint.foreign.deepspeed_zero`). What Lightning or the user saved with them becomes the trainer's
part. Nothing that the files bring along is executed: DeepSpeed's own classes in them are kept as inert data.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from nnx.box import Box
from nnx.checkpoint.foreign.contents import Contents, ForeignCheckpoint
from nnx.checkpoint.foreign.deepspeed_universal import Universal
from nnx.checkpoint.foreign.deepspeed_zero import OWN_CLASSES, Partitions, add_state, split_evenly
from nnx.checkpoint.foreign.faults import malformed_explained
from nnx.checkpoint.foreign.flat import pieces_of_range
from nnx.checkpoint.foreign.torch_file import FileTensor, load_torch_file
from nnx.checkpoint.formats import CheckpointFormat
from nnx.errors import CheckpointError

__all__ = ["DeepSpeed"]

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT_FILE = re.compile(r"layer_.*|(?:.*_)?expert_.*|expp_rank_.*")
_LATEST = ("latest", "latest_universal")
_WRAPPER = "_forward_module."
"""How Lightning before 2.1 prefixed every name."""

_ENGINE_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size checkpoint_parallel_dimensions ds_config ds_version sparse_tensor_module_names "
    "csr_tensor_module_names universal_checkpoint_info ds_autoep_layers autoep_layers num_experts folding".split()
)
"""What DeepSpeed itself puts into a model file; everything else is its caller's."""
_KEPT = ("skipped_steps", "global_steps", "global_samples", "data_sampler", "random_ltd")


@dataclass
class _Files:
    """What a tag's directory holds: files by the rank in their name; None for the one file of all ranks."""

    directory: Path
    models: dict[int | None, Path] = field(default_factory=dict)
    optimizers: dict[int, Path] = field(default_factory=dict)


class DeepSpeed(CheckpointFormat):
    """A DeepSpeed checkpoint, or the directory of one tag in it."""

    name = "deepspeed"

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        directory = Path(path)
        if not directory.is_dir():
            return False
        if any((directory / name).is_file() for name in _LATEST) or _is_tag(directory):
            return True
        return any(_is_tag(child) for child in directory.iterdir() if child.is_dir())

    @override
    def open(
        self,
        path: str | os.PathLike[str],
        *,
        weights_only: bool = True,
        tag: str | None = None,
        weights: Literal["master", "model"] = "master",
    ) -> ForeignCheckpoint:
        """Open it without reading tensor data.

        Args:
            path: The directory that was given to ``save_checkpoint``, or that of a tag in it.
            weights_only: False trusts what the caller of DeepSpeed saved along with the model.
            tag: Which of several saves; by default the one that the file ``latest`` names.
            weights: ``"master"`` gives the fp32 weights that the optimizer steps, ``"model"`` those in the
                precision of the model, which ZeRO 3 does not save.

        Raises:
            CheckpointError: A file is missing or damaged, or nothing says which tag is meant.
        """
        with malformed_explained(path, "DeepSpeed"):
            return _open(Path(path), tag, weights, weights_only)


def _open(path: Path, tag: str | None, weights: str, weights_only: bool) -> ForeignCheckpoint:
    files = _scan(_tag_directory(path, tag))
    main = _load_model(_model_file(files, 0), weights_only)
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


# --- files ------------------------------------------------------------------------------------------


def _is_tag(directory: Path) -> bool:
    return any(_MODEL_FILE.fullmatch(file.name) for file in directory.iterdir())


def _tag_directory(path: Path, tag: str | None) -> Path:
    if tag is None and _is_tag(path):
        return path
    if tag is None:
        tag = next((found for name in _LATEST if (found := _read_tag(path / name))), None)
    tags = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_tag(child))
    if tag is None and len(tags) == 1:
        tag = tags[0]
    if tag is None:
        raise CheckpointError(
            f"'{path}' holds {len(tags)} DeepSpeed checkpoints ({', '.join(tags)}) and no file 'latest' that "
            "names one.",
            remedy=f"Open one of them, such as '{path / tags[-1]}'." if tags else "Check the path.",
        )
    if tag not in tags:
        raise CheckpointError(
            f"'{path}' has no DeepSpeed checkpoint of tag '{tag}', which was asked for or is named in 'latest'.",
            remedy=f"Open one of {', '.join(tags)}." if tags else "Restore it from a backup.",
        )
    return path / tag


def _read_tag(file: Path) -> str | None:
    return file.read_text(errors="replace").strip() if file.is_file() else None


def _scan(directory: Path) -> _Files:
    files = _Files(directory)
    for path in sorted(directory.iterdir()):
        model, optimizer = _MODEL_FILE.fullmatch(path.name), _OPTIMIZER_FILE.fullmatch(path.name)
        found = model or optimizer
        if _EXPERT_FILE.fullmatch(path.name) or (found and int(found[2]) > 0):
            raise CheckpointError(
                f"'{path}' belongs to a model that was split by tensor, pipeline or expert parallelism.",
                remedy="Only data-parallel checkpoints (ZeRO) can be read; merge it with DeepSpeed first.",
            )
        if model:
            files.models[None if model[1] is None else int(model[1])] = path
        elif optimizer and int(optimizer[1]) in files.optimizers:
            raise CheckpointError(
                f"'{directory}' has two optimizer files of rank {optimizer[1]}, of which one is '{path.name}'.",
                remedy="They are of different saves; delete the older ones.",
            )
        elif optimizer:
            files.optimizers[int(optimizer[1])] = path
    return files


def _model_file(files: _Files, rank: int) -> Path:
    """The model file of all ranks, or in stage 3 that of one."""
    found = files.models.get(None, files.models.get(rank))
    if found is not None:
        return found
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    raise CheckpointError(
        f"'{files.directory / name}' is missing.",
        remedy="Restore it; every rank's files are needed to put the model together.",
    )


def _load_model(path: Path, weights_only: bool) -> dict[str, Any]:
    """A model file; trusted only if it cannot be read safely, since only then its tensors stay in the file."""
    try:
        loaded = load_torch_file(path, inert=OWN_CLASSES)
    except CheckpointError:
        if weights_only:
            raise
        loaded = load_torch_file(path, weights_only=False)
    if not isinstance(loaded, Mapping) or "module" not in loaded:
        raise CheckpointError(
            f"'{path}' is not a model file of DeepSpeed: it has no entry 'module'.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return dict(loaded)


def _partitions(files: _Files, main: Mapping[str, Any]) -> Partitions | Universal | None:
    """The optimizer's files; None where there was no ZeRO."""
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
            f"'{files.directory}' was written by {world} ranks, and of these "
            f"{', '.join(repr(name) for name in names)} {'is' if len(names) == 1 else 'are'} missing.",
            remedy="Restore what is missing; every rank's files are needed to put the model together.",
        )
    stale = [files.optimizers[rank].name for rank in states if rank >= world or counts[rank] != world]
    if stale:
        raise CheckpointError(
            f"'{files.directory}' was written by {world} ranks, but has '{stale[0]}' of another save.",
            remedy="Delete files that are left from an earlier save with another number of ranks.",
        )
    return Partitions(files.directory, list(states.values()), shapes)


def _partition_count(state: Mapping[str, Any]) -> int:
    """In how many parts the parameters were cut; stages 1 and 2 note it for each group."""
    counts = state["partition_count"]
    counts = counts if isinstance(counts, (list, tuple)) else [counts]
    if len(set(counts)) != 1:
        raise CheckpointError(
            f"the param groups are cut into {list(counts)} parts: experts have groups of their own.",
            remedy="Only data-parallel checkpoints (ZeRO) can be read; merge it with DeepSpeed first.",
        )
    return int(counts[0])


# --- contents ---------------------------------------------------------------------------------------


def _add_model(
    contents: Contents,
    main: Mapping[str, Any],
    partitions: Partitions | Universal | None,
    frozen: _Frozen,
    weights: str,
) -> None:
    if weights not in ("master", "model"):
        raise CheckpointError(f"weights={weights!r} is neither 'master' nor 'model'.")
    if weights == "model" and partitions is not None and partitions.stage == 3:
        raise CheckpointError(
            f"'{contents.path}' is of ZeRO stage 3, which saves no weights in the model's precision.",
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
    """What the optimizer does not step. In stage 3 each rank's model file has its part of it.

    Args:
        models: The model files in order of rank; none of the other stages.
        shapes: The parameters' shapes by name.
    """

    def __init__(self, models: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> None:
        self._fragments = [model["frozen_param_fragments"] for model in models]
        self._shapes = shapes if models else {}

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def add(self, contents: Contents, name: str, key: str) -> None:
        shape = tuple(self._shapes[name])
        parts = [fragments[name] for fragments in self._fragments]
        if any(isinstance(part, Tensor) for part in parts):  # of a file that had to be trusted
            flat = torch.cat([part.read() if isinstance(part, FileTensor) else part for part in parts])
            contents.add(key, flat[: math.prod(shape)].reshape(shape).clone())
            return
        pieces = [
            piece
            for span in split_evenly(0, math.prod(shape), len(parts))
            for piece in pieces_of_range(parts[span.rank], 0, Box.whole(shape), span.start, span.stop)
        ]
        contents.add_pieces(key, shape, str(parts[0].dtype).removeprefix("torch."), pieces)


def _frozen(files: _Files, main: Mapping[str, Any], world_size: int, weights_only: bool) -> _Frozen:
    shapes = main.get("frozen_param_shapes") or {}
    if None in files.models or not shapes:
        return _Frozen((), {})
    others = [rank for rank in range(1, world_size)]
    return _Frozen([main, *(_load_model(_model_file(files, rank), weights_only) for rank in others)], shapes)


def _add_optimizer(
    contents: Contents, main: Mapping[str, Any], partitions: Partitions | Universal | None
) -> None:
    if partitions is None:
        if main.get("optimizer") is not None:
            contents.add_optimizer(main["optimizer"])
        return
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group in partitions.groups:
        names = _as_passed(group["params"], main, partitions)
        for name in names:
            stored = name.removeprefix(_WRAPPER)
            found = partitions.add_states(contents, name, f"optim.0.state.{stored}")
            if "step" in group and f"optim.0.state.{stored}.step" not in contents.entries:
                add_state(contents, f"optim.0.state.{stored}.step", group["step"], found)
            if found:
                values[stored] = found
        groups.append({**group, "params": [name.removeprefix(_WRAPPER) for name in names]})
    contents.objects["optim"] = [{"groups": groups, "values": values}]


def _as_passed(
    names: Sequence[str], main: Mapping[str, Any], partitions: Partitions | Universal
) -> list[str]:
    """The order in which the optimizer was given its parameters, before they were dealt out to the ranks."""
    config = main.get("ds_config")
    zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else {}
    if partitions.stage == 3 or not zero.get("round_robin_gradients"):
        return list(names)
    world_size = int(main.get("dp_world_size", 1))
    dealt = [index for rank in range(world_size) for index in range(rank, len(names), world_size)]
    return [name for _, name in sorted(zip(dealt, names, strict=True))]


def _trainer(main: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller saved along, and under ``"deepspeed"`` what the engine counted."""
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

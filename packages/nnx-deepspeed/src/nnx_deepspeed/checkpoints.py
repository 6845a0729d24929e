"""DeepSpeed's checkpoint directories: ZeRO stages 0 to 3, universal ones too. Read only.

The ranks' files are indexed, not loaded: every parameter is found in the flat tensors that hold it. What
Lightning or the user saved with them becomes the trainer's part. Nothing that the files bring along is
executed: DeepSpeed's own classes in them are kept as inert data.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import (
    Contents,
    ForeignCheckpoint,
    Span,
    add_shared_state,
    load_rank_file,
    malformed_explained,
    pieces_of_range,
    spans_of_partitions,
    split_evenly,
)
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.reading.formats import CheckpointFormat
from nnx_checkpoint.storage.files import require_inside
from nnx_checkpoint.unpickling.torch_file import FileTensor, Inert, load_torch_file

__all__ = ["DeepSpeed"]


# --- which files there are ------------------------------------------------------------------------
# Tags, the file ``latest``, and the names of the ranks' files.


_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT_FILE = re.compile(r"layer_.*|(?:.*_)?expert_.*|expp_rank_.*")
_OFFLOADED = "offloaded_tensors"
_LATEST = ("latest", "latest_universal")


@dataclass
class Files:
    """What a tag's directory holds: files by the rank in their name; None for the one file of all ranks."""

    directory: Path
    models: dict[int | None, Path] = field(default_factory=dict)
    optimizers: dict[int, Path] = field(default_factory=dict)


def holds_checkpoints(directory: Path) -> bool:
    """Whether a directory looks like one that was given to DeepSpeed, or like that of a tag."""
    if not directory.is_dir():
        return False
    if _is_tag(directory):
        return True
    return any(_is_tag(child) for child in directory.iterdir() if child.is_dir())


def _is_tag(directory: Path) -> bool:
    try:
        return any(_MODEL_FILE.fullmatch(file.name) for file in directory.iterdir())
    except OSError:  # such as `lost+found` beside the tags
        return False


def tag_directory(path: Path, tag: str | None) -> Path:
    """The directory of a tag: the one asked for, the path itself, the one in ``latest``, or the only one."""
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
            f"'{path}' has no DeepSpeed checkpoint of tag '{tag}', "
            "which was asked for or is named in 'latest'.",
            remedy=f"Open one of {', '.join(tags)}." if tags else "Restore it from a backup.",
        )
    return path / tag


_LONGEST_TAG = 256


def _read_tag(file: Path) -> str | None:
    """The name in a file; as it may be a link to anything, no more than a name's length is read of it."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return opened.read(_LONGEST_TAG).decode(errors="replace").strip()


def scan(directory: Path) -> Files:
    """List what a tag's directory holds."""
    files = Files(directory)
    for path in sorted(directory.iterdir()):
        model, optimizer = _MODEL_FILE.fullmatch(path.name), _OPTIMIZER_FILE.fullmatch(path.name)
        found = model or optimizer
        if _EXPERT_FILE.fullmatch(path.name) or (found and int(found[2]) > 0):
            raise CheckpointError(
                f"'{path}' belongs to a model that was split by tensor, pipeline or expert parallelism.",
                remedy="Only data-parallel checkpoints (ZeRO) can be read.",
            )
        if path.name == _OFFLOADED:
            raise CheckpointError(
                f"'{path}' holds tensors that were offloaded to NVMe, in files of DeepSpeed's own.",
                remedy="Save it without NVMe offload.",
            )
        if model:
            files.models[None if model[1] is None else int(model[1])] = path
        elif optimizer and int(optimizer[1]) in files.optimizers:
            raise CheckpointError(
                f"'{directory}' has two optimizer files of rank {optimizer[1]}, "
                f"of which one is '{path.name}'.",
                remedy="They are of different saves; delete the older ones.",
            )
        elif optimizer:
            files.optimizers[int(optimizer[1])] = path
    return files


def model_file(files: Files, rank: int) -> Path:
    """The model file of all ranks, or in stage 3 that of one."""
    found = files.models.get(None, files.models.get(rank))
    if found is not None:
        return found
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    raise CheckpointError(
        f"'{files.directory / name}' is missing.",
        remedy="Restore it; every rank's files are needed to put the model together.",
    )


# --- what the ranks hold, parameter by parameter --------------------------------------------------
# Stages 1 and 2 put the parameters of a group end to end, perhaps with padding between them, and give each
# rank an equal part of the whole. Stage 3 gives each rank an equal part of every parameter, padded at the
# end, and puts these end to end. Either way one flat tensor per rank and group holds the fp32 masters, and
# tensors laid out in the same way hold the optimizer's state.


OWN_CLASSES = ("deepspeed.",)
"""Prefixes of the names of DeepSpeed's own classes, which its files hold a few objects of."""

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""For each flat group, its parameters in order, by name."""


class StoredPartitions:
    """The optimizer files of all ranks together.

    Args:
        directory: The directory, named in messages.
        ranks: ``optimizer_state_dict`` of each rank's file.
        shapes: ``param_shapes`` of the model file.

    Attributes:
        stage: The ZeRO stage.
        groups: The optimizer's param groups, with the names of their parameters.
    """

    def __init__(self, directory: Path, ranks: Sequence[Mapping[str, Any]], shapes: Shapes) -> None:
        self._directory = directory
        self._ranks = ranks
        self._shapes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        self.stage = _stage(ranks[0])
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self._masters = [_flat_tensors(state, key, len(shapes), directory) for state in ranks]
        self._group_of = {name: i for i, group in enumerate(shapes) for name in group}
        self._spans = dict(self._cut_by_parameter(shapes) if self.stage == 3 else self._cut_flat(shapes))
        base = ranks[0]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        self.groups, self._numbers = _named_groups(base, shapes)
        self._require_same_step(len(shapes))

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def _cut_flat(self, shapes: Shapes) -> Iterator[tuple[str, list[Span]]]:
        for index, group in enumerate(shapes):
            sizes = {self._partition_size(rank, index) for rank in range(len(self._ranks))}
            if len(sizes) != 1:
                raise contradiction(
                    self._directory, f"partitions of group {index} have sizes {sorted(sizes)}"
                )
            paddings = (self._ranks[0].get("param_alignment_paddings") or {index: ()})[index]
            offset = 0
            for number, (name, shape) in enumerate(group.items()):
                numel = math.prod(shape)
                yield name, spans_of_partitions(offset, numel, max(sizes))
                offset += numel + (paddings[number] if number < len(paddings) else 0)

    def _cut_by_parameter(self, shapes: Shapes) -> Iterator[tuple[str, list[Span]]]:
        for group in shapes:
            position = 0
            for name, shape in group.items():
                numel = math.prod(shape)
                yield name, split_evenly(position, numel, len(self._ranks))
                position += math.ceil(numel / len(self._ranks))

    def _partition_size(self, rank: int, group: int) -> int:
        """Elements of a rank's partition; ZeRO 1 and 2 save the masters without the padding at the end."""
        stored = self._masters[rank][group].numel
        state = self._ranks[rank]
        return stored + (int(state["group_paddings"][group]) if "zero_stage" in state else 0)

    def _state(self, rank: int, group: int) -> Mapping[str, Any]:
        """The optimizer's state for one flat group."""
        if self.stage == 3:
            states = self._ranks[rank]["optimizer_state_dict"]["state"]
        else:
            base = self._ranks[rank]["base_optimizer_state"]
            if not isinstance(base, Mapping):  # "elastic" checkpoints list the states by group
                return dict(base[group])
            states = base["state"]
        return dict(states.get(self._numbers[group], {}))

    def _require_same_step(self, groups: int) -> None:
        """Files of different saves are told apart by the steps that the optimizer counted, if it did."""
        for group in range(groups):
            steps = [_scalar(self._state(rank, group).get("step")) for rank in range(len(self._ranks))]
            if len(set(steps)) > 1:
                raise contradiction(
                    self._directory, f"the ranks' optimizers have taken {steps} steps; a save was interrupted"
                )

    def _pieces(self, name: str, tensors: Mapping[int, FileTensor]) -> list[Piece]:
        outer = Box.whole(self._shapes[name])
        return [
            piece
            for span in self._spans[name]
            if span.rank in tensors
            for piece in pieces_of_range(tensors[span.rank], span.position, outer, span.start, span.stop)
        ]

    def add_master(self, contents: Contents, name: str, key: str) -> None:
        """Add the fp32 master of a parameter under a logical name."""
        group = self._group_of[name]
        tensors = {rank: masters[group] for rank, masters in enumerate(self._masters)}
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        contents.add_pieces(key, self._shapes[name], dtype, self._pieces(name, tensors))

    def add_states(self, contents: Contents, name: str, prefix: str) -> dict[str, Any]:
        """Add the optimizer's state of a parameter; what is no tensor is returned."""
        group = self._group_of[name]
        states = {rank: self._state(rank, group) for rank in range(len(self._ranks))}
        values: dict[str, Any] = {}
        for key, value in states[0].items():
            if not isinstance(value, FileTensor) or not value.shape:
                add_shared_state(contents, f"{prefix}.{key}", value, values)
                continue
            if value.numel < self._masters[0][group].numel or len(value.shape) > 1:
                raise CheckpointError(
                    f"optimizer state '{key}' in '{value.path}' has shape {value.shape}, "
                    "which is not that of the flat parameters it belongs to.",
                    remedy="Only optimizers that treat every element alike, such as AdamW, can be read.",
                )
            tensors = {rank: state[key] for rank, state in states.items() if key in state}
            dtype = str(value.dtype).removeprefix("torch.")
            pieces = self._pieces(name, tensors)
            contents.add_pieces(f"{prefix}.{key}", self._shapes[name], dtype, pieces)
        return values


def _stage(state: Mapping[str, Any]) -> int:
    """The stage; DeepSpeed's optimizer for bf16 partitions as stage 1 does and notes none."""
    stage = state.get("zero_stage", 1)
    return int(stage.arguments[0] if isinstance(stage, Inert) else stage)


def _flat_tensors(state: Mapping[str, Any], key: str, groups: int, directory: Path) -> list[FileTensor]:
    found = state.get(key)
    if not isinstance(found, (list, tuple)) or len(found) != groups:
        raise contradiction(directory, f"expected '{key}' with {groups} flat groups")
    if any(not isinstance(tensor, FileTensor) for tensor in found):
        raise CheckpointError(
            f"the files in '{directory}' are in a format older than that of torch 1.6.",
            remedy="Load and save them again with a newer DeepSpeed.",
        )
    return list(found)


def _named_groups(base: Any, shapes: Shapes) -> tuple[list[dict[str, Any]], list[Any]]:
    """The param groups with the names of their parameters, and the number of each flat group's state."""
    if not isinstance(base, Mapping):
        return [{"params": list(group)} for group in shapes], list(range(len(shapes)))
    groups, numbers = [], [number for group in base["param_groups"] for number in group["params"]]
    flat = iter(shapes)
    for group in base["param_groups"]:
        names = [name for _ in group["params"] for name in next(flat, {})]
        groups.append({**group, "params": names})
    return groups, numbers


def _scalar(value: Any) -> Any:
    return value.read().item() if isinstance(value, FileTensor) and value.numel == 1 else value


def contradiction(directory: Path, why: str) -> CheckpointError:
    """The error for files that do not belong together."""
    return CheckpointError(
        f"the files of DeepSpeed checkpoint '{directory}' contradict each other: {why}.",
        remedy="Restore them from a backup, or use another checkpoint.",
    )


# --- universal checkpoints ------------------------------------------------------------------------
# ``ds_to_universal.py`` makes them of the files of all ranks. ``zero/<parameter>/`` has one file for the
# fp32 master and one for each state of the optimizer, complete; ``zero/optimizer_state.pt`` the param
# groups. Stage 3 stores them flat and lists no steps by parameter.


_MASTER = "fp32"


class Universal:
    """The parameters of a universal checkpoint.

    Args:
        directory: The tag's directory.
        shapes: ``param_shapes`` of the model file.

    Attributes:
        stage: The ZeRO stage that it was converted from.
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
        """Add the optimizer's state of a parameter; what is no tensor is returned."""
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
        """Where the files of a parameter are; its name comes from a file, and could lead anywhere."""
        folder = self._directory / "zero" / name
        require_inside(folder, self._directory)
        return folder

    def _add(self, contents: Contents, name: str, key: str, value: Any) -> None:
        shape = self._shapes[name]
        if not isinstance(value, FileTensor) or value.numel != math.prod(shape):
            raise contradiction(self._directory, f"what is stored of '{name}' has not its shape {shape}")
        pieces = pieces_of_range(value, 0, Box.whole(shape), 0, value.numel)
        contents.add_pieces(key, shape, str(value.dtype).removeprefix("torch."), pieces)


# --- the format -----------------------------------------------------------------------------------


_WRAPPER = "_forward_module."
"""How Lightning before 2.1 prefixed every name."""

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
"""What DeepSpeed itself puts into a model file; everything else is its caller's."""
_KEPT = ("skipped_steps", "global_steps", "global_samples", "data_sampler", "random_ltd")


class DeepSpeed(CheckpointFormat):
    """A DeepSpeed checkpoint, or the directory of one tag in it."""

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
        """Open it without reading tensor data.

        Args:
            path: The directory that was given to ``save_checkpoint``, or that of a tag in it.
            weights_only: False trusts what the caller of DeepSpeed saved along with the model.
            tag: Selects one of several saves; by default the one that the file ``latest`` names.
            weights: ``"master"`` gives the fp32 weights that the optimizer steps, ``"model"`` those in the
                precision of the model, which ZeRO 3 does not save.

        Raises:
            CheckpointError: A file is missing or damaged, or nothing says which tag is meant.
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


# --- files ----------------------------------------------------------------------------------------


def _load_model(path: Path, weights_only: bool) -> dict[str, Any]:
    loaded = load_rank_file(path, weights_only=weights_only, own=_ENGINE_KEYS, inert=OWN_CLASSES)
    if "module" not in loaded:
        raise CheckpointError(
            f"'{path}' is not a model file of DeepSpeed: it has no entry 'module'.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return loaded


def _partitions(files: Files, main: Mapping[str, Any]) -> StoredPartitions | Universal | None:
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
    return StoredPartitions(files.directory, list(states.values()), shapes)


def _partition_count(state: Mapping[str, Any]) -> int:
    """In how many parts the parameters were cut; stages 1 and 2 note it for each group."""
    counts = state["partition_count"]
    counts = counts if isinstance(counts, (list, tuple)) else [counts]
    if len(set(counts)) != 1:
        raise CheckpointError(
            f"the param groups are cut into {list(counts)} parts: experts have groups of their own.",
            remedy="Only data-parallel checkpoints (ZeRO) can be read.",
        )
    return int(counts[0])


# --- contents ---------------------------------------------------------------------------------------


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
        pieces = [
            piece
            for span in split_evenly(0, math.prod(shape), len(parts))
            for piece in pieces_of_range(parts[span.rank], 0, Box.whole(shape), span.start, span.stop)
        ]
        contents.add_pieces(key, shape, str(parts[0].dtype).removeprefix("torch."), pieces)


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
        names = _as_passed(group["params"], main, partitions)
        for name in names:
            stored = name.removeprefix(_WRAPPER)
            found = partitions.add_states(contents, name, f"optim.0.state.{stored}")
            if "step" in group and f"optim.0.state.{stored}.step" not in contents.entries:
                add_shared_state(contents, f"optim.0.state.{stored}.step", group["step"], found)
            if found:
                values[stored] = found
        groups.append({**group, "params": [name.removeprefix(_WRAPPER) for name in names]})
    contents.objects["optim"] = [{"groups": groups, "values": values}]


def _as_passed(
    names: Sequence[str], main: Mapping[str, Any], partitions: StoredPartitions | Universal
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

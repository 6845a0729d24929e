"""Locate the shards of parameters in the files of DeepSpeed's ranks.

Stages 1 and 2 concatenate the parameters of a group, perhaps with padding between them, and give each rank an
equal range of the result. Stage 3 gives each rank an equal shard of every parameter, padded at the end, and
concatenates these. In both layouts one flat tensor per rank and group holds the fp32 masters. The optimizer's
state tensors have the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents
from nnx_checkpoint.foreign.flat_buffers import (
    Span,
    add_shared_state,
    pieces_of_range,
    spans_of_partitions,
    split_evenly,
)
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.unpickling.allowed import Inert
from nnx_checkpoint.unpickling.torch_file import FileTensor

OWN_CLASSES = ("deepspeed.",)
"""Prefixes of the names of DeepSpeed's own classes; its files hold a few objects of them."""


Shapes = Sequence[Mapping[str, Sequence[int]]]
"""The shapes of each flat group's parameters, in order, by name."""


class StoredPartitions:
    """The optimizer files of all ranks.

    Args:
        directory: The directory, for error messages.
        ranks: The ``optimizer_state_dict`` of each rank's file.
        shapes: The ``param_shapes`` of the model file.

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
        """Return the size of a rank's partition; ZeRO 1 and 2 save masters without the padding at the end."""
        stored = self._masters[rank][group].numel
        state = self._ranks[rank]
        return stored + (int(state["group_paddings"][group]) if "zero_stage" in state else 0)

    def _state(self, rank: int, group: int) -> Mapping[str, Any]:
        """Return the optimizer's state for one flat group."""
        if self.stage == 3:
            states = self._ranks[rank]["optimizer_state_dict"]["state"]
        else:
            base = self._ranks[rank]["base_optimizer_state"]
            if not isinstance(base, Mapping):  # "elastic" checkpoints list the states by group
                return dict(base[group])
            states = base["state"]
        return dict(states.get(self._numbers[group], {}))

    def _require_same_step(self, groups: int) -> None:
        """Refuse files of different saves, which have different step counts if the optimizer counts steps."""
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
        """Add the optimizer's state of a parameter, and return the values that are no tensors."""
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
                    "which differs from the shape of its flat parameters.",
                    remedy="nnx reads only elementwise optimizers, such as AdamW.",
                )
            tensors = {rank: state[key] for rank, state in states.items() if key in state}
            dtype = str(value.dtype).removeprefix("torch.")
            pieces = self._pieces(name, tensors)
            contents.add_pieces(f"{prefix}.{key}", self._shapes[name], dtype, pieces)
        return values


def _stage(state: Mapping[str, Any]) -> int:
    """Return the stage. DeepSpeed's bf16 optimizer records none, and partitions as stage 1 does."""
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
    """Return the param groups with their parameters' names, and each flat group's number in the state."""
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
    """Return the error for files that do not belong together."""
    return CheckpointError(
        f"the files of DeepSpeed checkpoint '{directory}' contradict each other: {why}.",
        remedy="Restore them from a backup, or use another checkpoint.",
    )

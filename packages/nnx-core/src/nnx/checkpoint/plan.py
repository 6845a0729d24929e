"""Who writes what: every rank describes its shards, and the coordinator assigns each box.

This module owns the checks that need all ranks' descriptions (shapes and dtypes agree, boxes cover each
tensor without gap or overlap) and the balancing of bytes. It never communicates and never touches files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nnx.box import Box, find_fault
from nnx.checkpoint.dtypes import DTYPES
from nnx.checkpoint.index import Piece, TensorEntry
from nnx.checkpoint.shardfile import StoredBox, file_order, rank_file
from nnx.errors import CheckpointError
from nnx.layout import Shard

__all__ = ["Description", "Mode", "Plan", "describe", "make_plan", "place"]

Mode = Literal["sharded", "deduped"]
_Extents = tuple[int, ...]
Description = list[tuple[str, str, _Extents, list[tuple[_Extents, _Extents]]]]
"""One rank's shards: name, dtype, shape and boxes of each. Plain tuples, because it is sent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each rank stores.

    Attributes:
        keep: For each rank, which boxes of its description it writes, counted over all its tensors.
        stored: The same boxes, spelled out.
        tensors: Dtype and shape of every tensor; an empty one may have no box.
    """

    keep: list[list[int]]
    stored: list[list[StoredBox]]
    tensors: dict[str, tuple[str, _Extents]]


def describe(shards: Mapping[str, Shard]) -> Description:
    """What this rank holds, in a form that travels.

    Raises:
        CheckpointError: A shard has a dtype that the format cannot store, or views of another dtype.
    """
    description: Description = []
    for name, shard in shards.items():
        dtype = str(shard.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"tensor '{name}' has dtype {dtype}, which a checkpoint cannot hold.",
                remedy=f"Convert it to one of {', '.join(DTYPES)}.",
            )
        for view in shard.data:
            _require_data(name, shard, view)
        boxes = [(box.offset, box.size) for box in shard.boxes]
        description.append((name, dtype, shard.shape, boxes))
    return description


def _require_data(name: str, shard: Shard, view: Tensor) -> None:
    if view.dtype != shard.dtype or view.layout is not torch.strided:
        raise CheckpointError(
            f"a view of tensor '{name}' is {view.dtype} with layout {view.layout}, "
            f"expected {shard.dtype} with layout torch.strided.",
            remedy="Make it dense and of the shard's dtype.",
        )
    if view.is_meta:
        raise CheckpointError(
            f"tensor '{name}' is on the meta device and has no data.",
            remedy="Materialise the module before saving it.",
        )


def make_plan(descriptions: Sequence[Description], mode: Mode) -> Plan:
    """Assign every box of every tensor to the rank or ranks that write it.

    Args:
        descriptions: One for each rank, in rank order.
        mode: ``"deduped"`` stores each distinct box once, on the owner with the fewest bytes so far;
            ``"sharded"`` lets every rank store all it has.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or its boxes do not cut it cleanly.
    """
    declared: dict[str, tuple[str, _Extents, int]] = {}
    owners: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    for rank, description in enumerate(descriptions):
        number = 0
        for name, dtype, shape, boxes in description:
            _agree(name, dtype, shape, rank, declared)
            for offset, size in boxes:
                owner = owners.setdefault((name, Box(offset, size)), [])
                if not owner or owner[-1][0] != rank:
                    owner.append((rank, number))
                number += 1
    _drop_empty(owners, declared)
    _check_cover(owners, declared)
    keep: list[list[int]] = [[] for _ in descriptions]
    stored: list[list[StoredBox]] = [[] for _ in descriptions]
    for (name, box), writers in _assign(owners, declared, mode, len(descriptions)).items():
        dtype, shape, _ = declared[name]
        for rank, number in writers:
            keep[rank].append(number)
            stored[rank].append(StoredBox(name, shape, dtype, box))
    return Plan(keep, stored, {name: (dtype, shape) for name, (dtype, shape, _) in declared.items()})


def place(plan: Plan, header_sizes: Sequence[int]) -> list[TensorEntry]:
    """Where every box ends up, once the length of each rank's header is known."""
    pieces: dict[str, list[Piece]] = {name: [] for name in plan.tensors}
    for rank, boxes in enumerate(plan.stored):
        position = header_sizes[rank]
        for i in file_order(boxes):
            box = boxes[i]
            pieces[box.name].append(Piece(box.box, rank_file(rank), position, box.nbytes))
            position += box.nbytes
    return [
        TensorEntry(name, shape, dtype, tuple(pieces[name]))
        for name, (dtype, shape) in sorted(plan.tensors.items())
    ]


def _agree(
    name: str, dtype: str, shape: _Extents, rank: int, declared: dict[str, tuple[str, _Extents, int]]
) -> None:
    first = declared.setdefault(name, (dtype, shape, rank))
    if first[:2] != (dtype, shape):
        raise CheckpointError(
            f"ranks disagree about tensor '{name}': {first[0]} {first[1]} on rank {first[2]}, "
            f"{dtype} {shape} on rank {rank}.",
            remedy="Give every rank the same global shape and dtype, or distinct names.",
        )


def _drop_empty(
    owners: dict[tuple[str, Box], list[tuple[int, int]]], declared: Mapping[str, tuple[str, _Extents, int]]
) -> None:
    """Forget boxes without elements, except the one box of an empty tensor."""
    for name, box in [key for key in owners if key[1].numel == 0]:
        shape = declared[name][1]
        if math.prod(shape) > 0 or box != Box.whole(shape):
            del owners[name, box]


def _check_cover(
    owners: Mapping[tuple[str, Box], object], declared: Mapping[str, tuple[str, _Extents, int]]
) -> None:
    boxes: dict[str, list[Box]] = {name: [] for name in declared}
    for name, box in owners:
        boxes[name].append(box)
    for name, pieces in boxes.items():
        fault = find_fault(declared[name][1], pieces)
        if fault:
            raise CheckpointError(
                f"the shards of tensor '{name}' do not make up its shape {declared[name][1]}: {fault}.",
                remedy="This is a bug of the strategy that described them; please report it.",
            )


def _assign(
    owners: Mapping[tuple[str, Box], list[tuple[int, int]]],
    declared: Mapping[str, tuple[str, _Extents, int]],
    mode: Mode,
    world_size: int,
) -> dict[tuple[str, Box], list[tuple[int, int]]]:
    if mode == "sharded":
        return dict(owners)
    load = [0] * world_size
    chosen: dict[tuple[str, Box], list[tuple[int, int]]] = {}

    def cost(key: tuple[str, Box]) -> int:
        return key[1].numel * DTYPES[declared[key[0]][0]].itemsize

    # What only one rank has is fixed; then the largest boxes first, each to the least loaded owner.
    for key in sorted(owners, key=lambda key: (len(owners[key]) > 1, -cost(key), key)):
        writer = min(owners[key], key=lambda owner: (load[owner[0]], owner[0]))
        load[writer[0]] += cost(key)
        chosen[key] = [writer]
    return {key: chosen[key] for key in owners}

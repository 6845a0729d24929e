"""The plan of a save: from what all ranks hold to what each of them stores.

The coordinator makes the plan from all descriptions. What a rank must know of it is short: which cells of
which layouts are its own. Together with the number of each tensor's kind, which is the same message for
all, the rank finds out itself what it stores. This module never communicates and never touches files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from nnx.box import Box
from nnx.checkpoint.assigning import Assigned, assign_all, assign_once
from nnx.checkpoint.cells import Cell, Kind, OddBox, OddTensor, Stored, cell_box, has_cell
from nnx.checkpoint.description import Description, Extents, dtype_name
from nnx.checkpoint.manifest import rank_file
from nnx.checkpoint.merging import Held, merge
from nnx.checkpoint.rankfile import StoredBox
from nnx.errors import CheckpointError
from nnx.layout import Shard

__all__ = ["Deal", "Mode", "Own", "Plan", "make_plan", "select"]

Mode = Literal["sharded", "deduped"]


@dataclass(frozen=True, slots=True)
class Deal:
    """What every rank is told alike.

    Attributes:
        kinds: For each distinct facts the kind of each name, as little-endian 32-bit numbers; -1 where
            the tensor is odd.
        cuts: For each kind its chunk and its layout.
    """

    kinds: Sequence[bytes]
    cuts: Sequence[tuple[Extents, int]]


@dataclass(frozen=True, slots=True)
class Own:
    """What one rank is told.

    Attributes:
        facts: Number of its facts.
        cells: Which cells it stores, by layout.
        odd: Which odd boxes it stores; None stands for all those that it described, and no others.
    """

    facts: int
    cells: Mapping[int, Sequence[Cell]]
    odd: Sequence[tuple[str, Box]] | None


class Plan:
    """What is stored by whom.

    Args:
        descriptions: One for each rank, in rank order.
        held: What they hold together.
        assigned: Who stores what.
    """

    def __init__(self, descriptions: Sequence[Description], held: Held, assigned: Assigned) -> None:
        self.aliases = held.aliases
        self._descriptions = descriptions
        self._held = held
        self._assigned = assigned

    def deal(self) -> Deal:
        """What to tell all ranks."""
        numbers = self._assigned.kind_of.astype("<i4")
        cuts = [(kind.chunk, kind.layout) for kind in self._assigned.kinds]
        return Deal([numbers[place].tobytes() for place in self._held.place], cuts)

    def own(self) -> list[Own]:
        """What to tell each rank."""
        cells: list[dict[int, list[Cell]]] = [{} for _ in self._descriptions]
        for number, layout in enumerate(self._assigned.layouts):
            for cell, ranks in layout.items():
                for rank in ranks:
                    cells[rank].setdefault(number, []).append(cell)
        odd: list[list[tuple[str, Box]]] = [[] for _ in self._descriptions]
        for name, boxes in self._assigned.odd.items():
            for box, ranks in boxes.items():
                for rank in ranks:
                    odd[rank].append((name, box))
        facts = {id(one): number for number, one in enumerate(self._held.facts)}
        told = []
        for rank, one in enumerate(self._descriptions):
            described = [(item.name, box) for item in one.odd for box in item.boxes]
            same = len(described) == len(odd[rank]) and set(described) == set(odd[rank])
            told.append(Own(facts[id(one.facts)], cells[rank], None if same else odd[rank]))
        return told

    def stored(self, present: Sequence[bool]) -> Stored:
        """What the index says.

        Args:
            present: For each rank, whether it wrote a file: one whose cells no tensor has writes none.
        """
        assigned = self._assigned
        ranks = [rank for rank, wrote in enumerate(present) if wrote]
        number = {rank: i for i, rank in enumerate(ranks)}
        layouts = []
        for layout in assigned.layouts:
            files = {cell: tuple(number[r] for r in owners if r in number) for cell, owners in layout.items()}
            layouts.append({cell: found for cell, found in files.items() if found})
        builder = _Builder([rank_file(rank) for rank in ranks], layouts)
        kinds = [builder.kind(Kind(k.dtype_name, k.shape, k.chunk, k.layout)) for k in assigned.kinds]
        for name, kind in zip(self._held.names, assigned.kind_of.tolist(), strict=True):
            if kind >= 0:
                builder.regular[name] = kinds[kind]
        for name, boxes in assigned.odd.items():
            held = self._held.odd[name]
            found = {box: tuple(number[rank] for rank in owners) for box, owners in boxes.items()}
            builder.add_odd(name, held.dtype_name, held.shape, found)
        return builder.stored()


class _Builder:
    """Collects what is stored, and describes a listed tensor as regular where it is one after all."""

    def __init__(self, files: list[str], layouts: list[dict[Cell, tuple[int, ...]]]) -> None:
        self.files = files
        self.layouts = layouts
        self.regular: dict[str, int] = {}
        self.odd: dict[str, OddTensor] = {}
        self._kinds: dict[Kind, int] = {}
        self._whole = {layout[()]: i for i, layout in enumerate(layouts) if list(layout) == [()]}

    def kind(self, kind: Kind) -> int:
        """Number of a kind."""
        return self._kinds.setdefault(kind, len(self._kinds))

    def add_odd(
        self, name: str, dtype_name: str, shape: Extents, boxes: Mapping[Box, tuple[int, ...]]
    ) -> None:
        """Add a tensor by its boxes."""
        whole = Box.whole(shape)
        if list(boxes) == [whole] and whole.numel:
            files = boxes[whole]
            if files not in self._whole:
                self._whole[files] = len(self.layouts)
                self.layouts.append({(): files})
            self.regular[name] = self.kind(Kind(dtype_name, shape, shape, self._whole[files]))
            return
        listed = [OddBox(box, file) for box, files in sorted(boxes.items()) for file in files]
        self.odd[name] = OddTensor(dtype_name, shape, tuple(listed))

    def stored(self) -> Stored:
        """What was collected, in alphabetical order."""
        regular = {name: self.regular[name] for name in sorted(self.regular)}
        return Stored(self.files, self.layouts, list(self._kinds), regular, self.odd)


def make_plan(descriptions: Sequence[Description], mode: Mode) -> Plan:
    """Assign every box of every tensor to the rank or ranks that write it.

    Args:
        descriptions: One for each rank, in rank order; equal facts and cuts should be the same objects.
        mode: ``"deduped"`` stores each box once, spread by bytes over the ranks that have it;
            ``"sharded"`` lets every rank store all it has.

    Raises:
        CheckpointError: Ranks disagree about a tensor, its boxes do not cut it cleanly, or a tied name
            has no tensor.
    """
    held = merge(descriptions)
    names = {*held.names, *held.odd} if held.aliases else set()
    for alias, target in held.aliases.items():
        if target not in names or alias in names:
            raise CheckpointError(
                f"alias '{alias}' of '{target}': the target must be stored and the alias must not.",
                remedy="Map every tied name to the one name under which its tensor is given.",
            )
    assigned = assign_once(held, len(descriptions)) if mode == "deduped" else assign_all(held)
    return Plan(descriptions, held, assigned)


def select(
    description: Description, shards: Mapping[str, Shard], deal: Deal, own: Own
) -> tuple[list[StoredBox], list[Tensor]]:
    """What a rank stores, and the data of each box.

    Args:
        description: What it described.
        shards: What that described.
        deal: What all ranks were told.
        own: What it was told alone.
    """
    boxes: list[StoredBox] = []
    data: list[Tensor] = []
    kinds = np.frombuffer(deal.kinds[own.facts], "<i4").tolist()
    of_kind: dict[int, list[Box]] = {}
    for name, kind in zip(description.facts.names, kinds, strict=True):
        if kind < 0:
            continue
        shard = shards[name]
        if kind not in of_kind:
            chunk, layout = deal.cuts[kind]
            cells = [cell for cell in own.cells.get(layout, ()) if has_cell(shard.shape, chunk, cell)]
            of_kind[kind] = [cell_box(shard.shape, chunk, cell) for cell in cells]
        for box in of_kind[kind]:
            boxes.append(StoredBox(name, shard.shape, dtype_name(shard.dtype), box))
            data.append(_part(shard, box))
    odd = own.odd
    if odd is None:
        odd = [(item.name, box) for item in description.odd for box in item.boxes]
    for name, box in odd:
        shard = shards[name]
        boxes.append(StoredBox(name, shard.shape, dtype_name(shard.dtype), box))
        data.append(_part(shard, box))
    return boxes, data


def _part(shard: Shard, box: Box) -> Tensor:
    """A box of what this rank holds: one of its views, or a part of one."""
    for own, view in zip(shard.boxes, shard.data, strict=True):
        if own == box:
            return view
    own, view = next(
        (own, view) for own, view in zip(shard.boxes, shard.data, strict=True) if own.intersection(box) == box
    )
    return view[box.relative_to(own).slices]

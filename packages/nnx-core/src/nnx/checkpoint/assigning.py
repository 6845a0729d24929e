"""Who stores what: each box once, with the bytes spread evenly over the ranks that hold it.

Tensors of one kind are dealt out in turn to the ranks that hold the same cells, so that nothing is decided,
stored or sent for each tensor and rank. A tensor that everybody holds and that is larger than a rank's fair
share is cut, so that several ranks write it. This module only decides; it never communicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nnx.box import Box
from nnx.checkpoint.cells import Cell, Ints, cell_sizes, trimmed
from nnx.checkpoint.description import Extents
from nnx.checkpoint.dtypes import DTYPES
from nnx.checkpoint.merging import Held, HeldKind, OddHeld

__all__ = ["Assigned", "assign_all", "assign_once"]

_LEAST_PART = 1 << 20
"""Tensors are not cut into parts of fewer bytes."""
_TABLE = 1 << 22
"""Most entries of a table of sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """What is stored by whom.

    Attributes:
        kinds: Kinds as they are stored; `layout` numbers the layouts below.
        kind_of: For each name of the `Held` the number of its kind; -1 if it is odd.
        layouts: For each layout and cell the ranks that store it.
        odd: For each other tensor and box the ranks that store it.
    """

    kinds: Sequence[HeldKind]
    kind_of: Ints
    layouts: Sequence[Mapping[Cell, tuple[int, ...]]]
    odd: Mapping[str, Mapping[Box, tuple[int, ...]]]


def assign_all(held: Held) -> Assigned:
    """Every rank stores all it has."""
    return Assigned(
        kinds=held.kinds,
        kind_of=held.kind_of,
        layouts=[{cell: tuple(ranks) for cell, ranks in layout.items()} for layout in held.layouts],
        odd={
            name: {box: tuple(sorted(ranks)) for box, ranks in tensor.owners.items()}
            for name, tensor in held.odd.items()
        },
    )


def assign_once(held: Held, world_size: int) -> Assigned:
    """Every box is stored once."""
    dealer = _Dealer(held, world_size)
    dealer.take_fixed()
    replicated = dealer.cut_large(dealer.replicated())
    dealer.deal(replicated)
    odd = dealer.deal_odd()
    return Assigned(dealer.kinds, dealer.kind_of, dealer.layouts, odd)


class _Dealer:
    """Deals what several ranks hold; loads are the bytes that each rank stores so far."""

    def __init__(self, held: Held, world_size: int) -> None:
        self.held = held
        self.loads = np.zeros(world_size, np.int64)
        self.kinds: list[HeldKind] = []
        self.kind_of = np.full(len(held.names), -1, np.int64)
        self.layouts: list[dict[Cell, tuple[int, ...]]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        order = np.argsort(held.kind_of, kind="stable")
        starts = np.searchsorted(held.kind_of[order], np.arange(len(held.kinds) + 1))
        self._members = [order[a:b] for a, b in itertools.pairwise(starts.tolist())]
        self._replicas = [min(map(len, layout.values())) for layout in held.layouts]

    def replicated(self) -> list[int]:
        """The kinds that several ranks hold, those with the largest cells first."""
        kinds = self.held.kinds
        found = [i for i, kind in enumerate(kinds) if self._replicas[kind.layout] > 1]
        return sorted(found, key=lambda i: (-math.prod(kinds[i].chunk) * _itemsize(kinds[i]), i))

    # --- what only one rank has ---------------------------------------------------------------------

    def take_fixed(self) -> None:
        """Assign what only one rank can store."""
        for number, kind in enumerate(self.held.kinds):
            if self._replicas[kind.layout] == 1:
                self.kind_of[self._members[number]] = self._kind(kind, self._layout(kind.layout, 0))
        for number, layout in enumerate(self.held.layouts):
            if self._replicas[number] == 1:
                self._load_layout(number, list(layout), [ranks[0] for ranks in layout.values()])
        for tensor in self.held.odd.values():
            for box, ranks in tensor.owners.items():
                if len(ranks) == 1:
                    self.loads[ranks[0]] += box.numel * DTYPES[tensor.dtype_name].itemsize

    def _load_layout(self, number: int, cells: Sequence[Cell], ranks: list[int]) -> None:
        kinds = [i for i, kind in enumerate(self.held.kinds) if kind.layout == number]
        counts = np.array([len(self._members[i]) * _itemsize(self.held.kinds[i]) for i in kinds], np.int64)
        shapes = [self.held.kinds[i].shape for i in kinds]
        chunks = [self.held.kinds[i].chunk for i in kinds]
        step = max(1, _TABLE // max(1, len(kinds)))
        for first in range(0, len(cells), step):
            some = slice(first, first + step)
            np.add.at(self.loads, ranks[some], counts @ cell_sizes(shapes, chunks, cells[some]))

    # --- what is too large for one rank -------------------------------------------------------------

    def cut_large(self, numbers: Sequence[int]) -> list[int]:
        """Cut whole tensors that are more than a rank's fair share; the kinds that are left."""
        held = self.held
        total = sum(
            len(self._members[i]) * math.prod(kind.shape) * _itemsize(kind)
            for i, kind in enumerate(held.kinds)
        )
        fair = max(_LEAST_PART, -(-total // len(self.loads)))
        left = []
        for i in numbers:
            kind = held.kinds[i]
            size = math.prod(kind.shape) * _itemsize(kind)
            if size <= fair or list(held.layouts[kind.layout]) != [()] or kind.chunk != kind.shape:
                left.append(i)
                continue
            dim = next(d for d, extent in enumerate(kind.shape) if extent > 1)
            parts = min(self._replicas[kind.layout], kind.shape[dim], -(-size // fair))
            chunk = (*kind.shape[:dim], -(-kind.shape[dim] // parts), *kind.shape[dim + 1 :])
            for member in self._members[i].tolist():
                self.kind_of[member] = self._kind(kind, self._cut(kind, dim, chunk), chunk)
        return left

    def _cut(self, kind: HeldKind, dim: int, chunk: Extents) -> int:
        """Give the parts of one tensor to the ranks with the least to store; the new layout."""
        cells = [trimmed((*(0,) * dim, i)) for i in range(-(-kind.shape[dim] // chunk[dim]))]
        owners = np.array(self.held.layouts[kind.layout][()], np.int64)
        ranks = owners[np.argsort(self.loads[owners], kind="stable")[: len(cells)]]
        self.loads[ranks] += cell_sizes([kind.shape], [chunk], cells)[0] * _itemsize(kind)
        self.layouts.append({cell: (rank,) for cell, rank in zip(cells, ranks.tolist(), strict=True)})
        return len(self.layouts) - 1

    # --- everything else ----------------------------------------------------------------------------

    def deal(self, numbers: Sequence[int]) -> None:
        """Deal the tensors of each kind in turn to the rows of ranks that hold them."""
        for number in numbers:
            kind, members = self.held.kinds[number], self._members[number]
            layout, rows = self.held.layouts[kind.layout], self._replicas[kind.layout]
            ranks = np.array([owners[:rows] for owners in layout.values()], np.int64)
            start = _lightest(self.loads[ranks].max(axis=0), len(members) % rows)
            count = np.full(rows, len(members) // rows)
            count[(start + np.arange(len(members) % rows)) % rows] += 1
            nbytes = cell_sizes([kind.shape], [kind.chunk], list(layout))[0] * _itemsize(kind)
            np.add.at(self.loads, ranks, nbytes[:, None] * count)
            for row in range(rows):
                mine = members[(row - start) % rows :: rows]
                if len(mine):
                    self.kind_of[mine] = self._kind(kind, self._layout(kind.layout, row))

    def deal_odd(self) -> dict[str, dict[Box, tuple[int, ...]]]:
        """Give the largest boxes first, each to the rank with the least to store."""
        chosen: dict[str, dict[Box, tuple[int, ...]]] = {name: {} for name in self.held.odd}
        shared: list[tuple[int, str, Box, Sequence[int]]] = []
        for name, tensor in self.held.odd.items():
            for box, ranks in tensor.owners.items():
                if len(ranks) == 1:
                    chosen[name][box] = (ranks[0],)
                else:
                    shared.append((-_odd_bytes(tensor, box), name, box, ranks))
        for minus_bytes, name, box, owners in sorted(shared, key=lambda item: item[:3]):
            rank = min(owners, key=lambda r: (self.loads[r], r))
            self.loads[rank] -= minus_bytes
            chosen[name][box] = (rank,)
        return chosen

    def _layout(self, number: int, row: int) -> int:
        """The layout in which the row-th of the ranks that hold a cell stores it."""
        if (number, row) not in self._numbers:
            self._numbers[number, row] = len(self.layouts)
            layout = self.held.layouts[number]
            self.layouts.append({cell: (ranks[row],) for cell, ranks in layout.items()})
        return self._numbers[number, row]

    def _kind(self, kind: HeldKind, layout: int, chunk: Extents | None = None) -> int:
        self.kinds.append(HeldKind(kind.dtype_name, kind.shape, chunk or kind.chunk, layout))
        return len(self.kinds) - 1


def _lightest(loads: Ints, count: int) -> int:
    """Where a run of `count` neighbours begins, around the end, that has the least load."""
    if count == 0:
        return 0
    sums = np.concatenate([[0], np.cumsum(np.concatenate([loads, loads[:count]]))])
    return int(np.argmin(sums[count : count + len(loads)] - sums[: len(loads)]))


def _itemsize(kind: HeldKind) -> int:
    return DTYPES[kind.dtype_name].itemsize


def _odd_bytes(tensor: OddHeld, box: Box) -> int:
    return box.numel * DTYPES[tensor.dtype_name].itemsize

"""The plan of a save: from what all ranks hold to what each of them stores.

The coordinator makes the plan from all descriptions: it puts together what the ranks hold, assigns each box,
and works out what lies in which file. What a rank must know of it is short: which cells of which layouts are
its own. Together with the number of each tensor's kind, which is the same message for all, the rank finds out
itself what it stores. This module never communicates and never touches files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from nnx_checkpoint.box import Box, find_fault
from nnx_checkpoint.cells import (
    Cell,
    Ints,
    Kind,
    OddBox,
    OddTensor,
    Stored,
    cell_box,
    cell_sizes,
    find_fault_of_grid,
    has_cell,
    table,
    trimmed,
)
from nnx_checkpoint.description import Cuts, Description, Extents, Facts, dtype_name
from nnx_checkpoint.dtypes import DTYPES
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.manifest import rank_file
from nnx_checkpoint.rankfile import StoredBox
from nnx_checkpoint.shard import Shard

__all__ = ["Deal", "Mode", "Own", "Plan", "make_plan", "select"]


# --- what all ranks hold together -----------------------------------------------------------------
# Ranks whose facts and cuts are alike are treated as one group, and tensors that every group cuts alike as
# one kind. So the work grows with tensors, with ranks and with the number of distinct ways to cut, but not
# with their product. What does not fit is spelled out box by box. The checks that need all ranks are made
# here: dtypes and shapes agree, boxes cover each tensor without gap or overlap.


Owners = Mapping[Cell, Sequence[int]]


@dataclass(frozen=True, slots=True)
class HeldKind:
    """Tensors that all ranks cut alike.

    Attributes:
        dtype_name: Their element type.
        shape: Their shape.
        chunk: The chunk by which they are cut.
        layout: Number of the layout that says which ranks hold which cells.
    """

    dtype_name: str
    shape: Extents
    chunk: Extents
    layout: int


@dataclass(frozen=True, slots=True)
class OddHeld:
    """A tensor that is not cut regularly, and the ranks that hold each of its boxes."""

    dtype_name: str
    shape: Extents
    owners: dict[Box, list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What all ranks hold.

    Attributes:
        names: All tensors that some facts name.
        kinds: The {n} by number.
        kind_of: The number of the kind of each name; -1 if it is odd.
        layouts: The ranks that hold each cell, by layout.
        odd: Everything else.
        facts: All distinct facts.
        place: The positions of the names of each of those facts among all names.
        aliases: The aliases of all ranks.
    """

    names: Sequence[str]
    kinds: Sequence[HeldKind]
    kind_of: Ints
    layouts: Sequence[Owners]
    odd: Mapping[str, OddHeld]
    facts: Sequence[Facts]
    place: Sequence[Ints]
    aliases: Mapping[str, str]


def merge(descriptions: Sequence[Description]) -> Held:
    """Put descriptions together.

    Args:
        descriptions: One for each rank, in rank order.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or its boxes do not cut it cleanly.
    """
    merger = _Merger(descriptions)
    merger.name_tensors()
    merger.find_kinds()
    merger.spell_out()
    merger.check_cover()
    merger.join_layouts()
    return merger.held()


@dataclass(eq=False)
class _Group:
    """Ranks whose facts and cuts are alike."""

    facts: int
    cuts: Cuts
    ranks: list[int] = field(default_factory=list)


class _Merger:
    def __init__(self, descriptions: Sequence[Description]) -> None:
        self.descriptions = descriptions
        self.facts: list[Facts] = []
        self.first_rank: list[int] = []
        self.groups: list[_Group] = []
        facts: dict[int, int] = {}
        groups: dict[tuple[int, int], _Group] = {}
        for rank, one in enumerate(descriptions):
            if id(one.facts) not in facts:
                facts[id(one.facts)] = len(self.facts)
                self.facts.append(one.facts)
                self.first_rank.append(rank)
            key = (id(one.facts), id(one.cuts))
            if key not in groups:
                groups[key] = _Group(facts[id(one.facts)], one.cuts)
            groups[key].ranks.append(rank)
        self.groups = list(groups.values())
        self.odd: dict[str, OddHeld] = {}

    # --- names ------------------------------------------------------------------------------------

    def name_tensors(self) -> None:
        """Number all tensors and their types; ranks must agree about those."""
        known: dict[tuple[str, Extents], int] = {}
        numbers: dict[str, int] = {}
        declared: list[tuple[int, int]] = []  # type and facts
        self.place = []
        for number, facts in enumerate(self.facts):
            types = [known.setdefault(kind, len(known)) for kind in facts.types]
            place = np.empty(len(facts.names), np.int64)
            for i, (name, kind) in enumerate(zip(facts.names, facts.kinds, strict=True)):
                place[i] = at = numbers.setdefault(name, len(numbers))
                if at == len(declared):
                    declared.append((types[kind], number))
                elif declared[at][0] != types[kind]:
                    first, ranks = declared[at], self.first_rank
                    raise _disagree(
                        name, list(known)[first[0]], ranks[first[1]], facts.types[kind], ranks[number]
                    )
            self.place.append(place)
        self.types, self.numbers, self.names = list(known), numbers, list(numbers)
        self.type_of = np.array([kind for kind, _ in declared], np.int64)
        self._add_odd({i: self.first_rank[number] for i, (_, number) in enumerate(declared)})

    def _add_odd(self, first_rank: Mapping[int, int]) -> None:
        first: dict[str, tuple[tuple[str, Extents], int]] = {}
        for rank, one in enumerate(self.descriptions):
            for odd in one.odd:
                found = (odd.dtype_name, odd.shape)
                if odd.name not in first:
                    at = self.numbers.get(odd.name)
                    named = (found, rank) if at is None else (self.types[self.type_of[at]], first_rank[at])
                    first[odd.name] = named
                if first[odd.name][0] != found:
                    raise _disagree(odd.name, *first[odd.name], found, rank)
                held = self.odd.setdefault(odd.name, OddHeld(odd.dtype_name, odd.shape, {}))
                for box in odd.boxes:
                    _own(held, box, rank)

    # --- kinds ------------------------------------------------------------------------------------

    def find_kinds(self) -> None:
        """Find tensors of one type that each group cuts alike."""
        code, local = self.type_of, self._local_places()
        for group in self.groups:
            cuts = _at(np.array(group.cuts.kinds, np.int64), local[group.facts])
            code = np.unique(code * (len(group.cuts.cuts) + 1) + cuts + 1, return_inverse=True)[1]
        _, first, self.kind_of = np.unique(code, return_index=True, return_inverse=True)
        self.cuts_of_kind: list[list[tuple[Extents, int] | None]] = [[] for _ in first]
        for group in self.groups:
            chosen = _at(np.array(group.cuts.kinds, np.int64), local[group.facts][first])
            for kind, cut in enumerate(chosen.tolist()):
                self.cuts_of_kind[kind].append(group.cuts.cuts[cut] if cut >= 0 else None)
        self.type_of_kind = [self.types[i] for i in self.type_of[first].tolist()]

    def _local_places(self) -> list[Ints]:
        """For each facts and each tensor, where the facts name it; -1 if they do not."""
        local = []
        for place in self.place:
            inverse = np.full(len(self.names), -1, np.int64)
            inverse[place] = np.arange(len(place))
            local.append(inverse)
        return local

    def spell_out(self) -> None:
        """Make odd what is odd on some rank, and what nobody or not everybody cuts into the same chunks."""
        irregular = np.array([len({cut[0] for cut in cuts if cut}) != 1 for cuts in self.cuts_of_kind], bool)
        odd = irregular[self.kind_of] if len(self.kind_of) else np.zeros(0, bool)
        odd[[self.numbers[name] for name in self.odd if name in self.numbers]] = True
        for i in np.flatnonzero(odd).tolist():
            self._spell_out(self.names[i], int(self.kind_of[i]))
        self.kind_of = np.where(odd, -1, self.kind_of)

    def _spell_out(self, name: str, kind: int) -> None:
        dtype, shape = self.type_of_kind[kind]
        held = self.odd.setdefault(name, OddHeld(dtype, shape, {}))
        for group, cut in zip(self.groups, self.cuts_of_kind[kind], strict=True):
            for rank in group.ranks if cut else ():
                _own(held, self._box(shape, cut, rank), rank)

    def _box(self, shape: Extents, cut: tuple[Extents, int] | None, rank: int) -> Box:
        assert cut is not None
        return cell_box(shape, cut[0], self.descriptions[rank].cells[cut[1]])

    # --- layouts ----------------------------------------------------------------------------------

    def check_cover(self) -> None:
        """Find out who holds which cells, and make sure that nothing of a tensor lacks or overlaps."""
        numbers: dict[tuple[int, ...], int] = {}
        self.layouts: list[dict[Cell, list[int]]] = []
        tables: list[Ints] = []
        self.kinds: dict[int, HeldKind] = {}
        for kind in np.unique(self.kind_of[self.kind_of >= 0]).tolist():
            cuts = self.cuts_of_kind[kind]
            labels = tuple(-1 if cut is None else cut[1] for cut in cuts)
            number = numbers.setdefault(labels, len(numbers))
            if number == len(self.layouts):
                self.layouts.append(self._layout(labels))
                tables.append(table(self.layouts[-1]))
            (chunk,) = {cut[0] for cut in cuts if cut}
            dtype, shape = self.type_of_kind[kind]
            self.kinds[kind] = HeldKind(dtype, shape, chunk, number)
            if find_fault_of_grid(shape, chunk, tables[number]):
                boxes = [cell_box(shape, chunk, cell) for cell in self.layouts[number]]
                raise _uncovered(self._first_name(kind), shape, find_fault(shape, boxes))
        for name, held in self.odd.items():
            fault = find_fault(held.shape, held.owners)
            if fault:
                raise _uncovered(name, held.shape, fault)

    def _layout(self, labels: Sequence[int]) -> dict[Cell, list[int]]:
        layout: dict[Cell, list[int]] = {}
        for group, label in zip(self.groups, labels, strict=True):
            for rank in group.ranks if label >= 0 else ():
                layout.setdefault(self.descriptions[rank].cells[label], []).append(rank)
        return {cell: sorted(layout[cell]) for cell in sorted(layout)}

    def _first_name(self, kind: int) -> str:
        return min(self.names[i] for i in np.flatnonzero(self.kind_of == kind).tolist())

    def join_layouts(self) -> None:
        """Let tensors with few rows, of which the last ranks hold nothing, share the others' layout."""
        shapes = {kind.layout: kind for kind in self.kinds.values()}
        known: list[int] = []
        into: dict[int, int] = {}
        for number in sorted(range(len(self.layouts)), key=lambda i: -len(self.layouts[i])):
            found = next((other for other in known if self._extends(other, number, shapes[number])), None)
            into[number] = number if found is None else found
            if found is None:
                known.append(number)
        self.kinds = {
            i: HeldKind(kind.dtype_name, kind.shape, kind.chunk, into[kind.layout])
            for i, kind in self.kinds.items()
        }

    def _extends(self, larger: int, smaller: int, kind: HeldKind) -> bool:
        layout, part = self.layouts[larger], self.layouts[smaller]
        return all(layout.get(cell) == ranks for cell, ranks in part.items()) and len(part) == sum(
            has_cell(kind.shape, kind.chunk, cell) for cell in layout
        )

    def held(self) -> Held:
        """The result, with kinds and layouts numbered without gaps."""
        kinds, used = list(self.kinds), sorted({kind.layout for kind in self.kinds.values()})
        renumber = np.full(len(self.cuts_of_kind) + 1, -1, np.int64)
        renumber[kinds] = np.arange(len(kinds))
        at = {number: i for i, number in enumerate(used)}
        aliases: dict[str, str] = {}
        for facts in self.facts:
            aliases |= facts.aliases
        return Held(
            names=self.names,
            kinds=[
                HeldKind(kind.dtype_name, kind.shape, kind.chunk, at[kind.layout])
                for kind in self.kinds.values()
            ],
            kind_of=renumber[self.kind_of],
            layouts=[self.layouts[number] for number in used],
            odd=self.odd,
            facts=self.facts,
            place=self.place,
            aliases=aliases,
        )


def _at(values: Ints, places: Ints) -> Ints:
    """Values at places; -1 where the place is."""
    return np.append(values, -1)[places]


def _own(held: OddHeld, box: Box, rank: int) -> None:
    """Note a rank's box, unless it has no elements; of an empty tensor there is one such box."""
    if box.numel or box == Box.whole(held.shape):
        ranks = held.owners.setdefault(box, [])
        if rank not in ranks[-1:]:
            ranks.append(rank)


def _disagree(
    name: str, one: tuple[str, Extents], rank: int, other: tuple[str, Extents], other_rank: int
) -> CheckpointError:
    return CheckpointError(
        f"ranks disagree about tensor '{name}': {one[0]} {one[1]} on rank {rank}, "
        f"{other[0]} {other[1]} on rank {other_rank}.",
        remedy="Give every rank the same global shape and dtype, or distinct names.",
    )


def _uncovered(name: str, shape: Extents, fault: str) -> CheckpointError:
    return CheckpointError(
        f"the shards of tensor '{name}' do not make up its shape {shape}: {fault}.",
        remedy="This is a bug of the strategy that described them; please report it.",
    )


# --- who stores what ------------------------------------------------------------------------------
# Each box is stored once, with the bytes spread evenly over the ranks that hold it. Tensors of one kind are
# dealt out in turn to the ranks that hold the same cells, so that nothing is decided, stored or sent for
# each tensor and rank. A tensor that everybody holds and that is larger than a rank's fair share is cut, so
# that several ranks write it.


_LEAST_PART = 1 << 20
"""Tensors are not cut into parts of fewer bytes."""
_TABLE = 1 << 22
"""Most entries of a table of sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """What is stored by whom.

    Attributes:
        kinds: Kinds as they are stored; `layout` numbers the layouts below.
        kind_of: The number of the kind of each name of the `Held`; -1 if it is odd.
        layouts: The ranks that store each cell, by layout.
        odd: The ranks that store each box of every other tensor.
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


# --- the plan -------------------------------------------------------------------------------------


Mode = Literal["sharded", "deduped"]


@dataclass(frozen=True, slots=True)
class Deal:
    """What every rank is told alike.

    Attributes:
        kinds: The kind of each name for all distinct facts, as little-endian 32-bit numbers; -1 where
            the tensor is odd.
        cuts: The chunk and the layout of each kind.
    """

    kinds: Sequence[bytes]
    cuts: Sequence[tuple[Extents, int]]


@dataclass(frozen=True, slots=True)
class Own:
    """What one rank is told.

    Attributes:
        facts: Number of its facts.
        cells: The cells that it stores, by layout.
        odd: The odd boxes that it stores; None stands for all those that it described, and no others.
    """

    facts: int
    cells: Mapping[int, Sequence[Cell]]
    odd: Sequence[tuple[str, Box]] | None


class Plan:
    """What is stored by whom.

    Args:
        descriptions: One for each rank, in rank order.
        held: The tensors that they hold together.
        assigned: The assignment of boxes to ranks.
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
            present: True for each rank that wrote a file: one whose cells no tensor has writes none.
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
        description: The description that it sent.
        shards: The shards that were described.
        deal: The part of the plan that all ranks get.
        own: The part of the plan that it alone gets.
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

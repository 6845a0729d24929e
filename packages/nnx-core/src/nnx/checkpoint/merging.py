"""What all ranks hold together, put together from their descriptions and checked.

Ranks whose facts and cuts are alike are treated as one group, and tensors that every group cuts alike as
one kind. So the work grows with tensors, with ranks and with the number of distinct ways to cut, but not
with their product. What does not fit is spelled out box by box. This module owns the checks that need all
ranks: dtypes and shapes agree, boxes cover each tensor without gap or overlap. It never communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nnx.box import Box, find_fault
from nnx.checkpoint.cells import Cell, Ints, cell_box, find_fault_of_grid, has_cell, table
from nnx.checkpoint.description import Cuts, Description, Extents, Facts
from nnx.errors import CheckpointError

__all__ = ["Held", "HeldKind", "OddHeld", "merge"]

Owners = Mapping[Cell, Sequence[int]]


@dataclass(frozen=True, slots=True)
class HeldKind:
    """Tensors that all ranks cut alike.

    Attributes:
        dtype_name: Their element type.
        shape: Their shape.
        chunk: How they are cut.
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
        kinds: By number.
        kind_of: For each name the number of its kind; -1 if it is odd.
        layouts: For each layout and cell the ranks that hold it.
        odd: Everything else.
        facts: All distinct facts.
        place: For each of those facts, where its names stand among all names.
        aliases: Of all ranks.
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

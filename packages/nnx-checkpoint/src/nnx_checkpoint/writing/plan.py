"""Plan a save: assign each box of each tensor to the rank that writes it.

Every rank sends a short description of its shards. The coordinator merges the descriptions, checks that boxes
cover every tensor, and assigns each box to ranks. Each rank gets two short messages: the number of each
tensor's group, equal for all ranks, and its own boxes of each group. Nothing here touches files or
communicates, except `gather_descriptions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nnx_base.box import Box
from nnx_base.dtypes import dtype_name
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard
from nnx_checkpoint.format.index import Group, Index
from nnx_checkpoint.format.manifest import rank_file
from nnx_checkpoint.format.rankfile_header import Entry
from nnx_checkpoint.writing.description import Catalog, Description, Exceptions, Extents

__all__ = [
    "Mode",
    "Plan",
    "RankPlan",
    "make_plan",
    "select",
]


Mode = Literal["sharded", "deduped"]
Numbers = npt.NDArray[np.int64]
_Known = tuple[tuple[int, int], ...]
_Held = list[tuple[int, tuple[Box, ...]]]
_Holders = dict[tuple[int, int], dict[int, _Held]]
Members = tuple[Group, Numbers]
"""A group, whose owners are ranks, and the numbers of its tensors."""


# Ranks with equal catalogs and exceptions form a family: they partition the same tensors in the same way,
# each rank into its own boxes. Tensors that no family distinguishes form one group. So the work grows with
# the number of tensors, of ranks and of bytes sent, but not with tensors times ranks.


@dataclass(eq=False)
class _Family:
    """Ranks with equal catalogs and exceptions, and the boxes of each rank."""

    catalog: int
    exceptions: Exceptions
    boxes: list[tuple[int, Sequence[tuple[Box, ...]]]] = field(default_factory=list)


class _Merger:
    """Merges the descriptions of all ranks.

    Attributes:
        catalogs: All distinct catalogs.
        numbers: A number for each tensor.
        places: The numbers of the tensors of each catalog.
    """

    def __init__(self, descriptions: Sequence[Sequence[Description]]) -> None:
        self.catalogs: list[Catalog] = []
        self.numbers: dict[str, int] = {}
        self.places: list[Numbers] = []
        self.aliases: dict[str, str] = {}
        self._first_rank: list[int] = []
        self._types: dict[tuple[str, Extents], int] = {}
        self._type_of: list[int] = []
        self._first_catalog: list[int] = []
        catalogs: dict[int, int] = {}
        families: dict[tuple[int, int], _Family] = {}
        for rank, of_rank in enumerate(descriptions):
            for one in of_rank:
                if id(one.catalog) not in catalogs:
                    catalogs[id(one.catalog)] = len(self.catalogs)
                    self.catalogs.append(one.catalog)
                    self._first_rank.append(rank)
                key = (id(one.catalog), id(one.exceptions))
                if key not in families:
                    families[key] = _Family(catalogs[id(one.catalog)], one.exceptions)
                families[key].boxes.append((rank, one.boxes))
        self._families = list(families.values())
        self._catalogs = catalogs
        for catalog in self.catalogs:
            self.aliases |= catalog.aliases

    def catalog_of(self, one: Description) -> int:
        """Return the number of a description's catalog."""
        return self._catalogs[id(one.catalog)]

    def groups(self) -> list[Members]:
        """Return all groups.

        Raises:
            CheckpointError: Ranks disagree about a tensor, or its boxes do not partition it.
        """
        self._number_tensors()
        alike: dict[int, list[int]] = {}
        classes, trace = self._classify_tensors()
        for number, class_ in enumerate(classes):
            alike.setdefault(class_, []).append(number)
        names, types, holders = list(self.numbers), list(self._types), self._usual_holders()
        groups: list[Members] = []
        for class_, members in alike.items():
            kind, known = trace(class_)
            owners = self._owners(kind, known, holders)
            group = Group.of(*types[kind], owners, min(names[i] for i in members))
            groups.append((group, np.array(members, np.int64)))
        return groups

    def _number_tensors(self) -> None:
        """Number all tensors and their types (ranks must agree on the type of a tensor)."""
        for number, catalog in enumerate(self.catalogs):
            types = [self._types.setdefault(kind, len(self._types)) for kind in catalog.types]
            place: list[int] = []
            for name, kind in zip(catalog.names, catalog.type_of, strict=True):
                at = self.numbers.setdefault(name, len(self.numbers))
                place.append(at)
                if at == len(self._type_of):
                    self._type_of.append(types[kind])
                    self._first_catalog.append(number)
                elif self._type_of[at] != types[kind]:
                    raise self._disagreement(name, at, catalog.types[kind], number)
            self.places.append(np.array(place, np.int64))

    def _disagreement(self, name: str, at: int, other: tuple[str, Extents], catalog: int) -> CheckpointError:
        one, first = list(self._types)[self._type_of[at]], self._first_rank[self._first_catalog[at]]
        return CheckpointError(
            f"ranks disagree about tensor '{name}': {one[0]} {one[1]} on rank {first}, "
            f"{other[0]} {other[1]} on rank {self._first_rank[catalog]}.",
            remedy="Give every rank the same global shape and dtype, or distinct names.",
        )

    def _classify_tensors(self) -> tuple[list[int], Callable[[int], tuple[int, _Known]]]:
        """Give equal numbers to tensors of one type that no catalog and no family's exceptions distinguish.

        Returns:
            The number of each tensor; and a function from such a number to the type, the catalogs that have
            the tensors, as (catalog, -1), and their exceptions, as (family, number).
        """
        classes = list(self._type_of)
        steps: dict[tuple[int, int, int], int] = {}  # (number before, catalog or exception) -> number after
        base = len(self._types)

        def refine(members: Numbers, reason: tuple[int, int]) -> None:
            for at in members.tolist():
                classes[at] = steps.setdefault((classes[at], *reason), base + len(steps))

        for number, place in enumerate(self.places):
            refine(place, (number, -1))
        for number, family in enumerate(self._families):
            for which, (_, members) in enumerate(family.exceptions):
                refine(self.places[family.catalog][members], (number, which))
        back = list(steps)

        def trace(class_: int) -> tuple[int, _Known]:
            found: list[tuple[int, int]] = []
            while class_ >= base:
                class_, *reason = back[class_ - base]
                found.append((reason[0], reason[1]))
            return class_, tuple(found)

        return classes, trace

    def _usual_holders(self) -> _Holders:
        """Return for each catalog and type the ranks, by family, that hold boxes of most of its tensors."""
        found: _Holders = {}
        for number, family in enumerate(self._families):
            for local, named in enumerate(self.catalogs[family.catalog].types):
                held = [(rank, boxes[local]) for rank, boxes in family.boxes if boxes[local]]
                if held:
                    found.setdefault((family.catalog, self._types[named]), {})[number] = held
        return found

    def _owners(self, kind: int, known: _Known, holders: _Holders) -> dict[Box, list[int]]:
        """Return the ranks that hold each box of the tensors of a group."""
        shape = list(self._types)[kind][1]
        exceptions = {family: which for family, which in known if which >= 0}
        held = [self._held_as_exception(family, which) for family, which in exceptions.items()]
        for catalog, which in known:
            for family, usual in holders.get((catalog, kind), {}).items() if which < 0 else ():
                if family not in exceptions:
                    held.append(usual)
        owners: dict[Box, list[int]] = {}
        for rank, boxes in (one for some in held for one in some):
            for box in boxes:
                if box.numel or box.size == shape:  # an empty tensor has one empty box
                    owners.setdefault(box, []).append(rank)
        return {box: sorted(ranks) for box, ranks in owners.items()}

    def _held_as_exception(self, family: int, which: int) -> _Held:
        one = self._families[family]
        number = len(self.catalogs[one.catalog].types) + which
        return [(rank, boxes[number]) for rank, boxes in one.boxes]


# Each box is stored once, by one of the ranks that hold it, so that ranks write equal numbers of bytes.
# Tensors of a group, and boxes of a tensor, go to ranks round-robin: a decision for each tensor and rank
# would cost tensors times ranks. A replicated tensor above a rank's fair share is split over several ranks.


_MIN_SLICE_NBYTES = 1 << 20
"""The fewest bytes of a slice of a split tensor."""


def _balance(held: Sequence[Members], world_size: int) -> list[Members]:
    """Assign each box to one of the ranks that hold it."""
    loads = np.zeros(world_size, np.int64)
    total = sum(len(members) * sum(group.nbytes) for group, members in held)
    fair = max(_MIN_SLICE_NBYTES, -(-total // world_size))
    found: list[Members] = []
    shared: list[Members] = []
    for group, members in held:
        if max(map(len, group.owners), default=1) > 1:
            shared.append((group, members))
            continue
        found.append((group, members))
        for (rank,), nbytes in zip(group.owners, group.nbytes, strict=True):
            loads[rank] += nbytes * len(members)
    shared.sort(key=lambda one: -max(one[0].nbytes))
    for group, members in shared:
        large = len(group.owners) == 1 and group.nbytes[0] > fair
        found += _split(group, members, fair, loads) if large else _assign_round_robin(group, members, loads)
    return found


def _split(group: Group, members: Numbers, fair: int, loads: Numbers) -> Iterator[Members]:
    """Split replicated tensors, and assign the slices to the ranks with the fewest bytes."""
    owners = np.array(group.owners[0], np.int64)
    dim = next(d for d, extent in enumerate(group.shape) if extent > 1)
    extent = group.shape[dim]
    parts = min(len(owners), extent, -(-group.nbytes[0] // fair))
    grid = (*group.shape[:dim], -(-extent // parts), *group.shape[dim + 1 :])
    for member in members:
        count = -(-extent // grid[dim])
        ranks = owners[np.argsort(loads[owners], kind="stable")[:count]]
        part = Group(group.dtype_name, group.shape, [(rank,) for rank in ranks.tolist()], grid)
        loads[ranks] += part.nbytes
        yield part, np.array([member])


def _assign_round_robin(group: Group, members: Numbers, loads: Numbers) -> Iterator[Members]:
    """Assign the tensors of a group round-robin to rows of ranks; one row together holds all boxes."""
    rows = max(map(len, group.owners))
    ranks = np.array(
        [[held[(row + box) % len(held)] for row in range(rows)] for box, held in enumerate(group.owners)],
        np.int64,
    )
    whole, rest = divmod(len(members), rows)
    start = _lightest(loads[ranks].max(axis=0), rest)
    count = np.full(rows, whole)
    count[(start + np.arange(rest)) % rows] += 1
    np.add.at(loads, ranks, np.array(group.nbytes, np.int64)[:, None] * count)
    for first in range(min(rows, len(members))):
        row = ranks[:, (start + first) % rows].tolist()
        owners = [(rank,) for rank in row]
        yield Group(group.dtype_name, group.shape, owners, group.grid, group.listed), members[first::rows]


def _lightest(loads: Numbers, count: int) -> int:
    """Return the start of the `count` consecutive entries with the least load (cyclic)."""
    if count == 0:
        return 0
    sums = np.concatenate([[0], np.cumsum(np.concatenate([loads, loads[:count]]))])
    return int(np.argmin(sums[count : count + len(loads)] - sums[: len(loads)]))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan of one rank.

    Attributes:
        save_id: The id of the save.
        groups: For each of the rank's descriptions, the groups of its tensors: the number of an item of the
            broadcast, or the content of such an item.
        boxes: The boxes of each group that the rank stores.
    """

    save_id: str
    groups: Sequence[int | bytes]
    boxes: Mapping[int, Sequence[Box]]


class Plan:
    """The ranks that store each box.

    Attributes:
        broadcast: The items that all ranks get: the group of each tensor, as little-endian 32-bit numbers,
            for each catalog of several ranks.
    """

    def __init__(
        self, descriptions: Sequence[Sequence[Description]], merger: _Merger, groups: Sequence[Members]
    ) -> None:
        self._groups = groups
        self._names = list(merger.numbers)
        self._aliases = merger.aliases
        self._catalogs = [[merger.catalog_of(one) for one in of_rank] for of_rank in descriptions]
        self._group_of = np.full(len(self._names), -1, np.int64)
        for number, (_, members) in enumerate(groups):
            self._group_of[members] = number
        self._numbers = [self._group_of[place].astype("<i4").tobytes() for place in merger.places]
        ranks = Counter(catalog for of_rank in self._catalogs for catalog in of_rank)
        self._shared = {catalog: i for i, catalog in enumerate(c for c, count in ranks.items() if count > 1)}
        self.broadcast = [self._numbers[catalog] for catalog in self._shared]

    def rank_plans(self, save_id: str) -> list[RankPlan]:
        """Return the plan of each rank."""
        boxes: list[dict[int, list[Box]]] = [{} for _ in self._catalogs]
        for number, (group, _) in enumerate(self._groups):
            for box, ranks in zip(group.boxes, group.owners, strict=True):
                for rank in ranks:
                    boxes[rank].setdefault(number, []).append(box)
        return [
            RankPlan(save_id, [self._shared.get(one, self._numbers[one]) for one in catalogs], own)
            for catalogs, own in zip(self._catalogs, boxes, strict=True)
        ]

    def nbytes(self) -> list[int]:
        """Return the bytes of tensor data that each rank stores."""
        found = [0] * len(self._catalogs)
        for group, members in self._groups:
            for nbytes, ranks in zip(group.nbytes, group.owners, strict=True):
                for rank in ranks:
                    found[rank] += nbytes * len(members)
        return found

    def index(self) -> Index:
        """Return the index of the save."""
        ranks = sorted({rank for group, _ in self._groups for held in group.owners for rank in held})
        file = {rank: i for i, rank in enumerate(ranks)}
        groups = []
        for group, _ in self._groups:
            owners = [tuple([file[rank] for rank in held]) for held in group.owners]
            groups.append(Group(group.dtype_name, group.shape, owners, group.grid, group.listed))
        numbers = dict(zip(self._names, self._group_of.tolist(), strict=True))
        return Index([rank_file(rank) for rank in ranks], groups, numbers, self._aliases)


def make_plan(descriptions: Sequence[Sequence[Description]], mode: Mode) -> Plan:
    """Assign every box of every tensor to the rank or ranks that write it.

    Args:
        descriptions: The descriptions of each rank, in rank order; equal catalogs should be one object, and
            equal exceptions too.
        mode: ``"deduped"`` stores each box once, spread by bytes over the ranks that have it;
            ``"sharded"`` makes every rank store its complete local state.

    Raises:
        CheckpointError: Ranks disagree about a tensor, its boxes do not partition it, or a tied name
            has no tensor.
    """
    merger = _Merger(descriptions)
    groups = merger.groups()
    for alias, target in merger.aliases.items():
        if target not in merger.numbers or alias in merger.numbers:
            raise CheckpointError(
                f"alias '{alias}' of '{target}': the target must be stored and the alias must not.",
                remedy="Map every tied name to the one name under which its tensor is given.",
            )
    return Plan(descriptions, merger, _balance(groups, len(descriptions)) if mode == "deduped" else groups)


def select(
    descriptions: Sequence[Description],
    shards: Mapping[str, Shard],
    broadcast: Sequence[bytes],
    plan: RankPlan,
) -> tuple[list[Entry], list[Tensor]]:
    """Return the entries that this rank stores, and the data of each.

    Args:
        descriptions: The descriptions that this rank sent.
        shards: The described shards.
        broadcast: The items of the plan that all ranks get.
        plan: The plan of this rank.
    """
    entries: list[Entry] = []
    data: list[Tensor] = []
    for one, groups in zip(descriptions, plan.groups, strict=True):
        numbers = np.frombuffer(groups if isinstance(groups, bytes) else broadcast[groups], "<i4").tolist()
        for name, number in zip(one.catalog.names, numbers, strict=True):
            shard, wanted = shards[name], plan.boxes.get(number, ())
            views = dict(zip(shard.boxes, shard.data, strict=True)) if wanted else {}
            for box in wanted:
                entries.append(Entry(name, shard.shape, dtype_name(shard.dtype), box))
                view = views.get(box)
                data.append(_part(shard, box) if view is None else view)
    return entries, data


def _part(shard: Shard, box: Box) -> Tensor:
    """Return the data of a box that lies inside one of this rank's boxes."""
    own, view = next(
        (own, view) for own, view in zip(shard.boxes, shard.data, strict=True) if own.intersection(box) == box
    )
    return view[box.relative_to(own).slices]

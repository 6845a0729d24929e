"""What a rank holds, described so that little of it has to travel, and collected on the coordinator.

Nearly everything that ranks could say about their shards is the same on many of them. So a description has
parts that are sent by digest, and in full by one rank only:

- `Facts`: names, dtypes and shapes; usually the same on all ranks;
- `Cuts`: which tensors are cut alike, and into what chunks; the same on ranks that hold cells of the same
  tensors;
- the cells, a few numbers, which differ from rank to rank;
- odd boxes: what is not cut regularly, spelled out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from nnx_checkpoint.box import Box
from nnx_checkpoint.cells import Cell, guess, habits, seats
from nnx_checkpoint.dtypes import DTYPES
from nnx_checkpoint.errors import CheckpointError
from nnx_checkpoint.rounds import deliver, exchange
from nnx_checkpoint.shard import Shard

__all__ = [
    "Cuts",
    "Description",
    "Extents",
    "Facts",
    "Head",
    "describe",
    "dtype_name",
    "gather_descriptions",
    "pack",
    "requests",
    "unpack",
]

_INLINE = 512
"""Parts up to so many bytes travel with the head: asking for them would cost more."""

Extents = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Facts:
    """What is true of tensors on whatever rank.

    Attributes:
        names: The names in order.
        kinds: The number of the dtype and shape of each name.
        types: The dtypes and shapes that these numbers mean.
        aliases: Tied names and the names under which they are stored.
    """

    names: Sequence[str]
    kinds: Sequence[int]
    types: Sequence[tuple[str, Extents]]
    aliases: Mapping[str, str]

    @cached_property
    def raw(self) -> bytes:
        """The form that is sent; equal facts have equal bytes."""
        return _json([self.names, self.kinds, self.types, sorted(self.aliases.items())])

    @classmethod
    def parse(cls, raw: bytes) -> Facts:
        """The opposite of `raw`."""
        names, kinds, types, aliases = json.loads(raw)
        return cls(names, kinds, [(dtype, tuple(shape)) for dtype, shape in types], dict(aliases))


@dataclass(frozen=True, eq=False)
class Cuts:
    """How tensors are cut, in the order of the names of some `Facts`.

    Attributes:
        kinds: The number of the cut of each name.
        cuts: Each cut as the chunk and the number of the rank's cell; None where the rank holds nothing, or
            nothing regular.
    """

    kinds: Sequence[int]
    cuts: Sequence[tuple[Extents, int] | None]

    @cached_property
    def raw(self) -> bytes:
        """The form that is sent; equal cuts have equal bytes."""
        return _json([self.kinds, self.cuts])

    @classmethod
    def parse(cls, raw: bytes) -> Cuts:
        """The opposite of `raw`."""
        kinds, cuts = json.loads(raw)
        return cls(kinds, [None if cut is None else (tuple(cut[0]), cut[1]) for cut in cuts])


@dataclass(frozen=True, slots=True)
class Odd:
    """Boxes of one tensor, spelled out."""

    name: str
    dtype_name: str
    shape: Extents
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """One rank's shards.

    Attributes:
        facts: The facts that all ranks should agree on.
        cuts: Describes how the tensors are cut.
        cells: This rank's cells, by the numbers that `cuts` uses.
        odd: The tensors that are not regular, or that only this rank may know.
    """

    facts: Facts
    cuts: Cuts
    cells: tuple[Cell, ...]
    odd: tuple[Odd, ...]


def describe(
    shards: Mapping[str, Shard],
    own: Mapping[str, Shard] | None = None,
    *,
    aliases: Mapping[str, str] | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Description:
    """What this rank holds.

    Args:
        shards: Tensors that other ranks know too.
        own: Tensors that only this rank has.
        aliases: Tied names.
        rank: The number of this rank among those that save.
        world_size: The number of ranks that save.

    Raises:
        CheckpointError: A shard has a dtype that the format cannot store, or views that cannot be written.
    """
    own = own or {}
    names = sorted(shards)
    numbers: dict[tuple[torch.dtype, Extents, tuple[Box, ...]], int] = {}
    held: list[int] = []
    for name in names:
        shard = shards[name]
        _require_data(name, shard)
        held.append(numbers.setdefault((shard.dtype, shard.shape, shard.boxes), len(numbers)))
    signatures = [_Signature(dtype_name(dtype), tuple(shape), boxes) for dtype, shape, boxes in numbers]
    kinds, cuts, cells = _cuts(held, signatures, rank, world_size)
    odd = [
        Odd(name, signatures[i].dtype_name, signatures[i].shape, signatures[i].boxes)
        for name, i in zip(names, held, strict=True)
        if cuts[kinds[i]] is None and signatures[i].holds
    ]
    for name, shard in own.items():
        _require_data(name, shard)
        odd.append(Odd(name, dtype_name(shard.dtype), tuple(shard.shape), shard.boxes))
    return Description(
        _facts(names, held, signatures, aliases or {}),
        Cuts([kinds[i] for i in held], cuts),
        cells,
        tuple(odd),
    )


@dataclass(frozen=True, slots=True)
class _Signature:
    """What shards have in common that differ in their names only."""

    dtype_name: str
    shape: Extents
    boxes: tuple[Box, ...]

    @property
    def holds(self) -> bool:
        """Whether there is anything to store; an empty tensor is stored as its one empty box."""
        return any(box.numel or box.size == self.shape for box in self.boxes)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """An element type as `DTYPES` calls it."""
    return str(dtype).removeprefix("torch.")


def _require_data(name: str, shard: Shard) -> None:
    """Make sure that every view can be written."""
    if dtype_name(shard.dtype) not in DTYPES:
        raise CheckpointError(
            f"tensor '{name}' has dtype {dtype_name(shard.dtype)}, which a checkpoint cannot hold.",
            remedy=f"Convert it to one of {', '.join(DTYPES)}.",
        )
    for view in shard.data:
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


def _facts(
    names: Sequence[str], held: Sequence[int], signatures: Sequence[_Signature], aliases: Mapping[str, str]
) -> Facts:
    types: dict[tuple[str, Extents], int] = {}
    kinds = [types.setdefault((s.dtype_name, s.shape), len(types)) for s in signatures]
    return Facts(names, [kinds[i] for i in held], list(types), dict(aliases))


def _cuts(
    held: Sequence[int], signatures: Sequence[_Signature], rank: int, world_size: int
) -> tuple[list[int], list[tuple[Extents, int] | None], tuple[Cell, ...]]:
    """The number of each signature's cut, the cuts, and the cells that they number.

    Numbers go by first occurrence, so that ranks that agree number alike.
    """
    counts = Counter(held)
    single = {i: s.boxes[0] for i, s in enumerate(signatures) if len(s.boxes) == 1 and _is_inside(s)}
    usual = habits((signatures[i].shape, box, counts[i]) for i, box in single.items())
    possible = seats(rank, world_size)
    guesses = {
        i: found for i, box in single.items() if (found := guess(signatures[i].shape, box, usual, possible))
    }
    if _is_sparse(guesses, signatures, counts, world_size):
        guesses = {}
    cells: dict[Cell, int] = {}
    cuts: dict[tuple[Extents, int] | None, int] = {}
    kinds = []
    for i in range(len(signatures)):
        found = guesses.get(i)
        cut = None if found is None else (found[0], cells.setdefault(found[1], len(cells)))
        kinds.append(cuts.setdefault(cut, len(cuts)))
    return kinds, list(cuts), tuple(cells)


def _is_inside(signature: _Signature) -> bool:
    shape, box = signature.shape, signature.boxes[0]
    return (
        len(box.offset) == len(box.size) == len(shape)
        and box.numel > 0
        and all(o + n <= full for o, n, full in zip(box.offset, box.size, shape, strict=True))
    )


def _is_sparse(
    guesses: Mapping[int, tuple[Extents, Cell]],
    signatures: Sequence[_Signature],
    counts: Mapping[int, int],
    world_size: int,
) -> bool:
    """Whether a rank holds a few tensors whole and nothing of most, as ranges of a flat buffer come.

    Every rank then has others, so that no two ranks' cuts are alike; spelled out they are short.
    """
    if world_size <= 2 or any(chunk != signatures[i].shape for i, (chunk, _) in guesses.items()):
        return False
    return sum(counts[i] for i in guesses) * world_size <= 2 * sum(counts.values())


# --- what is sent ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """What every rank sends: its cells, and the digests of the parts that others may have sent already.

    Attributes:
        cells: This rank's cells.
        parts: Digests of its facts, cuts and odd boxes.
        inline: The parts that are short.
    """

    cells: tuple[Cell, ...]
    parts: tuple[bytes, bytes, bytes]
    inline: Mapping[bytes, bytes]


def pack(description: Description) -> tuple[Head, dict[bytes, bytes]]:
    """What to send first, and all parts by digest, one of which may be asked for."""
    odd = _json(
        [[o.name, o.dtype_name, o.shape, [[b.offset, b.size] for b in o.boxes]] for o in description.odd]
    )
    raws = (description.facts.raw, description.cuts.raw, odd)
    digests = [xxhash.xxh3_128_digest(raw) for raw in raws]
    parts = dict(zip(digests, raws, strict=True))
    inline = {key: raw for key, raw in parts.items() if len(raw) <= _INLINE}
    return Head(description.cells, (digests[0], digests[1], digests[2]), inline), parts


def unpack(heads: Sequence[Head], parts: Mapping[bytes, bytes]) -> list[Description]:
    """Every rank's description; equal parts become one object."""
    parts = {key: raw for head in heads for key, raw in head.inline.items()} | dict(parts)
    facts: dict[bytes, Facts] = {}
    cuts: dict[bytes, Cuts] = {}
    descriptions = []
    for head in heads:
        a, b, c = head.parts
        if a not in facts:
            facts[a] = Facts.parse(parts[a])
        if b not in cuts:
            cuts[b] = Cuts.parse(parts[b])
        descriptions.append(Description(facts[a], cuts[b], head.cells, _parse_odd(parts[c])))
    return descriptions


def _parse_odd(raw: bytes) -> tuple[Odd, ...]:
    return tuple(
        Odd(name, dtype, tuple(shape), tuple(Box(tuple(offset), tuple(size)) for offset, size in boxes))
        for name, dtype, shape, boxes in json.loads(raw)
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# --- collecting -----------------------------------------------------------------------------------
# Every rank sends digests of the parts of its description; the coordinator asks one rank for each part that
# it has not seen. So what arrives grows with the number of distinct parts, and a message from every rank is
# a few dozen bytes.


def gather_descriptions(
    group: dist.ProcessGroup | None, describe: Callable[[], Description], *, doing: str
) -> Callable[[], list[Description]]:
    """Describe on every rank, and collect the descriptions.

    Args:
        group: The ranks that take part; None for this process alone.
        describe: Describes what this rank holds. It must not communicate.
        doing: The purpose of this, used in messages.

    Returns:
        What gives all descriptions, in rank order, to the coordinator; others must not call it.

    Raises:
        CheckpointError: Some rank could not describe what it holds; on every rank alike.
    """
    if group is None:
        alone = exchange(None, describe, lambda found: found, doing=doing)
        return lambda: [alone]
    parts: dict[bytes, bytes] = {}
    heads: list[Head] = []
    asked: list[list[bytes]] = []

    def say() -> Head:
        head, raws = pack(describe())
        parts.update(raws)
        return head

    def ask(found: list[Head]) -> list[list[bytes]]:
        heads.extend(found)
        asked.extend(requests(found))
        return asked

    wanted = exchange(group, say, ask, doing=doing)
    here = dist.get_rank(group) == 0
    senders = [rank for rank, digests in enumerate(asked) if rank for _ in digests]
    received = deliver(group, [] if here else [parts[key] for key in wanted], senders, doing=doing)
    keys = [key for rank, digests in enumerate(asked) if rank for key in digests]
    return lambda: unpack(heads, parts | dict(zip(keys, received, strict=True)))


def requests(heads: Sequence[Head]) -> list[list[bytes]]:
    """Which parts each rank must send: one that came with a head, or that a lower rank has, nobody."""
    known = {key for head in heads for key in head.inline}
    wanted = []
    for head in heads:
        wanted.append([key for key in dict.fromkeys(head.parts) if key not in known])
        known.update(wanted[-1])
    return wanted

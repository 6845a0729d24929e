"""Describe the tensors that a rank holds, and exchange the descriptions between ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from nnx_base.box import Box
from nnx_base.dtypes import dtype_name
from nnx_base.errors import CheckpointError
from nnx_base.ranks import deliver, exchange
from nnx_base.shard import Shard
from nnx_checkpoint.format.rankfile_header import DTYPES

_INLINE = 512
"""Texts up to this many characters are sent at once: a request by digest would cost more."""


Extents = tuple[int, ...]


Exceptions = Sequence[tuple[int, Sequence[int]]]
"""Tensors partitioned unlike most of their type: the number of the type, and the numbers of the names."""


# Descriptions go by digest because they are nearly equal on many ranks: full texts would take bytes that grow
# with tensors times ranks. A description has three texts. Every rank sends a long text as its digest, and one
# rank sends it in full:
#
# - the catalog: names, dtypes and shapes; usually the same on all ranks;
# - the exceptions: the tensors partitioned unlike most of their dtype and shape. They are the same on ranks
#   of one mesh. On ranks with ranges of a flat buffer they are the few tensors that the rank holds;
# - the boxes: one set for most tensors of each dtype and shape, and one for each exception. They differ from
#   rank to rank, and are few.


@dataclass(frozen=True, eq=False)
class Catalog:
    """The tensors that a rank knows, with or without a local shard.

    Attributes:
        names: The names in order.
        types: All dtypes and shapes.
        type_of: The number of the type of each name.
        aliases: Tied names and the names under which they are stored.
    """

    names: Sequence[str]
    types: Sequence[tuple[str, Extents]]
    type_of: Sequence[int]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The text that is sent; equal catalogs have equal texts."""
        return _json([self.names, self.types, self.type_of, sorted(self.aliases.items())])

    @classmethod
    def parse(cls, text: str) -> Catalog:
        """Parse a `text` into a catalog."""
        names, types, type_of, aliases = json.loads(text)
        return cls(names, [(dtype, tuple(shape)) for dtype, shape in types], type_of, dict(aliases))


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A description of some of one rank's shards.

    Attributes:
        catalog: The tensors.
        exceptions: Tensors that are partitioned unlike most of their dtype and shape.
        boxes: The rank's boxes of most tensors of each type, then its boxes of each exception.
    """

    catalog: Catalog
    exceptions: Exceptions
    boxes: Sequence[tuple[Box, ...]]


def describe(shards: Mapping[str, Shard], *, aliases: Mapping[str, str] | None = None) -> Description:
    """Describe the shards of this rank.

    Args:
        shards: This rank's shards of every tensor that it knows.
        aliases: Tied names.

    Raises:
        CheckpointError: A shard has a dtype that the format cannot store, or views that cannot be written.
    """
    names = sorted(shards)
    types: dict[tuple[torch.dtype, Extents], int] = {}
    type_of: list[int] = []
    alike: dict[tuple[int, tuple[Box, ...]], list[int]] = {}
    for i, name in enumerate(names):
        shard = shards[name]
        _require_data(name, shard)
        number = types.setdefault((shard.dtype, shard.shape), len(types))
        type_of.append(number)
        alike.setdefault((number, shard.boxes), []).append(i)
    # The most frequent boxes of a type are its usual ones. Ties go to the first name, so that ranks with
    # equal shards choose equally and their texts have one digest.
    usual: dict[int, tuple[Box, ...]] = {}
    exceptions: list[tuple[int, list[int]]] = []
    others: list[tuple[Box, ...]] = []
    for (number, boxes), members in sorted(alike.items(), key=lambda item: (-len(item[1]), item[1][0])):
        if number in usual:
            exceptions.append((number, members))
            others.append(boxes)
        else:
            usual[number] = boxes
    catalog = Catalog(
        names, [(dtype_name(dtype), tuple(shape)) for dtype, shape in types], type_of, dict(aliases or {})
    )
    return Description(catalog, exceptions, [*(usual[number] for number in range(len(types))), *others])


def _require_data(name: str, shard: Shard) -> None:
    """Raise if a view cannot be written."""
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


Head = tuple["bytes | str", ...]
"""The first message of a rank: the three texts of each of its descriptions, each as its digest if long."""


def pack(descriptions: Sequence[Description]) -> tuple[Head, dict[bytes, str]]:
    """Return the first message, and the long texts by digest, which the coordinator may request."""
    head: list[bytes | str] = []
    parts: dict[bytes, str] = {}
    for one in descriptions:
        boxes = [[[*box.offset, *box.size] for box in boxes] for boxes in one.boxes]
        for text in (one.catalog.text, _json(one.exceptions), _json(boxes)):
            if len(text) <= _INLINE:
                head.append(text)
                continue
            key = xxhash.xxh3_128_digest(text.encode())
            head.append(key)
            parts[key] = text
    return tuple(head), parts


def unpack(heads: Sequence[Head], parts: Mapping[bytes, str]) -> list[list[Description]]:
    """Return every rank's descriptions; equal texts become one object."""
    catalogs: dict[bytes | str, Catalog] = {}
    exceptions: dict[bytes | str, Exceptions] = {}
    boxes: dict[bytes | str, list[tuple[Box, ...]]] = {}
    found: list[list[Description]] = []
    for head in heads:
        found.append([])
        for a, b, c in zip(head[0::3], head[1::3], head[2::3], strict=True):
            if a not in catalogs:
                catalogs[a] = Catalog.parse(_text(a, parts))
            if b not in exceptions:
                exceptions[b] = json.loads(_text(b, parts))
            if c not in boxes:
                boxes[c] = [tuple(map(_box, one)) for one in json.loads(_text(c, parts))]
            found[-1].append(Description(catalogs[a], exceptions[b], boxes[c]))
    return found


def _text(part: bytes | str, parts: Mapping[bytes, str]) -> str:
    return part if isinstance(part, str) else parts[part]


def _box(numbers: Sequence[int]) -> Box:
    dims = len(numbers) // 2
    return Box(tuple(numbers[:dims]), tuple(numbers[dims:]))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# The coordinator requests each distinct long text from one rank, the lowest that has it. So its traffic grows
# with the number of distinct texts, and the message of every other rank stays at a few hundred bytes.


def gather_descriptions(
    group: dist.ProcessGroup | None, describe: Callable[[], list[Description]], *, doing: str
) -> Callable[[], list[list[Description]]]:
    """Describe the shards on every rank, and gather the descriptions on the coordinator.

    Args:
        group: The participating ranks; None for this process alone.
        describe: Function that describes this rank's shards. It must not communicate.
        doing: The purpose of the exchange, used in messages.

    Returns:
        A function that returns all descriptions, in rank order, on the coordinator; others must not call it.

    Raises:
        CheckpointError: A rank could not describe its shards (the same error on every rank).
    """
    if group is None:
        alone = exchange(None, describe, lambda found: found, doing=doing)
        return lambda: [alone]
    parts: dict[bytes, str] = {}
    heads: list[Head] = []
    asked: list[list[bytes]] = []

    def send_head() -> Head:
        head, long = pack(describe())
        parts.update(long)
        return head

    def request_parts(found: list[Head]) -> list[list[bytes]]:
        heads.extend(found)
        asked.extend(requests(found))
        return asked

    wanted = exchange(group, send_head, request_parts, doing=doing)
    here = dist.get_rank(group) == 0
    outgoing = [] if here else [parts[key].encode() for key in wanted]
    keys = [(rank, key) for rank, wanted in enumerate(asked) if rank for key in wanted]
    received = deliver(group, outgoing, [rank for rank, _ in keys], doing=doing)
    for (_, key), raw in zip(keys, received, strict=True):
        parts[key] = raw.decode()
    return lambda: unpack(heads, parts)


def requests(heads: Sequence[Head]) -> list[list[bytes]]:
    """Return the digests of the texts that each rank must send: those that no lower rank has."""
    known: set[bytes] = set()
    wanted: list[list[bytes]] = []
    for head in heads:
        wanted.append([part for part in dict.fromkeys(head) if isinstance(part, bytes) and part not in known])
        known.update(wanted[-1])
    return wanted

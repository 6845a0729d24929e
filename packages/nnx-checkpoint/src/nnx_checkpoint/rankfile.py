"""One rank's file: the boxes it writes, as a safetensors file, and the checksums beside it.

Any safetensors tool reads the file. Its header is padded so that the data starts on a page; the data is
gapless, widest elements first so that all stay aligned. Besides the standard fields the header says which
logical tensor and box each entry is, so that the index can be rebuilt from the headers. This module owns that
layout and which bytes of it a region needs. It never communicates.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from nnx_checkpoint.box import Box
from nnx_checkpoint.dtypes import DTYPES, width
from nnx_checkpoint.manifest import BLOCK, FileEntry, digest, rank_file
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.stream import ALIGNMENT, StreamWriter

__all__ = [
    "StoredBox",
    "cut",
    "file_order",
    "flat_bytes",
    "ranges_of",
    "strides_of",
    "write_in_order",
    "write_rank_file",
]

_SLAB = 8 << 20
"""Most bytes that are copied at once out of memory that cannot be written from directly."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box that a rank stores, without its data."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Its length in the file."""
        return self.box.numel * DTYPES[self.dtype_name].itemsize


def file_order(boxes: Sequence[StoredBox]) -> list[int]:
    """The order in which boxes stand in a file: widest numbers first, then by name and offset."""

    def key(i: int) -> tuple[int, str, tuple[int, ...]]:
        return -width(boxes[i].dtype_name), boxes[i].name, boxes[i].box.offset

    return sorted(range(len(boxes)), key=key)


def write_rank_file(
    directory: Place, rank: int, boxes: Sequence[StoredBox], data: Sequence[Tensor]
) -> dict[str, FileEntry]:
    """Write this rank's boxes and their checksums.

    Args:
        directory: The save directory.
        rank: The number of this rank.
        boxes: The boxes to store, in any order.
        data: The tensor for each box; of any device and stride.

    Returns:
        What the manifest must say about the two files; nothing where there is nothing to store.
    """
    order = file_order(boxes)
    return write_in_order(
        directory, rank, [boxes[i] for i in order], (flat_bytes(data[i].detach()) for i in order)
    )


def write_in_order(
    directory: Place, rank: int, boxes: Sequence[StoredBox], data: Iterable[Iterable[memoryview]]
) -> dict[str, FileEntry]:
    """As `write_rank_file`, for boxes that are in `file_order`, each given as parts of its bytes."""
    if not boxes:
        return {}
    header = _header(boxes)
    size = len(header) + sum(box.nbytes for box in boxes)
    name = rank_file(rank)
    with (directory / name).stream(size) as stream:
        stream.append(memoryview(header))
        writer = ShardWriter(stream)
        for parts in data:
            writer.add(parts)
        stream.finish()
    sums = struct.pack(f"<{len(writer.sums)}Q", *writer.sums)
    sums_name = f"{name.rsplit('.', 1)[0]}.sums"
    (directory / sums_name).write(sums)
    return {
        name: FileEntry(size, digest(header), len(header)),
        sums_name: FileEntry(len(sums), digest(sums), len(sums)),
    }


class ShardWriter:
    """Appends tensors to a stream and collects a checksum of every block of each."""

    def __init__(self, stream: StreamWriter) -> None:
        self.sums: list[int] = []
        self._stream = stream

    def add(self, parts: Iterable[memoryview]) -> None:
        """Append the bytes of one box; its blocks start anew at its first byte."""
        block = xxhash.xxh3_64()
        missing = BLOCK
        for slab in parts:
            position = 0
            while position < len(slab):
                part = slab[position : position + missing]
                block.update(self._stream.append(part))
                position += len(part)
                missing -= len(part)
                if missing == 0:
                    self.sums.append(block.intdigest())
                    block.reset()
                    missing = BLOCK
        if missing < BLOCK:
            self.sums.append(block.intdigest())


def flat_bytes(tensor: Tensor, limit: int = _SLAB) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, copying at most `limit` bytes at once.

    Memory on the CPU that is contiguous is not copied at all.
    """
    if tensor.numel() == 0:
        return
    if tensor.is_conj() or tensor.is_neg() or tensor.device.type != "cpu" or not tensor.is_contiguous():
        if tensor.numel() * tensor.element_size() > limit:
            dim = next(d for d, extent in enumerate(tensor.shape) if extent > 1)
            half = tensor.shape[dim] // 2
            yield from flat_bytes(tensor.narrow(dim, 0, half), limit)
            yield from flat_bytes(tensor.narrow(dim, half, tensor.shape[dim] - half), limit)
            return
        tensor = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
    # The stride of a dim of extent 1 may be anything, which `reshape` would keep.
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    yield memoryview(flat.numpy())  # type: ignore[arg-type]


def _header(boxes: Sequence[StoredBox]) -> bytes:
    """The header as text; as a tree of objects it would take most of the time that small tensors take."""
    entries: list[str] = []
    origins: list[str] = []
    offsets: list[str] = []
    known: dict[tuple[str, tuple[int, ...], Box], _Entry] = {}
    used: set[str] = set()
    taken = {"__metadata__"} | {box.name for box in boxes}
    start = 0
    for box in boxes:
        signature = (box.dtype_name, box.shape, box.box)
        entry = known.get(signature)
        if entry is None:
            entry = known[signature] = _entry(box)
        key = _key(box.name, used, taken)
        used.add(key)
        taken.add(key)
        quoted = json.dumps(key)
        stop = start + entry.nbytes
        entries.append(f'{quoted}:{{{entry.fields},"data_offsets":[{start},{stop}]}}')
        # torch's own Hugging Face reader looks for this entry.
        offsets.append(f'{quoted}:{{"saved_offsets":{entry.saved}}}')
        if not entry.plain or key != box.name:
            name = quoted if key == box.name else json.dumps(box.name)
            origins.append(f'{quoted}:{{"name":{name},{entry.origin}}}')
        start = stop
    metadata = {"format": "pt", "DCP_SHARDING_INFO": _object(offsets), "nnx": _object(origins)}
    head = f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}'
    text = _object([head, *entries]).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the header says of boxes that differ in their names only."""

    nbytes: int
    fields: str
    saved: str
    origin: str
    plain: bool
    """Whether the standard fields say it all: a whole tensor of a type that safetensors has."""


def _entry(box: StoredBox) -> _Entry:
    stored = DTYPES[box.dtype_name]
    parts = [stored.parts] if stored.parts > 1 else []
    shape = json.dumps([*box.box.size, *parts], separators=(",", ":"))
    origin = {"dtype": box.dtype_name, "shape": box.shape, "offset": box.box.offset}
    return _Entry(
        nbytes=box.nbytes,
        fields=f'"dtype":"{stored.code}","shape":{shape}',
        saved=json.dumps([*box.box.offset, *(0 for _ in parts)], separators=(",", ":")),
        origin=json.dumps(origin, separators=(",", ":"))[1:-1],
        plain=not parts and box.box == Box.whole(box.shape),
    )


def _object(members: Sequence[str]) -> str:
    return f"{{{','.join(members)}}}"


def _key(name: str, used: set[str], taken: set[str]) -> str:
    """The tensor's name for its first box in this file, a numbered one for further boxes."""
    if name not in used and name != "__metadata__":
        return name
    number = 1
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


# --- ranges of bytes ------------------------------------------------------------------------------
# A region whose inner dims are whole is one range; columns of a matrix are one range for each row. Ranges
# whose gap is small are joined, because reading a small gap costs less than leaving it out.


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of equal length, in order.

    Attributes:
        first: Position of the first byte, counted from the start of the stored box.
        span: Length of one range.
        wanted: Bytes of one range that belong to the region; the rest of it are gaps.
        steps: A pair for each outer dim: how often it moves on, and by how many bytes.
    """

    first: int
    span: int
    wanted: int
    steps: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many ranges there are."""
        return math.prod(count for count, _ in self.steps)

    @property
    def gapless(self) -> bool:
        """Whether the ranges hold nothing but the region."""
        return self.span == self.wanted

    def starts(self) -> Iterator[int]:
        """Where each range starts."""
        moves = (range(0, count * stride, stride) for count, stride in self.steps)
        for offsets in itertools.product(*moves):
            yield self.first + sum(offsets)


def ranges_of(region: Box, outer: Sequence[int], itemsize: int, gap: int) -> Ranges:
    """The ranges that a region consists of.

    Args:
        region: A region with at least one element, in coordinates of the stored box.
        outer: Extents of the stored box.
        itemsize: Bytes of one element.
        gap: Ranges that lie at most this many bytes apart are joined.

    Example:
        Two columns of a matrix with three rows of four: one range for each row, or all in one.

        >>> ranges_of(Box((0, 1), (3, 2)), (3, 4), 1, gap=0)
        Ranges(first=1, span=2, wanted=2, steps=((3, 4),))
        >>> ranges_of(Box((0, 1), (3, 2)), (3, 4), 1, gap=2)
        Ranges(first=1, span=10, wanted=6, steps=())
    """
    strides = [stride * itemsize for stride in strides_of(outer)]
    first = sum(offset * stride for offset, stride in zip(region.offset, strides, strict=True))
    span = wanted = itemsize
    dim = len(strides)
    while dim:
        count, stride = region.size[dim - 1], strides[dim - 1]
        if count > 1 and stride - span > gap:
            break
        span += (count - 1) * stride
        wanted *= count
        dim -= 1
    steps = tuple((region.size[d], strides[d]) for d in range(dim) if region.size[d] > 1)
    return Ranges(first, span, wanted, steps)


def cut(
    region: Box, view: Tensor, outer: Sequence[int], *, gap: int, limit: int
) -> Iterator[tuple[Box, Tensor, Ranges]]:
    """Cut a region, and the view that it goes into, until what is read at once is small.

    Args:
        region: A region of the stored box.
        view: A tensor of the region's extents.
        outer: Extents of the stored box.
        gap: The same as in `ranges_of`.
        limit: Most bytes of one part: of all its ranges, or of its only range if that has gaps.
    """
    ranges = ranges_of(region, outer, view.element_size(), gap)
    small = ranges.count * ranges.span <= limit and (ranges.gapless or ranges.count == 1)
    if small or region.numel == 1:
        yield region, view, ranges
        return
    dim = next(d for d, extent in enumerate(region.size) if extent > 1)
    half = region.size[dim] // 2
    for start, extent in ((0, half), (half, region.size[dim] - half)):
        offset = (*region.offset[:dim], region.offset[dim] + start, *region.offset[dim + 1 :])
        size = (*region.size[:dim], extent, *region.size[dim + 1 :])
        yield from cut(Box(offset, size), view.narrow(dim, start, extent), outer, gap=gap, limit=limit)


def strides_of(size: Sequence[int]) -> tuple[int, ...]:
    """Distance of neighbours along each dim, in elements, where nothing lies between."""
    strides, stride = [], 1
    for extent in reversed(size):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))

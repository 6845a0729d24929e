"""Write one rank's file: its boxes as a safetensors file, with a file of checksums beside it.

Any safetensors tool reads the file. Its header is padded so that the data starts on a page. The data has no
gaps, and the widest elements come first so that all stay aligned. Besides the standard fields the header
names the logical tensor and box of each entry, so that headers suffice to rebuild the index. This module owns
that layout, finds the position of each box in a header, and computes the byte ranges of a region. It never
communicates, and imports torch only to write.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from nnx_base.box import Box
from nnx_checkpoint.format.manifest import BLOCK, FileEntry, digest, rank_file
from nnx_checkpoint.format.rankfile_header import Entry, _header, file_order
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.streams import StreamWriter

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "cut",
    "flat_bytes",
    "ranges_of",
    "strides_of",
    "write_in_order",
    "write_rank_file",
]


_SLAB = 8 << 20
"""Largest copy in bytes of data that cannot be written from its own memory."""


def write_rank_file(
    directory: Place, rank: int, entries: Sequence[Entry], data: Sequence[Tensor]
) -> dict[str, FileEntry]:
    """Write this rank's entries and their checksums.

    Args:
        directory: The save directory.
        rank: The number of this rank.
        entries: The entries to store, in any order.
        data: The tensor of each entry, on any device and with any strides.

    Returns:
        The manifest's records of the two files; empty if `entries` is empty.
    """
    order = file_order(entries)
    return write_in_order(
        directory, rank, [entries[i] for i in order], (flat_bytes(data[i].detach()) for i in order)
    )


def write_in_order(
    directory: Place, rank: int, entries: Sequence[Entry], data: Iterable[Iterable[memoryview]]
) -> dict[str, FileEntry]:
    """Write entries in `file_order` like `write_rank_file`, each from consecutive slices of its bytes."""
    if not entries:
        return {}
    header = _header(entries)
    size = len(header) + sum(entry.nbytes for entry in entries)
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
    """Appends entries to a stream, and computes a checksum of every block of each."""

    def __init__(self, stream: StreamWriter) -> None:
        self.sums: list[int] = []
        self._stream = stream

    def add(self, parts: Iterable[memoryview]) -> None:
        """Append the bytes of one entry; its blocks start at its first byte."""
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
    """Yield the bytes of a tensor in row-major order, copying at most `limit` bytes at once.

    Memory on the CPU that is contiguous is not copied at all.
    """
    from nnx_base.dtypes import as_bytes

    if tensor.numel() == 0:
        return
    if tensor.is_conj() or tensor.is_neg() or tensor.device.type != "cpu" or not tensor.is_contiguous():
        if tensor.numel() * tensor.element_size() > limit:
            dim = next(d for d, extent in enumerate(tensor.shape) if extent > 1)
            half = tensor.shape[dim] // 2
            yield from flat_bytes(tensor.narrow(dim, 0, half), limit)
            yield from flat_bytes(tensor.narrow(dim, half, tensor.shape[dim] - half), limit)
            return
        tensor = tensor.resolve_conj().resolve_neg().to("cpu")
    yield memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]


# A region reduces to as few reads as possible. If it covers the inner dims completely it is one range;
# columns of a matrix are one range for each row. Ranges with a small gap are joined, because reading the gap
# costs less than a second read, and a gap within one checksummed block must be read anyway.


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of equal length, in order.

    Attributes:
        first: Position of the first byte, counted from the start of the stored box.
        span: Length of one range.
        wanted: Bytes of one range that belong to the region; its other bytes are gaps.
        steps: For each outer dim the number of its steps, and the bytes of a step.
    """

    first: int
    span: int
    wanted: int
    steps: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of ranges."""
        return math.prod(count for count, _ in self.steps)

    @property
    def gapless(self) -> bool:
        """True if the ranges hold the region only."""
        return self.span == self.wanted

    def starts(self) -> Iterator[int]:
        """Yield the start of each range."""
        moves = (range(0, count * stride, stride) for count, stride in self.steps)
        for offsets in itertools.product(*moves):
            yield self.first + sum(offsets)


def ranges_of(region: Box, outer: Sequence[int], itemsize: int, gap: int) -> Ranges:
    """Return the ranges of a region in a stored box.

    Args:
        region: A region with at least one element, in coordinates of the stored box.
        outer: Extents of the stored box.
        itemsize: Bytes of one element.
        gap: The most bytes between two ranges that are joined.

    Example:
        Two columns of a matrix with three rows of four: one range for each row, or all in one.

        >>> ranges_of(Box((0, 1), (3, 2)), (3, 4), 1, gap=0)
        Ranges(first=1, span=2, wanted=2, steps=((3, 4),))
        >>> ranges_of(Box((0, 1), (3, 2)), (3, 4), 1, gap=2)
        Ranges(first=1, span=10, wanted=6, steps=())
    """
    # Grow one range from the innermost dim outwards, until the next step would skip more than `gap` bytes.
    # The remaining outer dims become steps of that range.
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
    """Halve a region and its target view until each read is small.

    Args:
        region: A region of the stored box.
        view: A tensor of the region's extents.
        outer: Extents of the stored box.
        gap: The most bytes between two ranges that are joined.
        limit: The most bytes of the ranges of one result; a result with gaps has one range only.
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
    """Return the strides in elements of a contiguous tensor."""
    strides, stride = [], 1
    for extent in reversed(size):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))

"""Measure the cost of planning and committing a save as ranks and tensors grow.

    python benchmarks/scale.py [--ranks 1 4 16 64 256 1024 16384] [--tensors 100000]
                               [--layout fsdp|hsdp|tp|zero|ddp] [--mode deduped|sharded] [--json]

One process plays all ranks. Real are the functions that ranks and coordinator run, every message that
they exchange (packed, counted, unpacked), the index, and opening it. Simulated are the data (tensors have
shapes and boxes but one shared number), the network and the disk. If all ranks split every tensor alike, only
one describes itself; the others send the same message with their own boxes, as they would in a real save.

Columns: processor seconds that one rank needs to describe itself and to find the boxes that it stores (the
slowest measured rank); maximum of the bytes that one rank sends, and receives; megabytes that all ranks
together send to the coordinator in a save, padded as torch's gather pads them; seconds and peak memory
(tracemalloc, in a second run) of the coordinator from unpacking to the bytes of index and manifest; the
length of the index; seconds to open it; seconds to find all pieces of one file in it, which includes parsing
the header of that file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch

from nnx_base.box import boxes_of_range
from nnx_base.shard import Box, Shard
from nnx_checkpoint.format.index import Index, decode_index, encode_index
from nnx_checkpoint.format.manifest import BLOCK, FileEntry, Manifest, encode_manifest
from nnx_checkpoint.format.rankfile_header import _header, file_order
from nnx_checkpoint.writing.description import Description, Head, describe, pack, requests, unpack
from nnx_checkpoint.writing.plan import Mode, Plan, RankPlan, make_plan, select

T = TypeVar("T")
WIDTH = 4096
REPLICAS = 8
BLOCK_SHAPES = {
    "qkv.weight": (3 * WIDTH, WIDTH),
    "qkv.bias": (3 * WIDTH,),
    "proj.weight": (WIDTH, WIDTH),
    "fc.weight": (4 * WIDTH, WIDTH),
    "out.weight": (WIDTH, 4 * WIDTH),
    "norm.weight": (WIDTH,),
    "gate.weight": (1000, WIDTH),  # an extent that most world sizes do not divide
}
STATES = ("exp_avg", "exp_avg_sq", "step")
SAVE_ID = "20260101T000000.000000-00000000"


@dataclass(frozen=True)
class World:
    """A model on some ranks.

    Layouts: ``fsdp`` cuts every parameter over rows; ``hsdp`` does so in eight replicas; ``tp`` cuts some
    over rows and some over columns, within eight ranks, and rows over the others; ``zero`` gives every rank a
    range of all parameters in a row; ``ddp`` holds them whole everywhere.
    """

    ranks: int
    tensors: int
    layout: str

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters with AdamW's state, as many as there shall be."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (50257, WIDTH)}
        layer = 0
        while len(shapes) < self.tensors:
            for name, shape in BLOCK_SHAPES.items():
                shapes[f"model.layers.{layer}.{name}"] = shape
                for state in STATES:
                    shapes[f"optim.0.state.layers.{layer}.{name}.{state}"] = () if state == "step" else shape
            layer += 1
        return dict(list(shapes.items())[: self.tensors])

    @cached_property
    def ends(self) -> list[int]:
        """Return the end of each tensor in a row of all tensors."""
        return list(itertools.accumulate(math.prod(shape) for shape in self.shapes.values()))

    def shards(self, rank: int) -> dict[str, Shard]:
        """Return the shards of a rank; all views are of the same number."""
        number = torch.zeros(())
        if self.layout == "zero":
            return {name: _shard(shape, boxes, number) for name, shape, boxes in self._ranges(rank)}
        known: dict[tuple[tuple[int, ...], bool], Shard] = {}
        found = {}
        for name, shape in self.shapes.items():
            key = (shape, self.layout == "tp" and "proj" in name)
            if key not in known:
                known[key] = _shard(shape, self.boxes(shape, rank, key[1]), number)
            found[name] = known[key]
        return found

    def boxes(self, shape: tuple[int, ...], rank: int, columns: bool = False) -> tuple[Box, ...]:
        """Return the boxes of a parameter on a rank, in all layouts but ``zero``."""
        inner, outer = rank % REPLICAS, rank // REPLICAS
        if self.layout == "tp" and self.ranks >= REPLICAS:
            rows = _slab(shape, outer, self.ranks // REPLICAS)
            if not columns:
                return _slab(shape, rank, self.ranks)
            part = _slab(shape, inner, REPLICAS, dim=1)
            common = [a.intersection(b) for a in rows for b in part]
            return tuple(box for box in common if box is not None)
        slabs = {"fsdp": self.ranks, "tp": self.ranks, "hsdp": max(1, self.ranks // REPLICAS), "ddp": 1}
        return _slab(shape, rank % slabs[self.layout], slabs[self.layout])

    def _ranges(self, rank: int) -> Iterator[tuple[str, tuple[int, ...], tuple[Box, ...]]]:
        step = -(-self.ends[-1] // self.ranks)
        start, stop, begin = rank * step, (rank + 1) * step, 0
        for (name, shape), end in zip(self.shapes.items(), self.ends, strict=True):
            first, last = max(start, begin), min(stop, end)
            boxes = boxes_of_range(shape, first - begin, last - begin) if first < last else ()
            yield name, shape, tuple(boxes)
            begin = end

    def like(self, rank: int) -> object:
        """The same for ranks that hold something of the same tensors, so that one can describe all."""
        if self.layout == "zero":
            return rank
        held = [(shape, columns) for shape in set(self.shapes.values()) for columns in (False, True)]
        return tuple(bool(self.boxes(shape, rank, columns)) for shape, columns in sorted(held))

    def description(self, like: Description, rank: int) -> Description:
        """Return the description of a rank that holds other boxes of the same tensors."""
        types = [shape for _, shape in like.catalog.types]
        boxes = [self.boxes(shape, rank) for shape in types]
        boxes += [self.boxes(types[number], rank, columns=True) for number, _ in like.exceptions]
        return replace(like, boxes=boxes)


def _shard(shape: tuple[int, ...], boxes: tuple[Box, ...], number: torch.Tensor) -> Shard:
    return Shard(shape, torch.float32, boxes, tuple(number.expand(box.size) for box in boxes))


def _slab(shape: tuple[int, ...], slab: int, slabs: int, dim: int = 0) -> tuple[Box, ...]:
    """The part of a tensor that is cut along one dim; numbers are not cut."""
    if not shape:
        return (Box((), ()),)
    dim = min(dim, len(shape) - 1)
    step = -(-shape[dim] // slabs)
    start, stop = min(slab * step, shape[dim]), min((slab + 1) * step, shape[dim])
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = start, stop - start
    return (Box(tuple(offset), tuple(size)),) if stop > start else ()


@dataclass(frozen=True)
class Exchange:
    """The messages that arrive at the coordinator."""

    heads: list[Head]
    parts: dict[bytes, str]
    described: dict[int, Description]
    seconds: float
    sent: int
    arrives: int


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds that something took, which depend little on other jobs, and its result."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def exchange(world: World) -> Exchange:
    """Let one of each sort of ranks describe itself, and make the others' messages after it."""
    heads: list[Head] = []
    long: list[dict[bytes, str]] = []
    described: dict[int, Description] = {}
    first: dict[object, int] = {}
    slowest = 0.0
    for rank in range(world.ranks):
        like = first.setdefault(world.like(rank), rank)
        if like == rank:
            seconds, described[rank] = timed(partial(describe, world.shards(rank)))
            slowest = max(slowest, seconds)
        seconds, (head, parts) = timed(
            partial(pack, [described.get(rank) or world.description(described[like], rank)])
        )
        slowest = max(slowest, seconds)
        heads.append(head)
        long.append(parts)
    asked = requests(heads)
    packed = [len(pickle.dumps(head)) for head in heads]
    extra = [sum(len(long[rank][key]) for key in keys) for rank, keys in enumerate(asked)]
    sent = max((a + b for a, b in zip(packed[1:], extra[1:], strict=True)), default=0)
    arrives = max(packed) * (world.ranks - 1) + sum(extra[1:])
    wanted = {key: long[rank][key] for rank, keys in enumerate(asked) for key in keys}
    return Exchange(heads, wanted, described, slowest, sent, arrives)


def coordinate(arrived: Exchange, mode: Mode) -> tuple[Plan, list[RankPlan], bytes, Manifest]:
    """Run the coordinator, from unpacking to the bytes of index and manifest."""
    plan = make_plan(unpack(arrived.heads, arrived.parts), mode)
    plans = plan.rank_plans(SAVE_ID)
    index = plan.index()
    raw = encode_index(index)
    totals = [0] * len(index.files)
    counts = Counter(index.numbers.values())
    for number, group in enumerate(index.groups):
        for owners, nbytes in zip(group.owners, group.nbytes, strict=True):
            for file in owners:
                totals[file] += nbytes * counts[number]
    files = {}
    for name, nbytes in zip(index.files, totals, strict=True):
        files[name] = FileEntry(4096 + nbytes, "0" * 32, 4096)
        files[f"{name.rsplit('.', 1)[0]}.sums"] = FileEntry(0, "0" * 32, 0)
    manifest = Manifest(SAVE_ID, "", files)
    decode_index(raw, manifest, source="index")
    encode_manifest(manifest)
    return plan, plans, raw, manifest


def header_of(index: Index, file: str) -> bytes:
    """The header that a rank writes."""
    entries, _ = index.entries_of(file)
    return _header([entries[i] for i in file_order(entries)])


def find_pieces(index: Index, file: str, header: bytes) -> int:
    """Find every piece of one file."""
    found = index.read_offsets(file, header, BLOCK)
    return len(replace(index, offsets=lambda file: found).pieces_of(file))


def measure(world: World, mode: Mode) -> dict[str, float]:
    """One row of the table."""
    arrived = exchange(world)
    seconds, (plan, plans, raw, manifest) = timed(lambda: coordinate(arrived, mode))
    received = len(pickle.dumps(plan.broadcast)) + max(len(pickle.dumps(one)) for one in plans)
    written = {
        f"r{world.ranks:05d}{ending}": FileEntry(1 << 40, "0" * 32, 1 << 20)
        for ending in (".safetensors", ".sums")
    }
    selecting = 0.0
    for rank, description in list(arrived.described.items())[:3]:
        took, _ = timed(partial(select, [description], world.shards(rank), plan.broadcast, plans[rank]))
        selecting = max(selecting, took)
    opening, index = timed(lambda: decode_index(raw, manifest, source="index"))
    file = index.files[len(index.files) // 2]
    header = header_of(decode_index(raw, manifest, source="index"), file)
    finding, count = timed(lambda: find_pieces(index, file, header))
    tracemalloc.start()
    coordinate(arrived, mode)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "ranks": world.ranks,
        "rank s": arrived.seconds + selecting,
        "sent B": arrived.sent,
        "received B": received,
        "arrives MB": (arrived.arrives + len(pickle.dumps(written)) * (world.ranks - 1)) / 1e6,
        "coordinator s": seconds,
        "coordinator MB": memory / 1e6,
        "index MB": len(raw) / 1e6,
        "open s": opening,
        "one file s": finding,
        "its pieces": count,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 16384])
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--layout", choices=["fsdp", "hsdp", "tp", "zero", "ddp"], default="fsdp")
    parser.add_argument("--mode", choices=["deduped", "sharded"], default="deduped")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        rows.append(measure(World(ranks, options.tensors, options.layout), options.mode))
        if not options.json:
            if len(rows) == 1:
                print("  ".join(f"{name:>14}" for name in rows[0]))
            shown = (f"{v:14.2f}" if isinstance(v, float) else f"{v:14,}" for v in rows[-1].values())
            print("  ".join(shown))
            sys.stdout.flush()
    if options.json:
        json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()

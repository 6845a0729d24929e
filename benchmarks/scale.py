"""What planning and committing a save costs as ranks and tensors grow.

    python benchmarks/scale.py [--ranks 1 4 16 64 256 1024 16384] [--tensors 100000]
                               [--layout fsdp|hsdp|ddp] [--mode deduped|sharded] [--json]

One process plays all ranks. What is real: the functions that ranks and coordinator run, every message that
they exchange (packed, counted, unpacked), the index, and opening it. What is simulated: tensors have shapes
and boxes but one shared number instead of data, nothing is sent over a network or written to a disk, and of
ranks that cut every tensor alike only one describes itself; the others send the same message with their own
coordinates, which is what they would have sent.

Columns: processor seconds that one rank needs to describe itself and to find out what it stores (the
slowest of those that were run), bytes that one rank sends at most, and receives; seconds and peak memory
(tracemalloc, in a second run) of the coordinator from unpacking to the bytes of index and manifest; the
length of the index; seconds to open it; seconds to find all pieces of one file in it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch

from nnx_checkpoint.cells import Placement, Stored, grid
from nnx_checkpoint.description import Description, Head, describe, pack, requests, unpack
from nnx_checkpoint.index import Index, decode_index, encode_index, required
from nnx_checkpoint.manifest import BLOCK, FileEntry, Manifest, encode_manifest
from nnx_checkpoint.plan import Deal, Mode, Own, make_plan, select
from nnx_checkpoint.shard import Box, Shard

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
    """A model on some ranks: sharded over rows, in replicas, or whole everywhere."""

    ranks: int
    tensors: int
    layout: str

    @property
    def slabs(self) -> int:
        """Into how many slabs of rows a parameter is cut."""
        return {"fsdp": self.ranks, "hsdp": max(1, self.ranks // REPLICAS), "ddp": 1}[self.layout]

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
    def cut_shapes(self) -> list[tuple[int, ...]]:
        """The distinct shapes that are cut."""
        return sorted({shape for shape in self.shapes.values() if shape})

    def shards(self, rank: int) -> dict[str, Shard]:
        """What a rank holds; all views are of the same number."""
        slab = rank % self.slabs
        number = torch.zeros(())
        known: dict[tuple[int, ...], Shard] = {}
        for shape in set(self.shapes.values()):
            boxes = _slab(shape, slab, self.slabs)
            known[shape] = Shard(shape, torch.float32, boxes, tuple(number.expand(b.size) for b in boxes))
        return {name: known[shape] for name, shape in self.shapes.items()}

    def alike(self, rank: int) -> object:
        """The same for ranks that hold full slabs of the same tensors, apart from one with a shorter slab."""
        slab, seen = rank % self.slabs, []
        for shape in self.cut_shapes:
            rows = -(-shape[0] // self.slabs)
            last = grid(shape[:1], (rows,))[0] - 1
            seen.append((slab > last, slab == last and rank if shape[0] % rows else slab == last))
        return slab == 0, tuple(seen)


def _slab(shape: tuple[int, ...], slab: int, slabs: int) -> tuple[Box, ...]:
    """The rows of one slab; numbers are not cut."""
    if not shape:
        return (Box((), ()),)
    rows = -(-shape[0] // slabs)
    start, stop = min(slab * rows, shape[0]), min((slab + 1) * rows, shape[0])
    box = Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
    return (box,) if box.numel else ()


@dataclass(frozen=True)
class Exchange:
    """What arrives at the coordinator."""

    heads: list[Head]
    parts: dict[bytes, bytes]
    described: dict[int, Description]
    seconds: float
    sent: int


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds that something took, which depend little on other jobs, and its result."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def exchange(world: World) -> Exchange:
    """Let one of each sort of ranks describe itself, and make the others' messages after it."""
    heads: list[Head] = []
    parts: dict[bytes, bytes] = {}
    described: dict[int, Description] = {}
    first: dict[object, int] = {}
    slowest = 0.0
    for rank in range(world.ranks):
        like = first.setdefault(world.alike(rank), rank)
        if like == rank or rank == world.ranks - 1:
            shards = world.shards(rank)
            seconds, (description, (head, raws)) = timed(partial(run_rank, shards, rank, world.ranks))
            slowest = max(slowest, seconds)
            described[rank], heads = description, [*heads, head]
            parts |= raws
        else:
            mine = tuple((rank % world.slabs,) if cell else () for cell in heads[like].cells)
            heads.append(replace(heads[like], cells=mine))
    asked = requests(heads)
    wanted = {key for keys in asked for key in keys}
    messages = [
        len(pickle.dumps(head)) + sum(len(parts[key]) for key in keys)
        for head, keys in zip(heads, asked, strict=True)
    ]
    sent = max(messages[1:], default=0)  # what the coordinator tells itself does not travel
    return Exchange(heads, {key: parts[key] for key in wanted}, described, slowest, sent)


def run_rank(
    shards: dict[str, Shard], rank: int, world_size: int
) -> tuple[Description, tuple[Head, dict[bytes, bytes]]]:
    """What a rank does before it waits for the coordinator."""
    description = describe(shards, rank=rank, world_size=world_size)
    return description, pack(description)


def coordinate(arrived: Exchange, mode: Mode) -> tuple[list[Own], Deal, Stored, bytes, Manifest]:
    """What the coordinator does, from unpacking to the bytes of index and manifest."""
    plan = make_plan(unpack(arrived.heads, arrived.parts), mode)
    own, deal = plan.own(), plan.deal()
    stored = plan.stored([bool(one.cells) for one in own])
    bases = [4096] * len(stored.files)
    index = encode_index(stored, bases, BLOCK, plan.aliases)
    sizes = Placement(stored, bases, BLOCK)
    files = {}
    for number, name in enumerate(stored.files):
        files[name] = FileEntry(4096 + sizes.size(number), "0" * 32, 4096)
        files[f"{name.rsplit('.', 1)[0]}.sums"] = FileEntry(0, "0" * 32, 0)
    manifest = Manifest(SAVE_ID, "", files, requires=required(stored))
    decode_index(index, manifest, source="index")
    encode_manifest(manifest)
    return own, deal, stored, index, manifest


def find_pieces(index: Index, file: str) -> int:
    """Find every piece of one file."""
    return len(index.pieces_of(file))


def measure(world: World, mode: Mode) -> dict[str, float]:
    """One row of the table."""
    arrived = exchange(world)
    seconds, (own, deal, stored, raw, manifest) = timed(lambda: coordinate(arrived, mode))
    received = len(pickle.dumps(deal)) + max(len(pickle.dumps(one)) for one in own)
    selecting = 0.0
    for rank, description in list(arrived.described.items())[:3]:
        took, _ = timed(partial(select, description, world.shards(rank), deal, own[rank]))
        selecting = max(selecting, took)
    opening, index = timed(lambda: decode_index(raw, manifest, source="index"))
    finding, count = timed(lambda: find_pieces(index, stored.files[len(stored.files) // 2]))
    tracemalloc.start()
    coordinate(arrived, mode)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "ranks": world.ranks,
        "rank s": arrived.seconds + selecting,
        "sent B": arrived.sent,
        "received B": received,
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
    parser.add_argument("--layout", choices=["fsdp", "hsdp", "ddp"], default="fsdp")
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

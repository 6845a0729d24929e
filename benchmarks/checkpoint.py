"""Saving and loading about 1 GB: nnx against torch's DCP and against raw file I/O, in one run.

    python benchmarks/checkpoint.py [--rounds 5] [--megabytes 1020] [--directory DIR] [--json]

Two processes hold a GPT's parameters and AdamW moments as DTensors sharded over rows. The contenders
take turns in random order, and every time is that of the slowest rank. Medians and their ratios are
printed. Loads are cold (the files were dropped from the page cache) and warm. nnx writes and verifies
checksums; DCP has none. "raw direct" and "raw buffered" move the same bytes with O_DIRECT and through
the page cache, one file a rank, fsync included, as the disk's lower bound. Saving in the background is
compared with one memcpy of a rank's bytes: "blocking" is the time that training waits, and
"total" ends with the commit. The first save allocates the memory for the copy and is shown on its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_conformance.pool import WorkerPool

WORLD_SIZE = 2
CHUNK = 8 << 20
Times = dict[str, list[float]]


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Parameters and moments of a GPT of that size, as this rank's DTensors."""
    width = 768
    block = {
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "proj.weight": (width, width),
        "proj.bias": (width,),
        "fc.weight": (4 * width, width),
        "fc.bias": (4 * width,),
        "out.weight": (width, 4 * width),
        "out.bias": (width,),
        "norm.weight": (width,),
    }
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    state: dict[str, torch.Tensor] = {}
    left, layer = megabytes * 1_000_000, 0
    while left > 0:
        for name, shape in block.items():
            rows = shape[0] // WORLD_SIZE
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                local = torch.randn(rows, *shape[1:])
                state[f"{kind}.{layer}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)])
                left -= local.nbytes * WORLD_SIZE
            step = torch.tensor(1.0)
            state[f"step.{layer}.{name}"] = DTensor.from_local(step, mesh, [Replicate()], run_check=False)
        layer += 1
    return state


class Contest:
    """The contenders on one rank, sharing one state and one directory."""

    def __init__(self, directory: Path, megabytes: int) -> None:
        self.rank = dist.get_rank()
        self.directory = directory
        self.state = make_state(megabytes)
        self.shards = {name: shard_of(tensor) for name, tensor in self.state.items()}
        self.local_bytes = sum(shard.nbytes for shard in self.shards.values())
        self.buffer = mmap.mmap(-1, CHUNK)
        self.buffer.write(os.urandom(1 << 20) * (CHUNK >> 20))
        self.target = bytearray(self.local_bytes)
        self.flat = torch.ones(self.local_bytes, dtype=torch.uint8)
        self.savers: dict[str, Callable[[], None]] = {
            "nnx": lambda: nnx_checkpoint.save(self.path("nnx"), tensors=self.shards, objects={"step": 1}),
            "nnx storage under DCP": lambda: self.dcp_save(nnx_checkpoint.Writer(self.path("under"))),
            "DCP": lambda: self.dcp_save(dcp.FileSystemWriter(self.path("dcp"), overwrite=True)),
            "raw direct": lambda: self.raw_write("raw", os.O_DIRECT),
            "raw buffered": lambda: self.raw_write("rawb", 0),
        }
        self.loaders: dict[str, Callable[[], None]] = {
            "nnx": lambda: nnx_checkpoint.open_checkpoint(self.path("nnx")).fill(self.shards),
            "nnx storage under DCP": lambda: self.dcp_load(nnx_checkpoint.Reader(self.path("under"))),
            "DCP": lambda: self.dcp_load(dcp.FileSystemReader(self.path("dcp"))),
            "raw": self.raw_read,
        }

    def path(self, name: str) -> Path:
        """Return the path that a contender writes to."""
        return self.directory / name

    def dcp_save(self, writer: dcp.StorageWriter) -> None:
        """Save the whole state through DCP."""
        dcp.save(dict(self.state), storage_writer=writer)

    def dcp_load(self, reader: dcp.StorageReader) -> None:
        """Load the whole state in place through DCP."""
        dcp.load(dict(self.state), storage_reader=reader)

    def raw_write(self, name: str, flag: int) -> None:
        """Write as many bytes as this rank holds."""
        self.path(name).mkdir(exist_ok=True)
        fd = os.open(self.path(name) / str(self.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag)
        for _ in range(0, self.local_bytes, CHUNK):
            os.write(fd, self.buffer)
        os.ftruncate(fd, self.local_bytes)
        os.fsync(fd)
        os.close(fd)

    def raw_read(self) -> None:
        """Read as many bytes as this rank holds."""
        view, done = memoryview(self.target), 0
        fd = os.open(self.path("raw") / str(self.rank), os.O_RDONLY)
        while done < self.local_bytes:
            done += os.preadv(fd, [view[done : done + CHUNK]], done)
        os.close(fd)

    def save_in_background(self) -> tuple[float, float]:
        """Return the seconds until the slowest rank continues, and until the commit of the save."""
        dist.barrier()
        start = time.perf_counter()
        save = nnx_checkpoint.save_async(
            nnx_checkpoint.SaveRequest(self.path("nnx"), tensors=self.shards, objects={"step": 1})
        )
        blocking = torch.tensor(time.perf_counter() - start)
        save.wait()
        dist.barrier()
        total = time.perf_counter() - start
        dist.all_reduce(blocking, op=dist.ReduceOp.MAX)
        return float(blocking), total

    def memcpy(self) -> float:
        """Seconds of the slowest rank to copy as many bytes as it holds, in one piece, to used memory."""
        target = ctypes.addressof(ctypes.c_char.from_buffer(self.target))
        dist.barrier()
        start = time.perf_counter()
        ctypes.memmove(target, self.flat.data_ptr(), self.local_bytes)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def timed(self, action: Callable[[], None]) -> float:
        """Seconds until the slowest rank is done."""
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - start

    def clear(self, names: list[str]) -> None:
        """Remove the files, so that every save is the first at its path."""
        dist.barrier()
        if self.rank == 0:
            for name in names:
                shutil.rmtree(self.path(name), ignore_errors=True)
            os.sync()
        dist.barrier()

    def forget(self) -> None:
        """Drop all files from the page cache."""
        dist.barrier()
        for file in self.directory.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        dist.barrier()


def compete(directory: str, megabytes: int, rounds: int) -> dict[str, Times]:
    """All rounds of the contest on one rank."""
    contest = Contest(Path(directory), megabytes)
    names = {"nnx": "nnx", "nnx storage under DCP": "under", "DCP": "dcp"}
    names |= {"raw direct": "raw", "raw buffered": "rawb"}
    results: dict[str, Times] = {
        "save": {name: [] for name in contest.savers},
        "background": {"memcpy": [], "blocking": [], "total": []},
        "load cold": {name: [] for name in contest.loaders},
        "load warm": {name: [] for name in contest.loaders},
    }
    first: list[float] = []
    order = random.Random(0)  # the same on both ranks
    for number in range(rounds + 1):  # the first round warms up and does not count
        for name in order.sample(list(contest.savers), len(contest.savers)):
            contest.clear([names[name]])
            results["save"][name].append(contest.timed(contest.savers[name]))
        for name in order.sample(["memcpy", "blocking"], 2):
            if name == "memcpy":
                results["background"]["memcpy"].append(contest.memcpy())
                continue
            contest.clear(["nnx"])
            blocking, total = contest.save_in_background()
            results["background"]["blocking"].append(blocking)
            results["background"]["total"].append(total)
        for kind in ("load cold", "load warm"):
            for name in order.sample(list(contest.loaders), len(contest.loaders)):
                contest.forget() if kind == "load cold" else contest.loaders[name]()
                results[kind][name].append(contest.timed(contest.loaders[name]))
        if number == 0:
            first = results["background"]["blocking"]
            results = {kind: {name: [] for name in times} for kind, times in results.items()}
    results["background"]["first blocking"] = first
    return results


def report(results: dict[str, Times], gigabytes: float) -> None:
    """Print medians, throughput and ratios."""
    for kind, times in results.items():
        medians = {name: statistics.median(values) for name, values in times.items()}
        if kind == "background":
            report_background(medians, times)
            continue
        baseline = medians["DCP"]
        raw = medians.get("raw direct", medians.get("raw", 0.0))
        print(f"\n{kind}: {gigabytes:.2f} GB, {WORLD_SIZE} processes, median of {len(times['DCP'])}")
        for name, median in medians.items():
            low, high = min(times[name]), max(times[name])
            print(
                f"  {name:24s} {median:6.3f} s ({low:.3f}-{high:.3f})  {gigabytes / median:5.2f} GB/s  "
                f"{baseline / median:5.2f}x DCP's throughput  {median / raw:5.2f}x raw's time"
            )


def report_background(medians: dict[str, float], times: Times) -> None:
    """Print the time that training waits, against a memcpy."""
    print(f"\nsave in the background: {WORLD_SIZE} processes, median of {len(times['memcpy'])}")
    for name, median in medians.items():
        low, high = min(times[name]), max(times[name])
        ratio = median / medians["memcpy"]
        print(f"  {name:24s} {median:6.3f} s ({low:.3f}-{high:.3f})  {ratio:5.2f}x memcpy's time")


def main() -> None:
    """Run the contest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1020)
    parser.add_argument("--directory", default=None, help="where to write; default: the temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="nnx-benchmark-", dir=options.directory)
    try:
        with WorkerPool(size=WORLD_SIZE) as pool:
            results = pool.run(
                compete,
                directory,
                options.megabytes,
                options.rounds,
                world_size=WORLD_SIZE,
                timeout=1800,
                init="gloo",
            )[0]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        json.dump(results, sys.stdout)
    else:
        report(results, options.megabytes / 1000)


if __name__ == "__main__":
    main()

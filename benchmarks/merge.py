"""Merging a sharded checkpoint of about 1 GB into one file: nnx against torch's DCP and against raw file I/O.

    python benchmarks/merge.py [--rounds 5] [--megabytes 1020] [--directory DIR] [--json]

Two processes save a GPT's parameters and AdamW moments, once with nnx and once with DCP. One process then
merges; the contenders take turns in random order, and the source is dropped from the page cache before each.
"raw" reads the bytes of nnx's checkpoint through the page cache and writes them with O_DIRECT, eight
megabytes after eight, fsync included. The output is medians, their ratio to raw, and the peak memory of a
merge above that of the process before it (VmHWM, reset before each; it includes the first merge, which does
not count for the times; Lightning, which is needed to write its format, is imported before). nnx verifies the
checksums of its input and computes those of the zip file; DCP has none.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass
from pathlib import Path

import lightning.fabric.utilities.data  # noqa: F401 - so that its memory does not count as a merge's
import torch.distributed.checkpoint as dcp
from checkpoint import make_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_conformance.pool import WorkerPool

WORLD_SIZE = 2
CHUNK = 8 << 20


def save(directory: str, megabytes: int) -> None:
    """Save the same state in both formats, as training would. Collective."""
    state = make_state(megabytes)
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(Path(directory) / "dcp", overwrite=True))
    tensors, parameters = {}, []
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        logical = f"model.{name}" if kind == "model" else f"optim.0.state.{name}.{kind}"
        parameters += [name] if kind == "model" else []
        tensors[logical] = shard_of(tensor)
    optim = [{"groups": [{"lr": 0.1, "params": parameters}], "values": {}}]
    objects = {"trainer": {"epoch": 1}, "extra": {}, "optim": optim}
    nnx_checkpoint.save(Path(directory) / "nnx", tensors=tensors, objects=objects)


@dataclass
class Measured:
    """The measurements of one merge.

    Attributes:
        seconds: The duration.
        extra: The bytes of memory above those in use before.
    """

    seconds: float
    extra: int


class Contest:
    """The contenders, in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.target = directory / "merged.ckpt"
        source = directory / "nnx"
        self.sources = [file for file in source.rglob("*") if file.is_file()]
        self.contenders: dict[str, Callable[[], None]] = {
            "nnx to .ckpt": lambda: nnx_checkpoint.merge(source, self.target, to="lightning"),
            "nnx to safetensors": lambda: nnx_checkpoint.convert(source, self.target, to="safetensors"),
            "nnx to nnx": lambda: nnx_checkpoint.convert(source, self.target, to="nnx"),
            "dcp_to_torch_save": lambda: dcp_to_torch_save(directory / "dcp", self.target),
            "raw": self.raw,
        }

    def raw(self) -> None:
        """Read every byte and write it again."""
        buffer = mmap.mmap(-1, CHUNK)
        out = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        written = 0
        for file in self.sources:
            fd = os.open(file, os.O_RDONLY)
            while (count := os.readv(fd, [buffer])) > 0:
                os.write(out, memoryview(buffer)[: -(-count // 4096) * 4096])
                written += count
            os.close(fd)
        os.ftruncate(out, written)
        os.fsync(out)
        os.close(out)

    def measure(self, name: str) -> Measured:
        """One merge from cold files."""
        for file in self.directory.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.perf_counter()
        self.contenders[name]()
        measured = Measured(time.perf_counter() - start, memory("VmHWM") - before)
        shutil.rmtree(self.target) if self.target.is_dir() else self.target.unlink()
        os.sync()
        return measured


def memory(field: str) -> int:
    """A figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def compete(directory: Path, rounds: int) -> dict[str, list[Measured]]:
    """All rounds; the first is the warm-up."""
    contest, order = Contest(directory), random.Random(0)
    results: dict[str, list[Measured]] = {name: [] for name in contest.contenders}
    for _ in range(rounds + 1):
        for name in order.sample(list(results), len(results)):
            results[name].append(contest.measure(name))
    return results


def main() -> None:
    """Save, then run the contest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1020)
    parser.add_argument("--directory", default=None, help="where to write; default: the temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="nnx-benchmark-", dir=options.directory)
    try:
        with WorkerPool(size=WORLD_SIZE) as pool:
            pool.run(save, directory, options.megabytes, world_size=WORLD_SIZE, timeout=600, init="gloo")
        results = compete(Path(directory), options.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        json.dump({name: [vars(m) for m in values] for name, values in results.items()}, sys.stdout)
        return
    raw = statistics.median(measured.seconds for measured in results["raw"][1:])
    print(f"merging {options.megabytes / 1000:.2f} GB from cold files, median of {options.rounds}")
    for name, values in results.items():
        seconds = [measured.seconds for measured in values[1:]]
        median, extra = statistics.median(seconds), max(measured.extra for measured in values)
        print(
            f"  {name:20s} {median:6.3f} s ({min(seconds):.3f}-{max(seconds):.3f})  "
            f"{median / raw:5.2f}x raw's time  {extra / 1e6:7.1f} MB extra"
        )


if __name__ == "__main__":
    main()

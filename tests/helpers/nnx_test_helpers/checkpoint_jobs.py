"""Jobs that save and load checkpoints on several ranks.

The state consists of known tensors, sharded over the ranks in every way that a strategy may use. Another
world size shards the same tensors differently, so that loading has to reshard.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardDim

import nnx_checkpoint
from nnx_base.shard import Box, Shard, shard_of, shard_of_range
from nnx_core.errors import CheckpointError

Cut = Literal["whole", "rows", "columns", "flat", "first", "grid"]


def full_tensors() -> dict[str, tuple[Tensor, Cut]]:
    """Every logical tensor and how it is cut; the same on every rank and in every process."""
    random = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    return {
        "replicated": (rand(33, 5), "whole"),
        "rows": (rand(301, 400), "rows"),
        "few_rows": (rand(2, 3), "rows"),
        "columns": (rand(300, 401), "columns"),
        "flat": (rand(7, 11, 13), "flat"),
        "long_flat": (rand(400_001), "flat"),
        "only_first": (rand(9), "first"),
        "grid": (rand(50, 60), "grid"),
        "scalar": (torch.tensor(3.25), "whole"),
        "step": (torch.tensor(12345678901234), "whole"),
        "empty": (torch.zeros(0, 4), "whole"),
        "empty_rows": (torch.zeros(4, 0), "rows"),
        "ints": (torch.arange(1000, dtype=torch.int32).view(10, 100), "columns"),
        "mask": (rand(77, 3) > 0, "rows"),
        "bf16": (rand(64, 9).bfloat16(), "columns"),
        "fp16": (rand(31).half(), "flat"),
        "fp64": (rand(5, 5).double(), "rows"),
        "fp8": (rand(16, 16).to(torch.float8_e4m3fn), "rows"),
        "complex": (torch.complex(rand(6, 4), rand(6, 4)), "columns"),
        "bytes": (torch.arange(256, dtype=torch.uint8), "rows"),
        "odd#name/with spaces": (rand(3), "whole"),
        "__metadata__": (rand(3), "whole"),
    }


def bounds(extent: int, rank: int, size: int) -> tuple[int, int]:
    """An uneven cut: the first ranks get more, the last ones possibly nothing."""
    each = -(-extent // size)
    return min(rank * each, extent), min((rank + 1) * each, extent)


def cut(full: Tensor, how: Cut, rank: int, size: int) -> Shard | None:
    """This rank's part; None where it does not even know the tensor."""
    shape = tuple(full.shape)
    if how == "whole":
        return shard_of(full.clone())
    if how == "first":
        return shard_of(full.clone()) if rank == 0 else None
    if how == "flat":
        start, stop = bounds(full.numel(), rank, size)
        return shard_of_range(full.reshape(-1)[start:stop].clone(), shape=shape, start=start)
    if how == "grid":  # several boxes on one rank, not adjacent
        boxes = [Box((i, 0), (5, 60)) for i in range(5 * rank, 50, 5 * size)]
        return Shard(shape, full.dtype, tuple(boxes), tuple(full[box.slices].clone() for box in boxes))
    dim = 0 if how == "rows" else 1
    start, stop = bounds(shape[dim], rank, size)
    part = full.narrow(dim, start, stop - start)
    if part.numel() == 0:
        return Shard(shape, full.dtype, (), ())
    offset = tuple(start if d == dim else 0 for d in range(full.dim()))
    # Strided memory, so that neither side of a copy is contiguous.
    spare = torch.empty(*part.shape[:-1], part.shape[-1] + 1, dtype=full.dtype)
    view = spare[..., : part.shape[-1]]
    view.copy_(part)
    return Shard(shape, full.dtype, (Box(offset, tuple(part.shape)),), (view,))


def shards(rank: int, size: int) -> dict[str, Shard]:
    parts = {f"model.{name}": cut(full, how, rank, size) for name, (full, how) in full_tensors().items()}
    return {name: part for name, part in parts.items() if part is not None}


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save_all(path: str, state_dict_type: Literal["sharded", "deduped"], version: int = 1) -> None:
    rank, size = rank_and_size()
    nnx_checkpoint.save(
        path,
        tensors=shards(rank, size),
        objects={"version": version, "best": torch.tensor(0.5), "pair": (1, 2)},
        rank_objects={"rng": torch.full((4,), rank), "rank": rank},
        aliases={"model.tied": "model.rows"},
        state_dict_type=state_dict_type,
        provenance={"strategy": "test"},
    )


def load_all(path: str) -> list[str]:
    """Names of tensors that did not come back bit for bit."""
    rank, size = rank_and_size()
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    wanted = shards(rank, size)
    expected = {name: [view.clone() for view in shard.data] for name, shard in wanted.items()}
    for shard in wanted.values():
        for view in shard.data:
            view.fill_(1)
    checkpoint.fill(wanted)
    wrong = [
        name
        for name, shard in wanted.items()
        if not all(same_bits(a, b) for a, b in zip(shard.data, expected[name], strict=True))
    ]
    tied = checkpoint.read("model.tied")
    if not same_bits(tied, full_tensors()["rows"][0]):
        wrong.append("tied")
    if checkpoint.objects != {"version": 1, "best": torch.tensor(0.5), "pair": (1, 2)}:
        wrong.append("objects")
    for writer in range(checkpoint.world_size):
        own = checkpoint.rank_objects(writer)
        if own is None or own["rank"] != writer or own["rng"].tolist() != [writer] * 4:
            wrong.append(f"rank objects {writer}")
    if checkpoint.rank_objects(checkpoint.world_size) is not None:
        wrong.append("rank objects of a rank that did not write")
    return wrong


def save_dtensors(path: str) -> None:
    rank, size = rank_and_size()
    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(35.0).view(7, 5)
    tree = {
        "rows": distribute_tensor(full, mesh, [ShardDim(0)]),
        "columns": distribute_tensor(full, mesh, [ShardDim(1)]),
        "whole": distribute_tensor(full, mesh, [Replicate()]),
        "own": full + rank,
        "handle": cut(full, "flat", rank, size),
        "only here": {f"rank {rank}": object()} if rank else None,
    }
    nnx_checkpoint.save(path, tensors={}, objects=tree)


def attempt(path: str, fault: str) -> tuple[str, str] | None:
    """Save with a planted fault on rank 1 (or on both); return the class and text of this rank's error."""
    rank, size = rank_and_size()
    state: dict[str, Any] = {"tensors": shards(rank, size), "objects": {}, "state_dict_type": "sharded"}
    with contextlib.ExitStack() as planted:
        if rank == 1:
            planted.enter_context(plant(fault, state))
        try:
            nnx_checkpoint.save(path, **state)
        except CheckpointError as error:
            return type(error).__name__, str(error)
    return None


@contextlib.contextmanager
def plant(fault: str, state: dict[str, Any]) -> Iterator[None]:
    if fault == "file size limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    tensors = state["tensors"]
    if fault == "shape":
        tensors["model.scalar"] = shard_of(torch.zeros(2))
    elif fault == "dtype":
        tensors["model.scalar"] = shard_of(torch.tensor(1))
    elif fault == "gap":
        tensors["model.rows"] = Shard((301, 400), torch.float32, (), ())
    elif fault == "overlap":
        tensors["model.rows"] = Shard(
            (301, 400), torch.float32, (Box((0, 0), (2, 400)),), (torch.ones(2, 400),)
        )
    elif fault == "opaque":
        state["rank_objects"] = {"sampler": object()}
    elif fault == "alias":
        state["aliases"] = {"model.tied": "model.nowhere"}
    elif fault == "name":
        state["objects"] = {"x": torch.ones(1)}
        tensors["rank.1.y"] = shard_of(torch.ones(1))
        state["rank_objects"] = {"y": torch.ones(1)}
    yield


def leave_during_save(path: str) -> str:
    """Rank 1 dies between planning and writing."""
    from nnx_checkpoint.writing import writer

    rank, size = rank_and_size()
    if rank == 1:

        def die(*_: object) -> Any:
            os._exit(9)

        writer.write_rank_file = die
    try:
        nnx_checkpoint.save(path, tensors=shards(rank, size), objects={})
    except CheckpointError as error:
        return str(error)
    return ""


def lose_directory_during_save(path: str) -> str:
    """The save's directory vanishes on both ranks' file system between planning and writing."""
    from nnx_checkpoint.writing import writer

    rank, size = rank_and_size()
    real = writer.write_rank_file

    def lose_first(directory: Any, *rest: Any) -> Any:
        shutil.rmtree(directory.location, ignore_errors=True)
        return real(directory, *rest)

    writer.write_rank_file = lose_first
    try:
        nnx_checkpoint.save(path, tensors=shards(rank, size), objects={})
    except CheckpointError as error:
        return str(error)
    finally:
        writer.write_rank_file = real
    return ""


def load_what_vanishes(path: str) -> str:
    """Open a checkpoint on every rank, lose it, and load from it."""
    rank, size = rank_and_size()
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    dist.barrier()
    try:
        checkpoint.fill(shards(rank, size))
    except CheckpointError as error:
        return str(error)
    return ""


def save_without_permission(path: str) -> str:
    """Save as a user without write permission, which root always has."""
    rank, size = rank_and_size()
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        nnx_checkpoint.save(path, tensors=shards(rank, size), objects={})
    except CheckpointError as error:
        return str(error)
    finally:
        os.seteuid(own)
    return ""


def bytes_written(path: str, state_dict_type: Literal["sharded", "deduped"]) -> dict[str, int]:
    save_all(path, state_dict_type)
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    return {name: entry.size for name, entry in checkpoint.manifest.files.items()}


def load_one_row_of(path: str) -> tuple[int, int]:
    """Bytes read from files and bytes needed, for a quarter of the rows of one large tensor."""
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    entry = checkpoint.tensors["model.big"]
    rows = entry.shape[0] // 4
    before = _bytes_read()
    box = Box((rows, 0), (rows, entry.shape[1]))
    into = torch.empty(box.size)
    checkpoint.fill({"model.big": Shard(entry.shape, entry.dtype, (box,), (into,))})
    return _bytes_read() - before, into.nbytes


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def dcp_save(path: str) -> None:
    import torch.distributed.checkpoint as dcp

    rank, size = rank_and_size()
    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(35.0).view(7, 5)
    flat = cut(full, "flat", rank, size)
    assert flat is not None
    state = {
        "layer": {"weight": distribute_tensor(full, mesh, [ShardDim(0)]), "bias": torch.arange(3)},
        "flat": nnx_checkpoint.Handle(flat),
        "lr": 0.1,
        "betas": (0.9, 0.999),
    }
    dcp.save(state, storage_writer=nnx_checkpoint.Writer(path))


def dcp_load(path: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    rank, size = rank_and_size()
    mesh = init_device_mesh("cpu", (size,))
    empty = torch.zeros(7, 5)
    flat = cut(empty, "flat", rank, size)
    assert flat is not None
    weight = distribute_tensor(empty, mesh, [ShardDim(1)])
    state: dict[str, Any] = {
        "layer": {"weight": weight, "bias": torch.zeros(3, dtype=torch.int64)},
        "flat": nnx_checkpoint.Handle(flat),
        "lr": 0.0,
        "betas": (),
    }
    dcp.load(state, storage_reader=nnx_checkpoint.Reader(path))
    full = torch.arange(35.0).view(7, 5)
    expected = cut(full, "flat", rank, size)
    assert expected is not None
    return {
        "weight": torch.equal(weight.full_tensor(), full),
        "bias": state["layer"]["bias"].tolist(),
        "flat": all(torch.equal(a, b) for a, b in zip(flat.data, expected.data, strict=True)),
        "lr": state["lr"],
        "betas": state["betas"],
    }


def dcp_write_failure(path: str) -> str:
    import torch.distributed.checkpoint as dcp

    rank, _ = rank_and_size()
    with plant("file size limit", {"tensors": {}}) if rank == 1 else contextlib.nullcontext():
        try:
            dcp.save({f"own {rank}": torch.zeros(100_000)}, storage_writer=nnx_checkpoint.Writer(path))
        except dcp.api.CheckpointException as error:  # not derived from Exception
            return str(error)
    return ""


def golden_tensors() -> dict[str, tuple[Tensor, Cut]]:
    """Return the content of the golden checkpoint; must never change."""
    return {
        "model.rows": (torch.arange(35.0).view(7, 5), "rows"),
        "model.columns": (torch.arange(12, dtype=torch.int16).view(3, 4), "columns"),
        "model.flat": (torch.arange(30).bfloat16().view(5, 6), "flat"),
        "model.grid": (torch.arange(3000).view(50, 60), "grid"),
        "model.mask": (torch.arange(9) % 2 == 0, "whole"),
        "model.complex": (torch.complex(torch.arange(3.0), -torch.arange(3.0)), "whole"),
        "model.empty": (torch.zeros(0, 3), "whole"),
        "__metadata__": (torch.tensor([1, 2], dtype=torch.uint8), "whole"),
        "optim.0.state.rows.step": (torch.tensor(7.0, dtype=torch.float64), "whole"),
    }


def golden_objects() -> dict[str, Any]:
    """Objects of every kind that has an encoding."""
    import argparse
    import collections

    import numpy as np

    return {
        "plain": [None, True, -3, 2.5, "text \u00e9", {"nested": {}}],
        "tuple": (1, ("two",)),
        "sets": [{1, 2}, frozenset({"a"})],
        "deque": collections.deque([1, 2], maxlen=3),
        "keys": {1: "int", (2, 3): "tuple", "$": "dollar"},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {"x": [1]}),
        "namespace": argparse.Namespace(lr=0.1),
        "numbers": [float("inf"), float("-inf"), 10**2000, complex(1, float("inf"))],
        "bytes": [b"\x00\xff", bytearray(b"x")],
        "path": Path("/a/b"),
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.tensor([1.5, 2.5])],
        "numpy": [np.float32(0.5), np.arange(3, dtype="<i4")],
    }


def save_golden(path: str) -> None:
    """Write the golden checkpoint: two ranks, kept under packages/nnx-checkpoint/tests/golden."""
    rank, size = rank_and_size()
    parts = {name: cut(full, how, rank, size) for name, (full, how) in golden_tensors().items()}
    nnx_checkpoint.save(
        path,
        tensors={name: part for name, part in parts.items() if part is not None},
        objects=golden_objects(),
        rank_objects={"rank": rank, "rng": torch.arange(4, dtype=torch.uint8) + rank},
        aliases={"model.tied": "model.rows"},
        provenance={"strategy": "golden", "step": 3},
    )

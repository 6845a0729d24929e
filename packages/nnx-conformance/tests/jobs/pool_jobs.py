"""Jobs that test the worker pool itself."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy.random
import torch
import torch.distributed as dist

IMPORTED_BY = os.getpid()
TEMPORARY_AT_IMPORT = tempfile.gettempdir()
HELD: list[Any] = []
SEEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")


def describe() -> dict[str, Any]:
    return {"pid": os.getpid(), "cwd": str(Path.cwd()), "env": {k: os.environ.get(k) for k in SEEN}}


def leave_a_mess(directory: str) -> str | None:
    os.chdir(directory)
    seen = os.environ.get("NNX_TEST_EXTRA")
    os.environ["NNX_TEST_MESS"] = "1"
    torch.set_default_dtype(torch.float64)
    return seen


def find_a_mess() -> tuple[str | None, str | None, torch.dtype, bool]:
    extra, mess = os.environ.get("NNX_TEST_EXTRA"), os.environ.get("NNX_TEST_MESS")
    return extra, mess, torch.get_default_dtype(), dist.is_initialized()


def sum_of_ranks() -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_world_size(), value.item()


def raise_on(rank: int) -> None:
    print(f"printed by {os.environ['RANK']}")
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"planted on rank {rank}")
    dist.barrier()  # fails once the other rank has left the group


def leave_with_the_group(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        HELD.append(dist.group.WORLD)  # so that its connections stay open
        return "left"
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "nobody left"


def leave_a_collective_to_the_group_of_ddp() -> None:
    """Rank 0 is done while its collective is not; only DDP, which is in a circle, holds its group then."""
    layer = torch.nn.Linear(3, 3)
    wrapped = torch.nn.parallel.DistributedDataParallel(layer)
    wrapped(torch.ones(2, 3)).sum().backward()
    layer.__dict__["wrapped"] = wrapped
    if dist.get_rank() == 1:
        time.sleep(0.5)
    dist.all_reduce(torch.ones(1000), async_op=True)


def die_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_on(rank: int, deaf: bool = False) -> None:
    if deaf:  # as Lightning's teardown leaves the handlers of signals
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def exit_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise SystemExit(3)


def origin() -> dict[str, Any]:
    """Return the origin of this process and its own state."""
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "imported_by": IMPORTED_BY,
        "hash": hash("nnx"),
        "drawn": float(numpy.random.rand()),
    }


def surroundings() -> dict[str, str | None]:
    return {
        "cwd": str(Path.cwd()),
        "extra": os.environ.get("NNX_TEST_EXTRA"),
        "temporary": tempfile.gettempdir(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
    }


def leave_with(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)

"""Jobs that save in the background on several ranks, without Lightning."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnx_checkpoint
from nnx_base.shard import shard_of
from nnx_checkpoint.format import inflight
from nnx_checkpoint.writing import background
from nnx_checkpoint.writing.writer import Save
from nnx_core.errors import CheckpointError
from nnx_test_helpers import checkpoint_jobs


@contextlib.contextmanager
def delayed(until: Callable[[], object]) -> Iterator[None]:
    """Let the background do nothing until this returns; the real save follows."""
    complete = Save.complete

    def late(self: Save) -> None:
        if threading.current_thread() is not threading.main_thread():
            until()
        complete(self)

    Save.complete = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        Save.complete = complete  # type: ignore[method-assign]


def save_and_change(path: str) -> bool:
    """Save in the background, and overwrite everything before the background begins; whether it was held."""
    rank, size = checkpoint_jobs.rank_and_size()
    gate = threading.Event()
    tensors = checkpoint_jobs.shards(rank, size)
    best, rng, rest = torch.tensor(0.5), torch.full((4,), rank), {"rank": rank}
    objects = {"version": 1, "best": best, "pair": (1, 2)}
    with delayed(lambda: gate.wait(30)):
        save = nnx_checkpoint.save_async(
            nnx_checkpoint.SaveRequest(
                path,
                tensors=tensors,
                objects=objects,
                rank_objects={"rng": rng, **rest},
                aliases={"model.tied": "model.rows"},
                provenance={"strategy": "test"},
            )
        )
        for view in [best, rng, *(view for shard in tensors.values() for view in shard.data)]:
            view.zero_()
        objects["version"] = 0
        held = not save.done()
        gate.set()
        save.wait()
    return held and save.done()


def attempt(path: str, fault: str) -> list[tuple[str, str] | None]:
    """Save in the background with a planted fault on rank 1, then wait; return both errors on this rank."""
    rank, size = checkpoint_jobs.rank_and_size()
    state: dict[str, Any] = {"tensors": checkpoint_jobs.shards(rank, size), "objects": {}}
    state["state_dict_type"] = "sharded"
    raised: list[tuple[str, str] | None] = []
    with contextlib.ExitStack() as planted:
        if rank == 1:
            planted.enter_context(checkpoint_jobs.plant(fault, state))
        save: list[nnx_checkpoint.PendingSave] = []
        raised.append(
            _error(lambda: save.append(nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(path, **state))))
        )
        raised.append(_error(save[0].wait))
    return raised


def _error(action: Callable[[], object]) -> tuple[str, str] | None:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def poll_until_noticed(path: str, slow_rank: int, fail: bool) -> tuple[int, str]:
    """Poll as a training loop does while one rank is slow; return the number of polls, and the result."""
    rank, _ = checkpoint_jobs.rank_and_size()
    tensors = {"w": shard_of(torch.zeros(10, dtype=torch.complex32 if fail and rank else torch.complex64))}
    with delayed(lambda: time.sleep(0.3 if rank == slow_rank else 0.0)):
        nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(path, tensors=tensors, objects={}))
        for number in range(1000):
            try:
                background.poll()
            except CheckpointError as error:
                return number, str(error)
            if inflight.current() is None:
                return number, ""
            time.sleep(0.01 * (rank + 1))
    return -1, "never"


def alone_then_together(folder: str) -> list[tuple[str, str] | None]:
    """A save of rank 0 alone fails in the background; the next one is collective."""
    rank, _ = checkpoint_jobs.rank_and_size()
    if rank == 0:
        file = Path(folder) / "file"
        file.write_text("in the way")
        nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(file, tensors={}, objects={}, collective=False))
    state: dict[str, Any] = {"tensors": {"w": shard_of(torch.ones(3))}, "objects": {}}
    return [
        _error(lambda: nnx_checkpoint.save(Path(folder) / "a", **state)),
        _error(
            lambda: nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(Path(folder) / "a", **state)).wait()
        ),
    ]


def train_meanwhile(path: str, saves: int) -> tuple[int, list[str]]:
    """Run collectives in the main thread while saves are in flight; return their number and lost values."""
    rank, size = checkpoint_jobs.rank_and_size()
    steps = 0
    for version in range(1, saves + 1):
        save = nnx_checkpoint.save_async(
            nnx_checkpoint.SaveRequest(
                path,
                tensors=checkpoint_jobs.shards(rank, size),
                objects={"version": version, "best": torch.tensor(0.5), "pair": (1, 2)},
                rank_objects={"rng": torch.full((4,), rank), "rank": rank},
                aliases={"model.tied": "model.rows"},
            )
        )
        running = True
        while running:
            steps += 1
            total = torch.tensor([float(steps + rank), float(save.done())])
            dist.all_reduce(total)
            assert total[0] == sum(steps + r for r in range(size))
            running = total[1] < size
        save.wait()
    return steps, checkpoint_jobs.load_all(path) if saves == 1 else []


def leave_during_save(path: str) -> str:
    """Let rank 1 die while a save is in flight; return the error of rank 0."""
    import os

    rank, size = checkpoint_jobs.rank_and_size()
    with delayed(lambda: os._exit(9) if rank == 1 else None):
        save = nnx_checkpoint.save_async(
            nnx_checkpoint.SaveRequest(path, tensors=checkpoint_jobs.shards(rank, size), objects={})
        )
        try:
            save.wait()
        except CheckpointError as error:
            return str(error)
    return "no error"

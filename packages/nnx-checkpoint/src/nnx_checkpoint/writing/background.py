"""Save in the background.

Planning, hashing, writing and committing happen in the thread, over a process group of their own, because
two threads must not use one group.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import all_reduce

from nnx_base.ranks import background_group, control_group
from nnx_checkpoint.format import inflight
from nnx_checkpoint.format.inflight import PendingSave
from nnx_checkpoint.storage import Place
from nnx_checkpoint.writing.copy import Arena
from nnx_checkpoint.writing.request import SaveRequest
from nnx_checkpoint.writing.writer import Save

_arena = Arena()


def save_async(request: SaveRequest) -> PendingSave:
    """Copy the state of a request, and write the checkpoint in the background.

    The tensors and objects may change as soon as this returns. A save that is still in flight is awaited
    first. The copy takes CPU memory as large as this rank's tensors, which is kept for the next save.

    Returns:
        The save in flight: ask it with ``done()``, or ``wait()`` for it, on every rank. The next save raises
        the error of a save that nobody awaited; Python waits for it at exit.

    Raises:
        CheckpointError: The previous save failed, or in a single process, an object cannot be saved. If only
            some ranks cannot save an object, `PendingSave.wait` raises on every rank.
    """
    group = background_group() if request.collective else None
    kept = replace(request, aliases=dict(request.aliases), provenance=copy.deepcopy(dict(request.provenance)))
    save = Save(kept, group)
    save.follow_previous()
    try:
        save.capture(_arena.stage)
    except Exception as error:
        if group is None:
            raise
        save.fail(error)
    made = save.rank == 0 and _make_directory(save.path)
    return inflight.start(str(request.path), partial(_complete, save, made), collective=group is not None)


def poll(*, collective: bool = True) -> None:
    """Take notice of a save that has ended, between two steps of training.

    Args:
        collective: Also of one in which all ranks have a part; then every rank must call this at the
            same point, and they take notice together.

    Raises:
        CheckpointError: The save failed; on every rank that has a part in it.
    """
    save = inflight.current()
    if save is None or (save.collective and not collective):
        return
    if _ended_everywhere(save.done()) if save.collective else save.done():
        inflight.settle()


def release() -> None:
    """Give the memory of the copy back; only while no save is in flight."""
    global _arena  # noqa: PLW0603 - one for the process
    _arena = Arena()


def _ended_everywhere(here: bool) -> bool:
    ended = torch.tensor(int(here), device="cpu")
    all_reduce(ended, op=dist.ReduceOp.MIN, group=control_group())
    return bool(ended)


def _make_directory(place: Place) -> bool:
    """Make the checkpoint's name exist from now on, for callers that choose the next name by it."""
    path = place.location
    with contextlib.suppress(OSError):  # the save itself will say what is wrong
        if isinstance(path, Path) and not path.exists():
            path.mkdir(parents=True)
            return True
    return False


def _complete(save: Save, made: bool) -> None:
    try:
        save.complete()
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # it is gone, or not empty: something is there after all
                Path(str(save.path)).rmdir()
        raise

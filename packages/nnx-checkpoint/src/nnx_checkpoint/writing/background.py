"""Save in the background.

A thread plans, hashes, writes and commits over its own process group, because two threads must not use one
group.
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

    You may change the tensors and objects as soon as this returns. The call first waits for a save in flight.
    The copy takes CPU memory as large as this rank's tensors, which the next save reuses.

    Returns:
        The save in flight: call its ``done()``, or its ``wait()`` on every rank. Without ``wait()``, the next
        save raises its error, and Python waits for it at exit.

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
    """Raise the error of a background save if it has ended and failed. Call it between two training steps.

    Args:
        collective: True also polls a save of all ranks. Then every rank must call this at the same point,
            and all ranks raise together.

    Raises:
        CheckpointError: The save failed (on every rank of the save).
    """
    save = inflight.current()
    if save is None or (save.collective and not collective):
        return
    # A rank whose thread ended first must not raise alone: the others would wait in the next collective.
    if _ended_everywhere(save.done()) if save.collective else save.done():
        inflight.settle()


def release() -> None:
    """Free the memory of the copy (only while no save is in flight)."""
    global _arena  # noqa: PLW0603 - one for the process
    _arena = Arena()


def _ended_everywhere(here: bool) -> bool:
    ended = torch.tensor(int(here), device="cpu")
    all_reduce(ended, op=dist.ReduceOp.MIN, group=control_group())
    return bool(ended)


def _make_directory(place: Place) -> bool:
    """Create the checkpoint's directory now: callers choose the next free name by it."""
    path = place.location
    with contextlib.suppress(OSError):  # the save itself reports the error
        if isinstance(path, Path) and not path.exists():
            path.mkdir(parents=True)
            return True
    return False


def _complete(save: Save, made: bool) -> None:
    try:
        save.complete()
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # removed meanwhile, or not empty: another save uses it
                Path(str(save.path)).rmdir()
        raise

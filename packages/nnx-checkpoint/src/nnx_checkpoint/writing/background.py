"""Save in the background.

Planning, hashing, writing and committing happen in the thread, over a process group of their own, because
two threads must not use one group.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import all_reduce

from nnx_base.ranks import background_group, control_group
from nnx_base.shard import Shard
from nnx_checkpoint.format import inflight
from nnx_checkpoint.format.inflight import PendingSave
from nnx_checkpoint.storage import Location, Place
from nnx_checkpoint.writing.copy import Arena
from nnx_checkpoint.writing.writer import Save, SaveRequest

_arena = Arena()


def save_async(
    path: Location,
    *,
    tensors: Mapping[str, Shard],
    objects: Mapping[str, Any],
    rank_objects: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    state_dict_type: Literal["sharded", "deduped"] = "deduped",
    provenance: Mapping[str, Any] | None = None,
    opaque: Literal["error", "pickle"] = "error",
    keep_previous: int = 0,
    collective: bool = True,
) -> PendingSave:
    """Copy what is to be saved, and write the checkpoint in the background.

    Takes the arguments of `save`, in this module. All of them may be changed as soon as this returns.
    A save that is still in flight is waited for first. The copy takes host memory as large as this
    rank's tensors, which is kept for the next save.

    Returns:
        The save in flight: ask it with ``done()``, or ``wait()`` for it, on every rank. If nobody does,
        the next save raises its error; Python waits for it at exit.

    Raises:
        CheckpointError: The save before this one failed, or in a single process, something cannot be
            saved. What only some ranks cannot save is raised on every rank, by `PendingSave.wait`.
    """
    request = SaveRequest(
        path=path,
        tensors=tensors,
        objects=objects,
        rank_objects=rank_objects,
        aliases=dict(aliases or {}),
        mode=state_dict_type,
        provenance=copy.deepcopy(dict(provenance or {})),
        opaque=opaque,
        keep_previous=keep_previous,
        collective=collective,
    )
    group = background_group() if collective else None
    save = Save(request, group)
    save.follow_previous()
    try:
        save.capture(_arena.stage)
    except Exception as error:
        if group is None:
            raise
        save.fail(error)
    made = save.rank == 0 and _make_directory(save.path)
    return inflight.start(str(path), partial(_complete, save, made), collective=group is not None)


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

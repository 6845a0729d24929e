"""A file system with a planned event at one operation, and the guarantees that must hold afterwards.

Every operation of a save on a file system goes through functions of `os` and `fcntl`. They are patched so
that an event happens right before a call: a disk error, another save, a signal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnx_checkpoint
from nnx_base.shard import Box, Shard, shard_of
from nnx_checkpoint.writing.collecting import collect_garbage
from nnx_core.errors import CheckpointError

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE)
_IN_OS = "open close write pwrite pread ftruncate fsync replace mkdir unlink rmdir listdir scandir stat fstat"
_MODULES = dict.fromkeys(_IN_OS.split(), os) | {"flock": fcntl, "fcntl": fcntl}
_STANDING = (
    "is intact.",
    "committed and intact",
    "at this path, intact",
    "Nothing was changed at this path.",
)


@contextlib.contextmanager
def meddled(act: Callable[[str, int], None] = lambda name, number: None) -> Iterator[Counter[str]]:
    """Call a function before each operation within the block, with the operation's name and its count so far.

    The operation raises the function's errors. ``close`` closes the file all the same, as the system does.
    """
    real = {name: getattr(module, name) for name, module in _MODULES.items()}
    calls: Counter[str] = Counter()
    lock = threading.RLock()  # a signal may come while it is held

    def patched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                calls[name] += 1
                number = calls[name]
            try:
                act(name, number)
            except OSError:
                if name == "close":
                    real[name](*args)
                raise
            return real[name](*args, **options)

        return call

    for name, module in _MODULES.items():
        setattr(module, name, patched(name))
    try:
        yield calls
    finally:
        for name, module in _MODULES.items():
            setattr(module, name, real[name])


def save(path: Path, version: int, *, rank: int = 0, size: int = 1, in_background: bool = False) -> None:
    """Save a state in which every number is the version."""
    rows = 8 // size
    box = Box((rank * rows, 0), (rows, 16))
    tensors = {"w": Shard((8, 16), torch.int64, (box,), (torch.full(box.size, version),))}
    tensors["replicated"] = shard_of(torch.full((3,), version))
    state: dict[str, Any] = {"objects": {"version": version}, "rank_objects": {"v": version}}
    if in_background:
        nnx_checkpoint.save_async(nnx_checkpoint.SaveRequest(path, tensors=tensors, **state)).wait()
    else:
        nnx_checkpoint.save(path, tensors=tensors, **state)


def version_at(path: Path) -> int:
    """The version at a path, after making sure that every number in it is of that version."""
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    version = int(checkpoint.objects["version"])
    for name in checkpoint.tensors:
        assert bool((checkpoint.read(name) == version).all()), f"{name} is not of version {version}"
    for rank in range(checkpoint.world_size):
        assert checkpoint.rank_objects(rank) == {"v": version}
    return version


def fail_once(path: Path, version: int, fault: tuple[str, int, int, bool], saving: Callable[[], None]) -> int:
    """Save over a version while the disk fails, check the guarantees, and return the version on disk.

    Args:
        path: The path of the existing version.
        version: The existing version.
        fault: The function that fails, the number of its first failing call, the error number, and True if
                    all later calls fail as well.
        saving: Saves the next version.

    Returns:
        The version on disk; 0 if the save did not reach that call.
    """
    name, first, code, lasts = fault
    failed = 0

    def act(called: str, number: int) -> None:
        nonlocal failed
        if called == name and (number == first or (lasts and number > first)):
            failed += 1
            raise OSError(code, os.strerror(code))

    error = None
    with meddled(act):
        try:
            saving()
        except CheckpointError as caught:
            error = caught
    found = version_at(path)
    if not failed:
        assert (error, found) == (None, version + 1)
        return 0
    assert found in (version, version + 1)
    assert nnx_checkpoint.verify(path) == []
    if error is None:
        assert found == version + 1
    else:
        assert os.strerror(code) in error.message
        assert any(standing in error.message for standing in _STANDING), error
        if "Either the new or the previous checkpoint is" not in error.message:  # the disk could not be asked
            assert found == version + ("The new checkpoint is" in error.message)
    return found


def fail_everywhere(
    path: Path, *, in_background: bool, full: bool, every: int = 1
) -> tuple[int, dict[str, int], set[str]]:
    """Let every operation of a save fail in turn: once, and permanently.

    Args:
        path: The path to save to.
        in_background: Use `save_async`.
        full: Try each fault with each error; otherwise the errors alternate.
        every: Try only each n-th fault.

    Returns:
        The number of faults, the number of calls of each function in a save, and the files left beside the
        checkpoint in the end.
    """
    version = 2
    save(path, 1, in_background=in_background)
    with meddled() as calls:
        save(path, 2, in_background=in_background)
    counts, tried = dict(calls), 0
    faults = [
        (name, number, lasts)
        for name, count in counts.items()
        for number in range(1, count + 1)
        for lasts in (False, True)
    ]
    for place, (name, number, lasts) in enumerate(faults[::every]):
        for code in ERRNOS if full else [ERRNOS[place % len(ERRNOS)]]:
            following = version + 1
            found = fail_once(
                path,
                version,
                (name, number, code, lasts),
                lambda following=following: save(path, following, in_background=in_background),
            )
            tried += found > 0
            version = found or following
            collect_garbage(path)
            version += 1
            save(path, version, in_background=in_background)
            assert version_at(path) == version
            left = {entry.name for entry in path.iterdir()}
            assert len(left) == 2, (name, number, lasts, left)
    return tried, counts, left


def fail_on_one_rank(path: str) -> tuple[int, int]:
    """Let the operations of a save fail in turn on one rank of two; both ranks must get the same error.

    Args:
        path: The path to save to.

    Returns:
        The number of faults, and the number of those that failed the save.
    """
    where, rank, size = Path(path), dist.get_rank(), dist.get_world_size()
    save(where, 1, rank=rank, size=size)
    with meddled() as calls:
        save(where, 2, rank=rank, size=size)
    counts: list[Any] = [None] * size
    dist.all_gather_object(counts, dict(calls))
    faults = [
        (victim, name, number)
        for victim in range(size)
        for name, count in counts[victim].items()
        for number in range(1, count + 1)
    ]
    version, failures = 2, 0
    for place, (victim, name, number) in enumerate(faults):
        code = ERRNOS[place % len(ERRNOS)]

        def act(called: str, count: int, wanted: tuple[str, int] = (name, number), code: int = code) -> None:
            if (called, count) == wanted:
                raise OSError(code, os.strerror(code))

        error = ""
        with meddled(act) if rank == victim else contextlib.nullcontext():
            try:
                save(where, version + 1, rank=rank, size=size)
            except CheckpointError as caught:
                error = str(caught)
        found = version_at(where)
        seen: list[Any] = [None] * size
        dist.all_gather_object(seen, (error, found))
        assert seen == [seen[0]] * size, seen
        assert found == version + 1 if not error else found in (version, version + 1)
        assert not error or os.strerror(code) in error
        failures += bool(error)
        version = found + 1
        save(where, version, rank=rank, size=size)
        dist.barrier()
    assert nnx_checkpoint.verify(where) == []
    return len(faults), failures

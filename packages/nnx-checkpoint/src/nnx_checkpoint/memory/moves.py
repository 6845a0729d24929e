"""Send files between the memories of hosts, from mapped file to mapped file.

Nothing is copied on the way but by the network: the kernel reads and writes the files' own pages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nnx_base.ranks import rank_and_size
from nnx_checkpoint.storage.files import explained

__all__ = ["Move", "move", "prepare"]


@dataclass(frozen=True, slots=True)
class Move:
    """A file that one rank sends to another.

    Attributes:
        file: Its name in the directory of both.
        size: Its length in bytes.
        source: The rank that has it.
        target: The rank that gets it.
        number: A number that no other move of the same call has.
    """

    file: str
    size: int
    source: int
    target: int
    number: int


def prepare(moves: Sequence[Move], directory: Path, rank: int) -> None:
    """Reserve the memory of the files that this rank gets.

    Without this, a full memory would kill the process when it writes to a mapped page.

    Raises:
        CheckpointError: The memory is full.
    """
    for each in moves:
        if each.target == rank:
            path = directory / each.file
            with explained("write", path):
                directory.mkdir(exist_ok=True)
                path.unlink(missing_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    if each.size:
                        os.posix_fallocate(fd, 0, each.size)
                finally:
                    os.close(fd)


def move(moves: Sequence[Move], directory: Path, group: dist.ProcessGroup | None) -> None:
    """Send and receive files that `prepare` made. Collective over the ranks of the moves.

    Args:
        moves: At least the moves from and to this rank.
        directory: The directory of the files, on this rank.
        group: The ranks.
    """
    rank, _ = rank_and_size(group)
    works = []
    for each in moves:
        if each.size and rank in (each.source, each.target):
            path = directory / each.file
            with explained("read", path):
                data = torch.from_numpy(np.memmap(path, np.uint8, mode="r+", shape=(each.size,)))
            if each.source == rank:
                work = dist.isend(data, group=group, group_dst=each.target, tag=each.number)
            else:
                work = dist.irecv(data, group=group, group_src=each.source, tag=each.number)
            works.append(work)
    for work in works:
        if work is not None:
            work.wait()

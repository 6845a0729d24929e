"""Run a unit whose ranks are threads of one process, with collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nnx_core.communicator import Communicator

T = TypeVar("T")


class _Meeting:
    """A place where the threads of one unit exchange values."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return `read` of every thread's value, before any thread may change its own."""
        self.barrier.wait()
        self.slots[rank] = value
        self.barrier.wait()
        result = read(self.slots)
        self.barrier.wait()
        return result


class ThreadCommunicator(Communicator):
    """Collectives between threads of one process; made by `run_as_ranks`."""

    threaded = True

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = len(meeting.slots)

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, tensor, _sum)

    @override
    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return self._meeting.exchange(self.rank, tensor, lambda tensors: torch.cat(tensors, dim=dim))

    @override
    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank].contiguous()

    @override
    def all_to_all(self, tensor: Tensor, split_dim: int, cat_dim: int) -> Tensor:
        def join(tensors: list[Tensor]) -> Tensor:
            return torch.cat([other.chunk(self.size, split_dim)[self.rank] for other in tensors], dim=cat_dim)

        return self._meeting.exchange(self.rank, tensor, join)

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return the same random tensor on every rank: threads share a generator, so the first one draws."""
        drawn = draw() if self.rank == 0 else torch.empty(0)
        return self._meeting.exchange(self.rank, drawn, lambda tensors: tensors[0].clone())


def _sum(tensors: list[Tensor]) -> Tensor:
    first, *others = tensors
    total = first.clone(memory_format=torch.contiguous_format)
    for other in others:
        total += other
    return total


def run_as_ranks(size: int, job: Callable[[Communicator], T]) -> list[T]:
    """Run a job once for each rank of a unit, in threads of this process, and return their results.

    Raises:
        Exception: The error of the first failing rank; the others are released.
    """
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        try:
            return job(ThreadCommunicator(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in (*real, *errors):
            raise error
        return [future.result() for future in futures]

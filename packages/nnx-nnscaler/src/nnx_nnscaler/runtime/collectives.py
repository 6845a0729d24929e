"""The collectives of one plan unit, and conversions of placements with the matching ones for gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from nnx_core.calibration import Communicator, GroupCommunicator
from nnx_core.errors import UnsupportedError

__all__ = [
    "Communicator",
    "Conversions",
    "GroupCommunicator",
    "run_as_ranks",
]

# --- between threads ------------------------------------------------------------------------------
# The collectives of a unit whose ranks are threads of one process, with which a program is checked against
# the user's own forward for any number of ranks.


T = TypeVar("T")


class _Meeting:
    """Where the threads of one unit put down what the others read."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """What a thread reads from every thread's value, before any of them may change again."""
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

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, tensor, _sum)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return self._meeting.exchange(self.rank, tensor, lambda tensors: torch.cat(tensors, dim=dim))

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.all_reduce(tensor).chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, tensor: Tensor, split_dim: int, cat_dim: int) -> Tensor:
        def join(tensors: list[Tensor]) -> Tensor:
            return torch.cat([other.chunk(self.size, split_dim)[self.rank] for other in tensors], dim=cat_dim)

        return self._meeting.exchange(self.rank, tensor, join)

    def drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        """The same random tensor on every rank: threads share one generator, so the first draws for all."""
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
        Exception: Raised as on the first failing rank; the others are released.
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


# --- conversions of placements --------------------------------------------------------------------
# Changing a tensor's placement inside an emitted program, with the matching collective for its gradient.
#
# Methods are named ``forward__backward``. ``dim`` and ``groups`` are those of the shard that is made or
# taken apart, as in `nnx_nnscaler.plan.program_plan.S`.


_Change = Callable[[Tensor], Tensor]


class _Converted(torch.autograd.Function):
    """Applies one change to the value and another to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: _Change, backward: _Change) -> Tensor:
        ctx.change = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if gradient.requires_grad:  # with `create_graph`
            return _Once.apply(gradient, ctx.change), None, None  # type: ignore[no-untyped-call]
        return ctx.change(gradient), None, None


class _Once(torch.autograd.Function):
    """A gradient whose own gradient would be wrong: what the ranks' summands of it are, nobody knows."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, change: _Change) -> Tensor:
        return change(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise UnsupportedError(
            "a second derivative is taken through a forward that several ranks compute in parts.",
            remedy="Use strategy 'nnscaler_dp', under which every rank computes the whole forward.",
        )


class Conversions:
    """The placement changes of one rank of a unit.

    Args:
        communicator: The unit's collectives.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.size

    # --- without gradient ---------------------------------------------------------------------

    def part(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """This rank's part of a whole tensor."""
        if groups == 1:
            return tensor.chunk(self.size, dim)[self.rank].contiguous()
        return _grouped(tensor, dim, groups).chunk(self.size, dim + 1)[self.rank].flatten(dim, dim + 1)

    def whole(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """The whole tensor, from every rank's part."""
        if groups == 1:
            return self.communicator.all_gather(tensor, dim)
        grouped = _grouped(tensor, dim, groups)
        return self.communicator.all_gather(grouped, dim + 1).flatten(dim, dim + 1)

    def sum_part(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """This rank's part of the sum over the ranks."""
        if groups == 1:
            return self.communicator.reduce_scatter(tensor, dim)
        grouped = _grouped(tensor, dim, groups)
        return self.communicator.reduce_scatter(grouped, dim + 1).flatten(dim, dim + 1)

    # --- with gradient ------------------------------------------------------------------------

    def keep__all_reduce(self, tensor: Tensor) -> Tensor:
        """The same value; its gradient is summed over the ranks, which each used it for their part."""
        return self._converted(tensor, _same, self.communicator.all_reduce)

    def keep__divide(self, tensor: Tensor) -> Tensor:
        """The same value; its gradient is divided by the ranks, because the reducer will sum it over them."""
        return self._converted(tensor, _same, lambda gradient: gradient / self.size)

    def split__all_gather(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """R to S: this rank's part; its gradient is gathered."""
        return self._converted(
            tensor, lambda t: self.part(t, dim, groups), lambda g: self.whole(g, dim, groups)
        )

    def all_gather__split(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """S to R: the whole; of its complete gradient this rank keeps its part."""
        return self._converted(
            tensor, lambda t: self.whole(t, dim, groups), lambda g: self.part(g, dim, groups)
        )

    def all_gather__reduce_scatter(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """S to R: the whole; its partial gradients are summed, and this rank keeps its part."""
        return self._converted(
            tensor, lambda t: self.whole(t, dim, groups), lambda g: self.sum_part(g, dim, groups)
        )

    def all_reduce__keep(self, tensor: Tensor) -> Tensor:
        """P to R: the sum; its gradient is complete."""
        return self._converted(tensor, self.communicator.all_reduce, _same)

    def all_reduce__all_reduce(self, tensor: Tensor) -> Tensor:
        """P to R: the sum; its partial gradients are summed too."""
        return self._converted(tensor, self.communicator.all_reduce, self.communicator.all_reduce)

    def reduce_scatter__all_gather(self, tensor: Tensor, dim: int, groups: int = 1) -> Tensor:
        """P to S: this rank's part of the sum; its gradient is gathered."""
        return self._converted(
            tensor, lambda t: self.sum_part(t, dim, groups), lambda g: self.whole(g, dim, groups)
        )

    def all_to_all__all_to_all(
        self, tensor: Tensor, dim: int, to_dim: int, groups: int = 1, to_groups: int = 1
    ) -> Tensor:
        """S to S along another dim; its gradient goes the way back."""
        return self._converted(
            tensor,
            lambda t: self._exchanged(t, dim, to_dim, groups, to_groups),
            lambda g: self._exchanged(g, to_dim, dim, to_groups, groups),
        )

    def _exchanged(self, tensor: Tensor, dim: int, to_dim: int, groups: int, to_groups: int) -> Tensor:
        if groups == to_groups == 1:
            return self.communicator.all_to_all(tensor, to_dim, dim)
        return self.part(self.whole(tensor, dim, groups), to_dim, to_groups)

    def _converted(self, tensor: Tensor, forward: _Change, backward: _Change) -> Tensor:
        if torch.is_grad_enabled() and tensor.requires_grad:
            result: Tensor = _Converted.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
            return result
        return forward(tensor)


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """The same tensor with a dim cut in two: groups, and what is in each."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])

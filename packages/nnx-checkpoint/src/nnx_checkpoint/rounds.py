"""Rounds between the ranks and their coordinator in which every failure reaches every rank.

A save is a few rounds: describe, plan, then write and commit. In each, all ranks do something, the
coordinator (rank 0 of the group) sees all results and answers each rank. A rank that fails still takes
part, so that nobody waits for it, and all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from socket import gethostname
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nnx_checkpoint.collective import gather_object
from nnx_checkpoint.errors import CheckpointError, NnxError

__all__ = ["deliver", "exchange", "rank_and_size", "share"]

T = TypeVar("T")
R = TypeVar("R")


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group and the number of ranks; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def exchange(
    group: dist.ProcessGroup | None,
    work: Callable[[], T],
    decide: Callable[[list[T]], list[R]],
    *,
    doing: str,
    give_up: Callable[[], str] = str,
) -> R:
    """Run one round.

    Args:
        group: The ranks that take part, over a CPU backend; None for this process alone.
        work: What every rank does. It must not communicate.
        decide: Makes one answer for each rank out of all results, in rank order, on the coordinator.
        doing: The purpose of the round, used in messages.
        give_up: Called on the coordinator if anything failed, before the others learn of it. It says how
            things stand, which the error repeats.

    Returns:
        The coordinator's answer to this rank.

    Raises:
        CheckpointError: Some rank's work or the coordinator's decision failed; on every rank alike.
    """
    outcome = _attempt(work)
    if group is None:
        answers = _decide([outcome], decide, doing, give_up)
        answer: Any = answers[0]
        if isinstance(answer, _Failure):
            if answer.error is answer.raised:
                raise answer.raised
            raise answer.raised from answer.error
        return cast(R, answer)
    answer = _travel(group, outcome, decide, doing, give_up)
    if isinstance(answer, _Failure):
        cause = outcome.error if isinstance(outcome, _Failure) else None
        raise answer.raised from cause
    return cast(R, answer)


class _Failure:
    """An error on its way to the other ranks; the original stays behind."""

    def __init__(self, error: Exception, host: str = "") -> None:
        self.error: Exception | None = error
        self.raised: NnxError = error if isinstance(error, NnxError) else _wrapped(error)
        self.host = host or gethostname()

    def __reduce__(self) -> tuple[object, ...]:
        return (_Failure, (self.raised, self.host))


def _wrapped(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"unexpected {type(error).__name__}: {error}.", remedy="Please report this as a bug of nnx."
    )


def _attempt(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:
        return _Failure(error)


def _travel(
    group: dist.ProcessGroup,
    outcome: T | _Failure,
    decide: Callable[[list[T]], list[R]],
    doing: str,
    give_up: Callable[[], str],
) -> R | _Failure:
    received: list[Any] = [None]
    with _explained(doing):
        gathered = gather_object(outcome, group)
        answers = _decide(gathered, decide, doing, give_up) if gathered is not None else None
        dist.scatter_object_list(received, cast("list[Any]", answers), group=group, group_src=0)
    return cast("R | _Failure", received[0])


def share(group: dist.ProcessGroup | None, value: T | None, *, doing: str) -> T:
    """Give the coordinator's value to every rank; what the others pass does not count."""
    if group is None:
        return cast(T, value)
    values: list[Any] = [value]
    with _explained(doing):
        dist.broadcast_object_list(values, group=group, group_src=0)
    return cast(T, values[0])


def deliver(
    group: dist.ProcessGroup, outgoing: Sequence[bytes], senders: Sequence[int], *, doing: str
) -> list[bytes]:
    """Send large messages to the coordinator, from few ranks, without every rank taking part.

    Args:
        group: The ranks.
        outgoing: The bytes that this rank sends; the coordinator itself sends nothing.
        senders: On the coordinator: the rank of each message, in an order that is that of `outgoing` for
            each rank.
        doing: The purpose of this, used in messages.

    Returns:
        The messages, on the coordinator.
    """
    with _explained(doing):
        for message in outgoing:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            dist.send(torch.tensor([len(message)]), group=group, group_dst=0)
            dist.send(data, group=group, group_dst=0)
        return [_receive(group, rank) for rank in senders]


def _receive(group: dist.ProcessGroup, rank: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=rank)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=rank)
    return data.numpy().tobytes()


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"{doing} stopped because a rank left: {error}.",
            remedy="Look for the first error in the logs of the other ranks; the last checkpoint is intact.",
        ) from error


def _decide(
    outcomes: list[T | _Failure],
    decide: Callable[[list[T]], list[R]],
    doing: str,
    give_up: Callable[[], str],
) -> list[R | _Failure]:
    failed = [(rank, item) for rank, item in enumerate(outcomes) if isinstance(item, _Failure)]
    if not failed:
        try:
            return cast("list[R | _Failure]", decide(cast("list[T]", outcomes)))
        except Exception as error:
            failure = _Failure(error)
    elif len(outcomes) == 1:
        failure = failed[0][1]
    else:
        failure = _Failure(_named(failed, doing))
    failure.raised.add(give_up())
    return [failure] * len(outcomes)


def _named(failed: list[tuple[int, _Failure]], doing: str) -> NnxError:
    rank, first, host = failed[0][0], failed[0][1].raised, failed[0][1].host
    where = f" on {host}" if host != gethostname() else ""
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    return type(first)(f"{doing} failed on rank {rank}{where}{others}: {first.message}", remedy=first.remedy)

"""Rounds between the ranks and their coordinator in which every failure reaches every rank.

A save is two rounds: describe and plan, then write and commit. In each, all ranks do something, the
coordinator (rank 0 of the group) sees all results and answers each rank. A rank that fails still takes
part, so that nobody waits for it, and all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from nnx.errors import CheckpointError, NnxError

__all__ = ["exchange", "rank_and_size"]

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
    give_up: Callable[[], None] = lambda: None,
) -> R:
    """Run one round.

    Args:
        group: The ranks that take part, over a CPU backend; None for this process alone.
        work: What every rank does. It must not communicate.
        decide: What the coordinator makes of all results, in rank order: one answer for each rank.
        doing: What the round does, for messages.
        give_up: Called on the coordinator if anything failed, before the others learn of it.

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
            raise outcome.error if isinstance(outcome, _Failure) and outcome.error else answer.raised
        return cast(R, answer)
    answer = _travel(group, outcome, decide, doing, give_up)
    if isinstance(answer, _Failure):
        cause = outcome.error if isinstance(outcome, _Failure) else None
        raise answer.raised from cause
    return cast(R, answer)


class _Failure:
    """An error on its way to the other ranks; the original stays behind."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error
        self.raised: NnxError = error if isinstance(error, NnxError) else _wrapped(error)

    def __reduce__(self) -> tuple[object, ...]:
        return (_Failure, (self.raised,))


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
    give_up: Callable[[], None],
) -> R | _Failure:
    rank, size = rank_and_size(group)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    received: list[Any] = [None]
    try:
        dist.gather_object(outcome, gathered, group=group, group_dst=0)
        answers = _decide(gathered, decide, doing, give_up) if gathered is not None else None
        dist.scatter_object_list(received, cast("list[Any]", answers), group=group, group_src=0)
    except RuntimeError as error:
        raise CheckpointError(
            f"{doing} stopped because a rank left: {error}.",
            remedy="Look for the first error in the logs of the other ranks; the last checkpoint is intact.",
        ) from error
    return cast("R | _Failure", received[0])


def _decide(
    outcomes: list[T | _Failure],
    decide: Callable[[list[T]], list[R]],
    doing: str,
    give_up: Callable[[], None],
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
    give_up()
    return [failure] * len(outcomes)


def _named(failed: list[tuple[int, _Failure]], doing: str) -> NnxError:
    rank, first = failed[0][0], failed[0][1].raised
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    return type(first)(f"{doing} failed on rank {rank}{others}: {first.message}", remedy=first.remedy)

"""Announce a wait for other ranks before it begins, so that errors can name it.

A rank that waits in a collective cannot answer the ranks that wait for it elsewhere.
`nnx_core.agree.stall_watch` reads the announced waits in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class Wait:
    """A wait of this process for other ranks.

    Args:
        doing: Follows "rank 1" in errors.
        asker: The object that waits; `newest_wait` can leave its waits out.
    """

    __slots__ = ("asker", "doing")

    def __init__(self, doing: str, asker: object = None) -> None:
        self.doing = doing
        self.asker = asker


_waits: list[Wait] = []
"""The open waits of all threads: autograd has threads of its own on a GPU."""


@contextmanager
def announced(doing: str, *, asker: object = None) -> Iterator[None]:
    """Announce in a context that this process waits for other ranks.

    Args:
        doing: Follows "rank 1" in errors, such as "waits for the gather of layers.0".
        asker: See `Wait`.
    """
    wait = Wait(doing, asker)
    _waits.append(wait)
    try:
        yield
    finally:
        _waits.remove(wait)


def wait_for_collective(work: dist.Work, name: str) -> None:
    """Wait for a collective that was launched with ``async_op``.

    Args:
        work: The handle of the collective.
        name: Names it in the errors of other ranks, such as "the gather of layers.0".
    """
    with announced(f"waits for {name}"):
        work.wait()


def newest_wait(*, other_than: object) -> Wait | None:
    """Return the wait that began last.

    Args:
        other_than: The object whose own waits do not count.
    """
    return next((wait for wait in reversed(_waits.copy()) if wait.asker is not other_than), None)

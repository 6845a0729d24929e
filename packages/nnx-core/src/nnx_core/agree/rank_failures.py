"""Post the error of one rank in the store, so that every rank raises it.

A posted error is a line: its kind, the message, and a remedy that may follow. The kind selects the error:

- ``differ``: the ranks do different things (`UnsupportedError`).
- ``lost``: a rank gives no sign of life (`RankLostError`).
- ``ended``: a rank ended with an error of its own (`NnxError` on the others).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeAlias

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from nnx_base.ranks import ask_store
from nnx_core.errors import NnxError, RankLostError, UnsupportedError, is_lost_connection

Remedy: TypeAlias = "str | Callable[[str], str]"
"""A remedy, or a function that makes one of an error's message."""

ANSWER = 5.0
"""Seconds in which a store that can be reached has answered, on a machine under load too."""

REMEDY = "\x1e"
"""Stands between a message and its remedy in the store: no message has this character."""

LAST_BATCH = ", its last batch"
"""Ends the name of the step with which a rank's evaluation ends, so that ranks with more batches notice."""

_READ_WITHIN = 2.0
"""Seconds in which the other ranks read a posted error: four looks of their `StallWatch`."""

_REMEDY_OF_BATCHES = (
    "Give every rank as many batches to evaluate, with `limit_val_batches` (or that of the stage) or a "
    "sampler that pads; under 'ddp' and 'nnx_deepspeed_2' the numbers may differ."
)
_REMEDY_OF_ERRORS = "Its error, in its own output, is the cause."


class RankFailures:
    """The first error that a rank posts, for all ranks of the world.

    Args:
        key: Begins the keys in the store; empty where there is one process.
        remedy: Ends the message of an error that was posted without a remedy; or a function that makes it of
            the message.

    Attributes:
        cause: The error that `notice` has read; empty until then.
    """

    def __init__(self, key: str, remedy: Remedy) -> None:
        self._key, self._remedy = key, remedy
        self.cause = ""

    def report(self, error: BaseException) -> None:
        """Post an error of this rank's own, unless it comes of a lost connection.

        Args:
            error: The error, which this rank is about to raise.
        """
        if is_of_connection(error):
            return
        text = f"ended rank {dist.get_rank()} ended with {type(error).__name__}: {error}"
        if isinstance(error, UnsupportedError):
            text = f"differ {error.message}{REMEDY}{error.remedy}"
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            ask_store(lambda store: store.compare_set(f"{self._key}/failed", "", text), timeout=ANSWER)

    def fail(
        self,
        store: Store,
        message: str,
        readers: Sequence[int],
        *,
        lost: bool = False,
        remedy: str = "",
    ) -> NoReturn:
        """Post an error and raise it, once the ranks that cannot know of it have read it.

        Args:
            store: The store of the process group, which may go with this rank: so it waits a little.
            message: The message of the error.
            readers: The ranks that did not ask, and so learn of the error only from the store.
            lost: True if a rank gives no sign of life.
            remedy: Takes the place of the usual one.
        """
        if LAST_BATCH in message:
            remedy = _REMEDY_OF_BATCHES
        posted = f"{'lost' if lost else 'differ'} {message}" + (f"{REMEDY}{remedy}" if remedy else "")
        store.set(f"{self._key}/failed", posted)
        deadline = time.monotonic() + _READ_WITHIN
        while time.monotonic() < deadline:
            if all(store.check([f"{self._key}/read/{rank}"]) for rank in readers):
                break
            time.sleep(0.05)
        raise self.error(posted)

    def error(self, posted: str) -> NnxError:
        """Make the error that every rank raises.

        Args:
            posted: The line in the store.
        """
        kind, _, rest = posted.partition(" ")
        if kind == "lost":
            return RankLostError(rest)
        if kind == "ended":
            return NnxError(f"{rest}.", remedy=_REMEDY_OF_ERRORS)
        message, _, remedy = rest.partition(REMEDY)
        if not remedy:
            remedy = self._remedy if isinstance(self._remedy, str) else self._remedy(message)
        return UnsupportedError(message, remedy=remedy)

    def read(self, store: Store) -> str:
        """Return the line in the store; empty if no rank has posted an error."""
        key = f"{self._key}/failed"
        return store.get(key).decode() if store.check([key]) else ""

    def read_if_reachable(self) -> str:
        """Return the line in the store; empty if the store cannot be reached any more."""
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            return ask_store(self.read, timeout=ANSWER)
        return ""

    def notice(self, store: Store) -> bool:
        """Keep another rank's error as `cause`, for this rank may be waiting. Return True if there is one."""
        self.cause = self.read(store)
        if self.cause:
            store.set(f"{self._key}/read/{dist.get_rank()}", "")
        return bool(self.cause)


def is_of_connection(error: BaseException) -> bool:
    """Return True if an error says no more than that another rank is gone."""
    return is_lost_connection(error) or isinstance(error, dist.DistError)

"""Post the error of one rank in the store, so that every rank raises it.

A posted error is a line: its kind, the message, and a remedy that may follow. The kind selects the error:

- ``differ``: the ranks do different things (`UnsupportedError`).
- ``lost``: a rank shows no sign of life (`RankLostError`).
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
"""A remedy, or a function that makes it from an error's message."""

ANSWER = 5.0
"""Seconds in which a reachable store answers, also on a loaded machine."""

REMEDY = "\x1e"
"""Separates a message and its remedy in the store: no message has this character."""

LAST_BATCH = ", its last batch"
"""Ends the name of a rank's last evaluation step, so that ranks with more batches notice."""

_READ_WITHIN = 2.0
"""Seconds in which the other ranks read a posted error: four polls of their `StallWatch`."""

_REMEDY_OF_BATCHES = (
    "Give every rank as many batches to evaluate, with `limit_val_batches` (or that of the stage) or a "
    "sampler that pads; under 'ddp' and 'nnx_deepspeed_2' the numbers may differ."
)
_REMEDY_OF_ERRORS = "Its error, in its own output, is the cause."


class RankFailures:
    """The first error that a rank posts, for all ranks of the world.

    Args:
        key: The prefix of the keys in the store; empty with one process.
        remedy: The remedy of an error that was posted without one, or a function that makes it from the
            message.

    Attributes:
        cause: The error that `notice` has read; empty until then.
    """

    def __init__(self, key: str, remedy: Remedy) -> None:
        self._key, self._remedy = key, remedy
        self.cause = ""

    def report(self, error: BaseException) -> None:
        """Post an error of this rank's own (unless a lost connection caused it).

        Args:
            error: The error, which this rank is about to raise.
        """
        # A lost connection is an effect of another rank's error, and must not hide that in the store.
        if is_of_connection(error):
            return
        text = f"ended rank {dist.get_rank()} ended with {type(error).__name__}: {error}"
        if isinstance(error, UnsupportedError):
            text = f"differ {error.message}{REMEDY}{error.remedy}"
        with suppress(RuntimeError):  # the rank that hosts the store is gone
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
        """Post an error, wait until the other ranks have read it, and raise it.

        Args:
            store: The store of the process group. It may end with this rank, hence the wait.
            message: The message of the error.
            readers: The ranks that did not ask, and read the error only from the store.
            lost: True if a rank shows no sign of life.
            remedy: Replaces the usual remedy.
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
        """Return the line in the store; empty if the store is unreachable."""
        with suppress(RuntimeError):  # the rank that hosts the store is gone
            return ask_store(self.read, timeout=ANSWER)
        return ""

    def notice(self, store: Store) -> bool:
        """Store another rank's error as `cause`; return True if there is one. This rank may be waiting."""
        self.cause = self.read(store)
        if self.cause:
            store.set(f"{self._key}/read/{dist.get_rank()}", "")
        return bool(self.cause)


def is_of_connection(error: BaseException) -> bool:
    """Return True if an error only reports that another rank is gone."""
    return is_lost_connection(error) or isinstance(error, dist.DistError)

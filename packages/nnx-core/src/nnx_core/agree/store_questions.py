"""Ask the other ranks through the store of the process group what they are about to do.

A question has a number. Each rank that reaches it writes its answer and polls for the answers of the others.
The keys of question 3 begin with ``KEY/FIRST RANK/3``:

- ``asked``: a rank has reached the question.
- ``RANK``: the answer of a rank.
- ``noticed/RANK``: the `nnx_core.agree.stall_watch.StallWatch` of an absent rank has seen the question.
- ``elsewhere``: the name of an absent rank, and of its wait in another collective.
- ``ended``: the name of a rank that ended with an error before it reached the question.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from socket import gethostname

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from nnx_base.ranks import (
    all_gather_object,
    ask_store,
    control_group,
    group_timeout,
    is_distributed,
)
from nnx_core.agree.announced_waits import announced
from nnx_core.agree.rank_failures import ANSWER, REMEDY, RankFailures, Remedy
from nnx_core.errors import NnxError

_BETWEEN_STEPS = 600.0
"""Seconds that ranks may be apart between steps: one may save a large file or evaluate alone."""

_GRACE = 6.0
"""Seconds for a rank to raise its own error, which is more precise, before it raises a posted one."""

_SILENT_AFTER = 120.0
"""Seconds without a sign of its `StallWatch` after which a rank is lost: no code holds the GIL that long."""

_SHORT_PAUSES = (0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128)
"""Seconds between the first polls for answers: ranks in step answer within a few milliseconds."""

_LONG_PAUSE = 0.02
"""Seconds between all further polls: fifty per second and rank are no load for the store."""


class Questions:
    """Compare through the store what each rank is about to do.

    Collective: made by every rank at the same point.

    Args:
        remedy: The remedy of the error if ranks differ, or a function that makes it from the message.
        wait: Seconds that ranks may be apart within a step.
        ranks: The ranks that compare; None for all.

    Attributes:
        are_needed: True if there is another rank to compare with.
        ranks: The ranks that compare.
        asked: The number of questions until now.
        failures: The error that one rank posts for all.
    """

    def __init__(self, *, remedy: Remedy, wait: float, ranks: Sequence[int] | None) -> None:
        self._wait = wait
        self._key, self._hosts = "", list[str]()
        self.ranks = list(ranks or ())
        if is_distributed():
            keys, hosts = zip(
                *all_gather_object((uuid.uuid4().hex, gethostname()), control_group()), strict=True
            )
            self._key = f"nnx/order/{keys[0]}"
            self._hosts = list(hosts) if len(set(hosts)) > 1 else []
            self.ranks = self.ranks or list(range(dist.get_world_size()))
        self.are_needed = is_distributed() and len(self.ranks) > 1
        self.asked = 0
        self.failures = RankFailures(self._key, remedy)

    def ask(self, name: str, *, passed: int, in_step: bool, expected: str | None, cause: str = "") -> None:
        """Return once all ranks have reached the same collective.

        Args:
            name: The name of the collective that this rank has reached.
            passed: The number of collectives that this rank has reached; it must be equal on every rank.
            in_step: True if the ranks are within a step, where they are given less time.
            expected: The collective that the ranks agreed on before, for errors.
            cause: The reason of this rank for the collective, for errors.

        Raises:
            UnsupportedError: Another rank reaches another collective, or none.
            RankLostError: Another rank gives no sign of life, or the store cannot be reached.
        """
        self.asked += 1
        came = f"came to {name}{cause}" + (f", where {expected} was expected" if expected else "")
        operation = partial(
            self._compare, name=name, answer=f"{passed} {name}", came=came, cause=cause, in_step=in_step
        )
        with announced(f"came to {name}", asker=self):
            ask_store(operation, timeout=self._patience(in_step) + 2 * ANSWER)

    def _compare(self, store: Store, *, name: str, answer: str, came: str, cause: str, in_step: bool) -> None:
        rank = dist.get_rank()
        question = self._question(self.asked)
        keys = {other: f"{question}/{other}" for other in self.ranks}
        store.set(keys[rank], answer)
        store.set(f"{question}/asked", "")
        if self.asked > 2:  # all ranks that answered the last question have read the answers before it
            store.delete_key(f"{self._question(self.asked - 2)}/{rank}")
        differ = (
            "the ranks use different layers in one step"
            if in_step
            else "the ranks do different things between steps"
        )
        absent, where = self._wait_for(store, keys, question, in_step=in_step)
        if absent:
            self._refuse_absent(store, absent, where, f"{differ}: rank {rank} {came}", in_step=in_step)
        answers = [value.decode().split(" ", 1) for value in store.multi_get(list(keys.values()))]
        if any(one != answers[0] for one in answers):
            all_came = "; ".join(
                f"rank {other} came to {one[1]}{cause if other == rank else ''}"
                for other, one in zip(self.ranks, answers, strict=True)
            )
            self.failures.fail(store, f"{differ}: {all_came}.", self._others())

    def _wait_for(
        self, store: Store, keys: dict[int, str], question: str, *, in_step: bool
    ) -> tuple[list[int], str]:
        """Wait for the answers of all ranks.

        Returns:
            The ranks that have not answered, and the wait of one of them, if it is known.
        """
        begun = time.monotonic()
        deadline = begun + self._patience(in_step)
        silent_at = begun + _SILENT_AFTER
        answers = list(keys.values())
        # Ranks in step answer within milliseconds: the long pause, and reading errors, come after that.
        for pause in _SHORT_PAUSES:
            if store.check(answers):
                return [], ""
            time.sleep(pause)
        while not store.check(answers):
            waited = time.monotonic() - begun
            self._raise_what_was_posted(store, question, waited=waited, in_step=in_step)
            elsewhere = f"{question}/elsewhere"
            is_elsewhere = store.check([elsewhere])
            if is_elsewhere or time.monotonic() > min(deadline, silent_at):
                where = store.get(elsewhere).decode() if is_elsewhere else ""
                absent = [rank for rank, key in keys.items() if not store.check([key])]
                if where or time.monotonic() > deadline or self._silent(store, question, absent):
                    return absent, where
                silent_at = deadline
            time.sleep(_LONG_PAUSE)
        return [], ""

    def _raise_what_was_posted(self, store: Store, question: str, *, waited: float, in_step: bool) -> None:
        posted = self.failures.read(store)
        if posted and (not posted.startswith("ended ") or waited > _GRACE):
            raise self.failures.error(posted)
        ended = f"{question}/ended"
        if in_step and waited > _GRACE and store.check([ended]):
            raise NnxError(f"{store.get(ended).decode()}.", remedy="Its error is the cause.")

    def _refuse_absent(
        self, store: Store, absent: Sequence[int], where: str, came: str, *, in_step: bool
    ) -> None:
        patience = self._patience(in_step)
        silent = [] if where else self._silent(store, question=self._question(self.asked), absent=absent)
        if silent:
            seconds = min(patience, _SILENT_AFTER)
            message = f"{self._named(silent)} gave no sign of life for {seconds:.0f} s."
            self.failures.fail(store, message, self._others(), lost=True)
        where, _, remedy = where.partition(REMEDY)
        where = where or f"{self._named(absent)} did not come to it within {patience:.0f} s"
        self.failures.fail(store, f"{came}; {where}.", [*absent, *self._others()], remedy=remedy)

    def _question(self, number: int) -> str:
        """Return the prefix of a question's keys."""
        return f"{self._key}/{self.ranks[0]}/{number}"

    def _others(self) -> list[int]:
        """Return the ranks of the world that do not compare, and read errors only from the store."""
        return [rank for rank in range(dist.get_world_size()) if rank not in self.ranks]

    def _patience(self, in_step: bool) -> float:
        """Return the seconds to wait for a rank: no longer than a collective would."""
        return min(self._wait if in_step else max(self._wait, _BETWEEN_STEPS), group_timeout())

    def _named(self, ranks: Sequence[int]) -> str:
        """Name ranks in an error, with their machines where there are several."""
        named = [f"{rank} on {self._hosts[rank]}" if self._hosts else str(rank) for rank in ranks]
        return f"rank{'s' * (len(named) > 1)} {', '.join(named)}"

    def _silent(self, store: Store, question: str, absent: Sequence[int]) -> list[int]:
        """Return the absent ranks whose `StallWatch` runs and has not noticed the question."""
        return [
            rank
            for rank in absent
            if not store.check([f"{question}/noticed/{rank}"])
            and store.check([f"{self._key}/watch/{rank}"])
            and store.get(f"{self._key}/watch/{rank}") == b"looks"
        ]

    def post_end(self, error: BaseException) -> None:
        """Post for the next question that this rank ended with an error."""
        text = f"rank {dist.get_rank()} ended with {type(error).__name__}: {error}"
        key = f"{self._question(self.asked + 1)}/ended"
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            ask_store(lambda store: store.set(key, text), timeout=ANSWER)

    def leave(self) -> None:
        """Wait on rank zero, whose process may host the store, until the others have read it, for seconds."""
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            ask_store(self._leave, timeout=_GRACE + ANSWER)

    def _leave(self, store: Store) -> None:
        key, deadline = f"{self._key}/left", time.monotonic() + _GRACE
        left = store.add(key, 1)
        while dist.get_rank() == 0 and left < len(self.ranks) and time.monotonic() < deadline:
            if self.failures.read(store):
                return
            time.sleep(_SHORT_PAUSES[-1])
            left = store.add(key, 0)

    def post_watch(self, store: Store, state: str) -> None:
        """Post the state of this rank's `StallWatch`; ``"looks"`` means that it notices questions."""
        store.set(f"{self._key}/watch/{dist.get_rank()}", state)

    def notice(self, store: Store) -> Callable[[str], None] | None:
        """Notice a question that this rank has not reached.

        Returns:
            A function that posts the wait of this rank; None if there is no such question.
        """
        question = self._question(self.asked + 1)
        if not store.check([f"{question}/asked"]):
            return None
        store.set(f"{question}/noticed/{dist.get_rank()}", "")
        return lambda doing: store.set(f"{question}/elsewhere", f"rank {dist.get_rank()} {doing}")

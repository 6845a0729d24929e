"""Keep the ranks to one order of collectives, so that two different ones are never paired.

Where a layer's weights are gathered when its forward begins, ranks that come to different layers would mix up
their weights, abort or wait for each other. An engine calls `CollectiveOrder.arrive` before each collective,
which notices before anything is sent. `nnx_core.agree.store_questions` compares the ranks, and
`nnx_core.agree.stall_watch` answers for a rank that waits.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from nnx_core.agree.rank_failures import Remedy, is_of_connection
from nnx_core.agree.stall_watch import StallWatch
from nnx_core.agree.store_questions import Questions
from nnx_core.errors import NnxError

_PLACES = 50_000
"""Places, some 20 MB, after which all are forgotten and agreed on again: some models' steps never repeat."""

_running: weakref.ref[CollectiveOrder] | None = None
"""The order that began a step last. Those of earlier runs may still be alive, on some ranks only."""

_open: weakref.WeakSet[CollectiveOrder] = weakref.WeakSet()
"""The orders that compare now: a process may have several."""


def before_reduction(name: str) -> None:
    """Count a reduction in user code as part of the step, as that of ``self.log(..., sync_dist=True)``.

    A rank that leaves a layer out comes to it while the others wait in that layer's gather.

    Args:
        name: Names it in errors.
    """
    order = None if _running is None else _running()
    if order is not None and order.in_step:
        order.arrive(name)


def report_failure(error: BaseException) -> None:
    """Let the other ranks know that this one ends with an error of its own, wherever they wait for it."""
    for order in list(_open):
        order.report(error)


def end_run() -> None:
    """A run is over, or another begins: user code's reductions no longer belong to a step of it."""
    global _running  # noqa: PLW0603 - of this process
    order = None if _running is None else _running()
    _running = None
    if order is not None:
        order.close()


atexit.register(end_run)


class _Place:
    """A point that all ranks have reached in a step, after the same collectives.

    Attributes:
        expected: The collective that all ranks went on with when they were here last.
        following: The place that each collective that they ever went on with leads to.
    """

    __slots__ = ("expected", "following")

    def __init__(self) -> None:
        self.expected: str | None = None
        self.following: dict[str, _Place] = {}


class CollectiveOrder:
    """Lets an engine launch collectives in the middle of user code without ever pairing two different ones.

    The ranks agree once on the order of collectives: in the first steps, and at each new turn of a step, they
    compare their next collective through the store of the process group. After that a rank compares only with
    the agreed order, which costs one look into a dict and no communication. A rank that comes to another
    collective asks the others, and continues only if all come to the same one. A rank that waits in a
    collective meanwhile cannot answer; a thread beside it does. Without an answer within `wait` seconds in a
    step, the rank that asked raises. The thread also tells a slow rank from a dead one, for which the ranks
    do not wait as long.

    The agreed order is the same on all ranks at any time: it changes only by such an agreement.

    Args:
        remedy: Ends the error's message: the way out; or a function that makes it of the message.
        wait: Seconds that ranks may be apart within a step that takes a new turn.
        ranks: Those whose collectives these are; all by default. The other ranks may do something else in
            the meantime, but an error on one rank is that of every rank of the world.
        is_of_engine: False for the order of a Trainer's loops, which has no collectives within a step.

    Attributes:
        in_step: True if the ranks are between the beginning of a step and its last collective.
        passed: The number of collectives that this rank has come to.

    Collective: made by every rank at the same point.

    Example:
        >>> order = CollectiveOrder(remedy="Call every layer on every rank.")
        >>> with order.reporting():
        ...     order.begin("training_step")
        ...     order.arrive("the gather of layers.0")
        ...     order.end()
    """

    def __init__(
        self,
        *,
        remedy: Remedy,
        wait: float = 30.0,
        ranks: Sequence[int] | None = None,
        is_of_engine: bool = True,
    ) -> None:
        self._is_of_engine = is_of_engine
        self._questions = Questions(remedy=remedy, wait=wait, ranks=ranks)
        self._failures = self._questions.failures
        self._is_active = self._questions.are_needed
        self._watch: StallWatch | None = None
        self.in_step = False
        self.passed = 0
        self._place: _Place | None = None
        self._steps: dict[tuple[str, ...], _Place] = {}
        self._followed: dict[tuple[str, ...], str] = {}
        self._history: tuple[str, ...] = ()
        self._places = 0

    @property
    def questions(self) -> int:
        """The number of times that the ranks had to compare."""
        return self._questions.asked

    def open(self) -> None:
        """Compare the ranks from now on, also before the first step. Collective: every rank calls it."""
        if self._is_active:
            self._place = self._place or _Place()
            self._start_watch()

    def _start_watch(self) -> None:
        _open.add(self)
        if self._watch is None or not self._watch.is_alive():
            self._watch = StallWatch(self, self._questions)
            self._watch.start()

    def close(self, *, together: bool = False) -> None:
        """End the thread that answers for this rank, and compare no more until `open` or the next step.

        Args:
            together: Let rank 0, whose process may keep the store, wait a few seconds for the other ranks,
                which may still be reading the answers to the last question.
        """
        if together and self._is_active and dist.is_initialized():
            self._questions.leave()
        self.forget()
        _open.discard(self)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def begin(self, step: str) -> None:
        """A step begins. Between steps ranks may be apart for long, as when one of them saves a file.

        Args:
            step: The kind of the step; steps of one kind are expected to launch the same collectives.
        """
        global _running  # noqa: PLW0603 - of this process
        if not self._is_active:
            return
        if self._is_of_engine and (_running is None or _running() is not self):
            end_run()
            _running = weakref.ref(self)
        self._start_watch()
        if self._failures.cause:
            raise self._failures.error(self._failures.cause)
        if self._place is not None:
            self.arrive("the beginning of a step")
        self.in_step = False
        self.passed += 1
        if self._followed.get(self._history) != step:
            self._agree(f"the beginning of {step}", self._followed.get(self._history))
            self._followed[self._history] = step
        self._history = (*self._history[-7:], step)
        if self._places > _PLACES:
            self._steps.clear()
            self._places = 0
        self._place = self._steps.setdefault(self._history[-2:], _Place())
        self.in_step = True

    def arrive(self, name: str, *, cause: str = "") -> None:
        """A collective is about to be launched; returns when all ranks are known to launch the same.

        Args:
            name: Names it and its layer, such as "the gather of layers.0".
            cause: The reason why this rank launches it, for errors; other ranks may have another one.

        Raises:
            UnsupportedError: Another rank comes to something else, or does not come.
            RankLostError: Another rank gives no sign of life, or the store cannot be reached.
        """
        place = self._place
        if place is None:  # one process, or closed
            return
        self.passed += 1
        if place.expected != name:
            self._agree(name, place.expected, cause)
            place.expected = name
            if name not in place.following:
                place.following[name] = _Place()
                self._places += 1
        self._place = place.following[name]

    def end(self) -> None:
        """End a step: its last collective was launched. Code before the next step may take long."""
        if self._is_active and self.in_step:
            self.arrive("the end of the step")
            self.in_step = False

    def _agree(self, name: str, expected: str | None, cause: str = "") -> None:
        self._questions.ask(name, passed=self.passed, in_step=self.in_step, expected=expected, cause=cause)

    def forget(self) -> None:
        """After an error: the ranks may be anywhere, so the next step begins with a question."""
        self._place, self.in_step, self._history = None, False, ()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Around user code: an error that comes of another rank's deviation names that deviation."""
        try:
            yield
        except BaseException as error:
            if self._is_active and self.in_step and dist.is_initialized():
                self._questions.post_end(error)
            self.forget()
            cause = self.cause_of(error)
            if cause is not None:
                raise cause from error
            raise

    def cause_of(self, error: BaseException) -> NnxError | None:
        """The error of another rank that this one comes of, such as gloo's where that rank has left."""
        if isinstance(error, NnxError) or not isinstance(error, RuntimeError):
            return None
        posted = self._failures.cause
        if not posted and self._is_active and dist.is_initialized():
            posted = self._failures.read_if_reachable()
        if not posted or (posted.startswith("ended ") and not is_of_connection(error)):
            return None
        return self._failures.error(posted)

    def report(self, error: BaseException) -> None:
        """Let the other ranks know that this one ends with an error of its own, the cause of theirs."""
        if self._is_active and dist.is_initialized():
            self._failures.report(error)

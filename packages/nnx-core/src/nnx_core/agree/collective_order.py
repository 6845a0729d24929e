"""Launch collectives in the same order on all ranks, so that two different ones never pair.

If a forward gathers a layer's weights, ranks that reach different layers would mix up their weights, abort or
deadlock. An engine calls `CollectiveOrder.arrive` before each collective, which raises before data is sent.
`nnx_core.agree.store_questions` compares the ranks; `nnx_core.agree.stall_watch` answers for waiting ranks.
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
"""The number of places, about 20 MB, after which the order starts over: steps of some models never repeat."""

_running: weakref.ref[CollectiveOrder] | None = None
"""The order that began a step last. Orders of earlier runs may be alive, on some ranks only."""

_open: weakref.WeakSet[CollectiveOrder] = weakref.WeakSet()
"""The open orders of this process, which may be several."""


def before_reduction(name: str) -> None:
    """Add a reduction in user code to the order of the step, such as ``self.log(..., sync_dist=True)``.

    Otherwise a rank that skips a layer would reach the reduction while the others gather that layer.

    Args:
        name: The name of the reduction, for errors.
    """
    order = None if _running is None else _running()
    if order is not None and order.in_step:
        order.arrive(name)


def report_failure(error: BaseException) -> None:
    """Post an error of this rank's own to the other ranks, in all open orders."""
    for order in list(_open):
        order.report(error)


def end_run() -> None:
    """Close the running order when its run ends or another begins, so that reductions leave its steps."""
    global _running  # noqa: PLW0603 - of this process
    order = None if _running is None else _running()
    _running = None
    if order is not None:
        order.close()


atexit.register(end_run)


class _Place:
    """A point of a step that all ranks reach after the same collectives.

    Attributes:
        expected: The collective that followed it the last time, on all ranks.
        following: The next place for each collective that ever followed.
    """

    __slots__ = ("expected", "following")

    def __init__(self) -> None:
        self.expected: str | None = None
        self.following: dict[str, _Place] = {}


class CollectiveOrder:
    """Lets an engine launch collectives inside user code without ever pairing two different ones.

    In the first steps, and whenever a step takes a new path, the ranks compare their next collective through
    the store of the process group, and remember it. Afterwards each rank only compares with this agreed
    order: one look-up in a dict, without communication. A rank that reaches another collective asks the
    others, and continues only if all reach the same one. If a rank waits in a collective, a thread answers
    for it. Without an answer within `wait` seconds in a step, the asking rank raises. The thread also
    distinguishes slow ranks from dead ones, for which the timeout is shorter.

    The agreed order is equal on all ranks at any time, because only such an agreement changes it.

    Args:
        remedy: The remedy of the error, or a function that makes it from the message.
        wait: Seconds that ranks may be apart within a step that takes a new path.
        ranks: The ranks that launch these collectives; None for all. The other ranks may do something else
            meanwhile, but an error on one rank is raised on every rank of the world.
        is_of_engine: False for the order of a Trainer's loops, which has no collectives within a step.

    Attributes:
        in_step: True if the ranks are between the beginning of a step and its last collective.
        passed: The number of collectives that this rank has reached.

    Collective: every rank makes it at the same point.

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
        """The number of comparisons through the store."""
        return self._questions.asked

    def open(self) -> None:
        """Start comparing the ranks, also before the first step. Collective."""
        if self._is_active:
            self._place = self._place or _Place()
            self._start_watch()

    def _start_watch(self) -> None:
        _open.add(self)
        if self._watch is None or not self._watch.is_alive():
            self._watch = StallWatch(self, self._questions)
            self._watch.start()

    def close(self, *, together: bool = False) -> None:
        """End the thread that answers for this rank, and stop comparing until `open` or the next step.

        Args:
            together: Wait a few seconds on rank zero, whose process may host the store: the other ranks may
                still be reading the answers to the last question.
        """
        if together and self._is_active and dist.is_initialized():
            self._questions.leave()
        self.forget()
        _open.discard(self)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def begin(self, step: str) -> None:
        """Begin a step. Between steps ranks may be apart for long, as when one of them saves a file.

        Args:
            step: The kind of the step; steps of one kind usually launch the same collectives.
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
        # Kinds of steps follow each other regularly (fit, fit, validate), so the last eight predict the next:
        # only another kind than the predicted one costs a question.
        if self._followed.get(self._history) != step:
            self._agree(f"the beginning of {step}", self._followed.get(self._history))
            self._followed[self._history] = step
        self._history = (*self._history[-7:], step)
        if self._places > _PLACES:
            self._steps.clear()
            self._places = 0
        # Keyed by the previous kind, too: a step after a validation may launch other collectives.
        self._place = self._steps.setdefault(self._history[-2:], _Place())
        self.in_step = True

    def arrive(self, name: str, *, cause: str = "") -> None:
        """Announce a collective; return once all ranks are known to launch the same one.

        Args:
            name: The name of the collective and its layer, such as "the gather of layers.0".
            cause: The reason of this rank for the collective, for errors; other ranks may have another one.

        Raises:
            UnsupportedError: Another rank reaches another collective, or none.
            RankLostError: Another rank gives no sign of life, or the store cannot be reached.
        """
        place = self._place
        if place is None:  # one process, or closed
            return
        self.passed += 1
        # The expected collective needs no question: ranks with the same order can differ only if one of them
        # deviates, and that one asks. The others then see its question, or their `StallWatch` does.
        if place.expected != name:
            self._agree(name, place.expected, cause)
            place.expected = name
            if name not in place.following:
                place.following[name] = _Place()
                self._places += 1
        self._place = place.following[name]

    def end(self) -> None:
        """End a step after its last collective. Code before the next step may take long."""
        if self._is_active and self.in_step:
            self.arrive("the end of the step")
            self.in_step = False

    def _agree(self, name: str, expected: str | None, cause: str = "") -> None:
        self._questions.ask(name, passed=self.passed, in_step=self.in_step, expected=expected, cause=cause)

    def forget(self) -> None:
        """Forget the position after an error: the ranks may be anywhere, so the next step asks a question."""
        self._place, self.in_step, self._history = None, False, ()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Run user code in a context; an error caused by another rank is replaced by that rank's error."""
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
        """Return the error of another rank that caused this one, such as gloo's after that rank left."""
        if isinstance(error, NnxError) or not isinstance(error, RuntimeError):
            return None
        posted = self._failures.cause
        if not posted and self._is_active and dist.is_initialized():
            posted = self._failures.read_if_reachable()
        if not posted or (posted.startswith("ended ") and not is_of_connection(error)):
            return None
        return self._failures.error(posted)

    def report(self, error: BaseException) -> None:
        """Post an error of this rank's own, the cause of later errors on the other ranks."""
        if self._is_active and dist.is_initialized():
            self._failures.report(error)

"""What the ranks use of a model in a step: which parameters, and in which order layers are gathered.

Ranks may go different ways through a model: hard routing, a branch per sample, a head per task. Two things
follow for an engine, and this module has a tool for each.

- A parameter that some rank used has a gradient, and counts as zero on the others. One that no rank used
  has none. `used_anywhere` lets the ranks agree on which is which, before or after their reduction.
- Where a layer's weights are gathered when its forward begins, ranks that come to different layers would
  mix up their weights, abort or wait for each other. `CollectiveOrder` notices before anything is sent.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from socket import gethostname
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import all_reduce
from torch.distributed.distributed_c10d import Store

from nnx_checkpoint._torch_compat import default_store
from nnx_checkpoint.collective import (
    all_gather_object,
    ask_store,
    control_group,
    engine_group,
    group_timeout,
    is_distributed,
    wait_for_collective,
)
from nnx_core.errors import NnxError, RankLostError, UnsupportedError, is_lost_connection


def used_anywhere(flags: Sequence[bool]) -> list[bool]:
    """Which of these are set on at least one rank. Collective, over host memory, one byte each.

    Args:
        flags: True for each parameter that this rank used, in an order that is the same on every rank.

    Example:
        >>> used_anywhere([True, False])
        [True, False]
    """
    return asked_anywhere(flags)()


def asked_anywhere(flags: Sequence[bool]) -> Callable[[], list[bool]]:
    """Ask as `used_anywhere` does, without waiting for the other ranks.

    Args:
        flags: The flags that `used_anywhere` takes.

    Returns:
        A function that waits for the answer, and gives it as often as it is called.
    """
    if not is_distributed() or not flags:
        return lambda: list(flags)
    shared = torch.tensor(flags, dtype=torch.uint8)
    work = all_reduce(shared, op=dist.ReduceOp.MAX, group=engine_group(), async_op=True)

    @cache
    def answer() -> list[bool]:
        wait_for_collective(work)
        return [bool(flag) for flag in shared.tolist()]

    return answer


_PATIENCE, _GRACE, _ANSWER, _SILENT_AFTER = 600.0, 6.0, 5.0, 120.0
_LOOK_EVERY, _STUCK_AFTER, _STUCK_AFTER_APART = 0.5, 2.0, 8.0
_SHORT_PAUSES, _LONG_PAUSE = (0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128), 0.02
_PLACES = 50_000
LAST_BATCH = ", its last batch"
"""Ends the name of the step with which a rank's evaluation ends, so that ranks with more batches notice."""
_REMEDY_OF_BATCHES = (
    "Give every rank as many batches to evaluate, with `limit_val_batches` (or that of the stage) or a "
    "sampler that pads; under 'ddp' and 'nnx_deepspeed_2' the numbers may differ."
)
_REMEDY = "\x1e"
"""Between a message and its remedy, in the store."""
_REMEDY_OF_ERRORS = "Its error, in its own output, is the cause."
_running: weakref.ref[CollectiveOrder] | None = None
"""The order that began a step last. Those of earlier runs may still be alive, on some ranks only."""
_asking: tuple[CollectiveOrder, str] | None = None
"""The order whose question this rank waits in, and what it came to: a process may have several orders."""
_open: weakref.WeakSet[CollectiveOrder] = weakref.WeakSet()
_named_functions: dict[str, tuple[str, str]] = {}
_named_waits: dict[tuple[str, str], str] = {}


def name_function(function: str, doing: str, *, remedy: str = "") -> None:
    """Describe a rank that waits in a collective of a function which users have not written.

    Args:
        function: The name of the function.
        doing: Follows "rank 1" in errors.
        remedy: Takes the place of the order's.
    """
    _named_functions[function] = doing, remedy


def name_wait(file: str, function: str, doing: str) -> None:
    """Describe a rank that an engine lets wait for a collective without torch's own functions.

    Args:
        file: The end of the path of the engine's file.
        function: The name of its function.
        doing: Follows "rank 1" in errors.
    """
    _named_waits[file, function] = doing


def before_reduction(what: str) -> None:
    """Count a reduction in user code as part of the step, as that of ``self.log(..., sync_dist=True)``.

    A rank that leaves a layer out comes to it while the others wait in that layer's gather.

    Args:
        what: Names it in errors.
    """
    order = None if _running is None else _running()
    if order is not None and order.in_step:
        order.arrive(what)


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

    The ranks agree once on what follows what: in the first steps, and wherever a step takes a new turn,
    they compare through the store of the process group what each of them is about to do. After that a rank
    compares only with what was agreed, which costs one look into a dict and no communication. A rank that
    comes to something else asks the others, and goes on only if they all come to the same thing. A rank that
    waits in a collective meanwhile cannot answer; a thread beside it does, which looks where it waits. After
    `wait` seconds within a step without any answer the rank that asked raises. That thread also tells a rank
    that is slow from one that is gone, with its machine perhaps: then the ranks do not wait as long.

    What all ranks know is the same on each of them at any time: it changes only by such an agreement.

    Args:
        remedy: Ends the error's message: the way out; or a function that makes it of the message.
        wait: Seconds that ranks may be apart within a step that takes a new turn.
        ranks: Those whose collectives these are; all by default. The other ranks may do something else in
            the meantime, but an error on one rank is that of every rank of the world.
        is_of_engine: False for that of a Trainer's loops, which knows nothing of what is within a step.

    Attributes:
        in_step: True if the ranks are between the beginning of a step and its last collective.
        questions: The number of times that the ranks had to compare.
        stuck_after: Seconds after which a rank counts as waiting for those that ask. It is longer where there
            are others, slow ones perhaps, that it may be waiting for.

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
        remedy: str | Callable[[str], str],
        wait: float = 30.0,
        ranks: Sequence[int] | None = None,
        is_of_engine: bool = True,
    ) -> None:
        self._remedy, self._wait, self._is_of_engine = remedy, wait, is_of_engine
        self._key, self._ranks = "", list(ranks or ())
        self._hosts: list[str] = []
        if is_distributed():
            keys, hosts = zip(
                *all_gather_object((uuid.uuid4().hex, gethostname()), control_group()), strict=True
            )
            self._key = f"nnx/order/{keys[0]}"
            self._hosts = list(hosts) if len(set(hosts)) > 1 else []
            self._ranks = self._ranks or list(range(dist.get_world_size()))
        self._is_active = is_distributed() and len(self._ranks) > 1
        are_all = not self._is_active or len(self._ranks) == dist.get_world_size()
        self.stuck_after = _STUCK_AFTER if are_all else _STUCK_AFTER_APART
        self.in_step = False
        self._place: _Place | None = None
        self._steps: dict[tuple[str, ...], _Place] = {}
        self._followed: dict[tuple[str, ...], str] = {}
        self._history: tuple[str, ...] = ()
        self.questions = self._places = self._passed = 0
        self._cause = ""
        self._witness: _Witness | None = None

    # --- what an engine calls -----------------------------------------------------------------

    def open(self) -> None:
        """Compare the ranks from now on, also before the first step. Collective: every rank calls it."""
        if self._is_active:
            self._place = self._place or _Place()
            self._start_witness()

    def _start_witness(self) -> None:
        _open.add(self)
        if self._witness is None or not self._witness.is_alive():
            self._witness = _Witness(self)
            self._witness.start()

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
        self._start_witness()
        if self._cause:
            raise self._error(self._cause)
        if self._place is not None:
            self.arrive("the beginning of a step")
        self.in_step = False
        self._passed += 1
        if self._followed.get(self._history) != step:
            self._agree(f"the beginning of {step}", self._followed.get(self._history))
            self._followed[self._history] = step
        self._history = (*self._history[-7:], step)
        if self._places > _PLACES:
            self._steps.clear()
            self._places = 0
        self._place = self._steps.setdefault(self._history[-2:], _Place())
        self.in_step = True

    def close(self, *, together: bool = False) -> None:
        """End the thread that answers for this rank, and compare no more until `open` or the next step.

        Args:
            together: Let rank 0, whose process may keep the store, wait a few seconds for the other ranks,
                which may still be reading the answers to the last question.
        """
        if together and self._is_active and dist.is_initialized():
            with suppress(RuntimeError):  # the rank that keeps the store is gone
                ask_store(self._leave, timeout=_GRACE + _ANSWER)
        self.forget()
        _open.discard(self)
        if self._witness is not None:
            self._witness.stop()
            self._witness = None

    def _leave(self, store: Store) -> None:
        key, deadline = f"{self._key}/left", time.monotonic() + _GRACE
        left = store.add(key, 1)
        while dist.get_rank() == 0 and left < len(self._ranks) and time.monotonic() < deadline:
            if store.check([f"{self._key}/failed"]):
                return
            time.sleep(_SHORT_PAUSES[-1])
            left = store.add(key, 0)

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
        self._passed += 1
        if place.expected != name:
            self._agree(name, place.expected, cause)
            place.expected = name
            if name not in place.following:
                place.following[name] = _Place()
                self._places += 1
        self._place = place.following[name]

    def end(self) -> None:
        """The last collective of the step was launched. What comes before the next step may take long."""
        if self._is_active and self.in_step:
            self.arrive("the end of the step")
            self.in_step = False

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Around user code: an error that comes of another rank's deviation names that deviation."""
        try:
            yield
        except BaseException as error:
            self._post_end(error)
            self.forget()
            cause = self.cause_of(error)
            if cause is not None:
                raise cause from error
            raise

    def cause_of(self, error: BaseException) -> NnxError | None:
        """The error of another rank that this one comes of, such as gloo's where that rank has left."""
        if isinstance(error, NnxError) or not isinstance(error, RuntimeError):
            return None
        posted = self._posted()
        if not posted or (posted.startswith("ended ") and not _is_of_connection(error)):
            return None
        return self._error(posted)

    def report(self, error: BaseException) -> None:
        """Let the other ranks know that this one ends with an error of its own, the cause of theirs."""
        if not (self._is_active and dist.is_initialized()) or _is_of_connection(error):
            return
        text = f"ended rank {dist.get_rank()} ended with {type(error).__name__}: {error}"
        if isinstance(error, UnsupportedError):
            text = f"differ {error.message}{_REMEDY}{error.remedy}"
        key = f"{self._key}/failed"
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            ask_store(lambda store: store.compare_set(key, "", text), timeout=_ANSWER)

    def _post_end(self, error: BaseException) -> None:
        """Let ranks that wait for an answer in a step know that this one ended with an error."""
        if not (self._is_active and self.in_step and dist.is_initialized()):
            return
        text = f"rank {dist.get_rank()} ended with {type(error).__name__}: {error}"
        key = f"{self._question(self.questions + 1)}/ended"
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            ask_store(lambda store: store.set(key, text), timeout=_ANSWER)

    def forget(self) -> None:
        """After an error: the ranks may be anywhere, so the next step begins with a question."""
        self._place, self.in_step, self._history = None, False, ()

    # --- questions ----------------------------------------------------------------------------

    def _question(self, number: int) -> str:
        """Where in the store the ranks that compare have what belongs to a question."""
        return f"{self._key}/{self._ranks[0]}/{number}"

    def _agree(self, name: str, expected: str | None, cause: str = "") -> None:
        """Ask all ranks whether they come to this. Deletes what was asked before the last time."""
        global _asking  # noqa: PLW0603 - of this process
        self.questions += 1
        _asking = self, name
        try:
            ask_store(
                partial(self._compare, name=name, expected=expected, cause=cause),
                timeout=self._patience() + 2 * _ANSWER,
            )
        finally:
            _asking = None

    def _compare(self, store: Store, *, name: str, expected: str | None, cause: str) -> None:
        rank = dist.get_rank()
        question = self._question(self.questions)
        keys = [f"{question}/{other}" for other in self._ranks]
        store.set(f"{question}/{rank}", f"{self._passed} {name}")
        store.set(f"{question}/asked", "")
        if self.questions > 2:
            store.delete_key(f"{self._question(self.questions - 2)}/{rank}")
        absent, where = self._wait_for(store, keys, question)
        if absent:
            instead = f", where {expected} was expected" if expected else ""
            came = f"rank {rank} came to {name}{cause}{instead}"
            silent = [] if where else self._silent(store, question, absent)
            if silent:
                seconds = min(self._patience(), _SILENT_AFTER)
                self._fail(
                    store, f"{self._named(silent)} gave no sign of life for {seconds:.0f} s.", lost=True
                )
            where, _, remedy = where.partition(_REMEDY)
            where = where or f"{self._named(absent)} did not come to it within {self._patience():.0f} s"
            self._fail(store, f"{self._differ()}: {came}; {where}.", absent, remedy=remedy)
        answers = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
        if any(answer != answers[0] for answer in answers):
            found = zip(self._ranks, answers, strict=True)
            came = "; ".join(
                f"rank {other} came to {answer[1]}{cause if other == rank else ''}" for other, answer in found
            )
            self._fail(store, f"{self._differ()}: {came}.")

    def _differ(self) -> str:
        return (
            "the ranks use different layers in one step"
            if self.in_step
            else "the ranks do different things between steps"
        )

    def _wait_for(self, store: Store, keys: Sequence[str], question: str) -> tuple[list[int], str]:
        """Wait until every rank has answered; returns those that have not, and where one of them waits."""
        begun = time.monotonic()
        deadline = begun + self._patience()
        silent_at = begun + _SILENT_AFTER
        for pause in _SHORT_PAUSES:  # nearly always the others are there by then
            if store.check(list(keys)):
                return [], ""
            time.sleep(pause)
        while not store.check(list(keys)):
            if store.check([f"{self._key}/failed"]):
                posted = store.get(f"{self._key}/failed").decode()
                # A rank that fails as another one does raises its own error, if it has the time.
                if not posted.startswith("ended ") or time.monotonic() > begun + _GRACE:
                    raise self._error(posted)
            ended, elsewhere = f"{question}/ended", f"{question}/elsewhere"
            if self.in_step and time.monotonic() > begun + _GRACE and store.check([ended]):
                raise NnxError(f"{store.get(ended).decode()}.", remedy="Its error is the cause.")
            is_elsewhere = store.check([elsewhere])
            if is_elsewhere or time.monotonic() > min(deadline, silent_at):
                where = store.get(elsewhere).decode() if is_elsewhere else ""
                answers = zip(self._ranks, keys, strict=True)
                absent = [rank for rank, key in answers if not store.check([key])]
                if where or time.monotonic() > deadline or self._silent(store, question, absent):
                    return absent, where
                silent_at = deadline
            time.sleep(_LONG_PAUSE)
        return [], ""

    def _patience(self) -> float:
        """Seconds to wait for a rank: no longer than a collective would."""
        return min(self._wait if self.in_step else max(self._wait, _PATIENCE), group_timeout())

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks in an error, with their machines where there are several."""
        named = [f"{rank} on {self._hosts[rank]}" if self._hosts else str(rank) for rank in ranks]
        return f"rank{'s' * (len(named) > 1)} {', '.join(named)}"

    def _silent(self, store: Store, question: str, absent: Sequence[int]) -> list[int]:
        """Those of the ranks that have a witness, which has not even noticed the question."""
        return [
            rank
            for rank in absent
            if not store.check([f"{question}/noticed/{rank}"])
            and store.check([f"{self._key}/witness/{rank}"])
            and store.get(f"{self._key}/witness/{rank}") == b"looks"
        ]

    def _error(self, posted: str) -> NnxError:
        """The error that a rank has posted for all."""
        kind, _, rest = posted.partition(" ")
        if kind == "lost":
            return RankLostError(rest)
        if kind == "ended":
            return NnxError(f"{rest}.", remedy=_REMEDY_OF_ERRORS)
        message, _, remedy = rest.partition(_REMEDY)
        if not remedy:
            remedy = self._remedy if isinstance(self._remedy, str) else self._remedy(message)
        return UnsupportedError(message, remedy=remedy)

    def _fail(
        self,
        store: Store,
        message: str,
        absent: Sequence[int] = (),
        *,
        lost: bool = False,
        remedy: str = "",
    ) -> NoReturn:
        """Raise, once the ranks that did not ask have read why: the store may go with this rank."""
        if LAST_BATCH in message:
            remedy = _REMEDY_OF_BATCHES
        posted = f"{'lost' if lost else 'differ'} {message}" + (f"{_REMEDY}{remedy}" if remedy else "")
        store.set(f"{self._key}/failed", posted)
        others = [rank for rank in range(dist.get_world_size()) if rank not in self._ranks]
        deadline = time.monotonic() + 4 * _LOOK_EVERY
        while time.monotonic() < deadline:
            if all(store.check([f"{self._key}/read/{rank}"]) for rank in (*absent, *others)):
                break
            time.sleep(0.05)
        raise self._error(posted)

    def _posted(self) -> str:
        """What another rank failed with, as far as the store can still be read."""
        if self._cause or not self._is_active or not dist.is_initialized():
            return self._cause
        key = f"{self._key}/failed"
        with suppress(RuntimeError):  # the rank that keeps the store is gone
            return ask_store(
                lambda store: store.get(key).decode() if store.check([key]) else "", timeout=_ANSWER
            )
        return ""

    # --- what the witness calls, in a thread of its own -----------------------------------------

    def post_witness(self, store: Store, state: str) -> None:
        """Let the others know whether they can expect this rank to notice questions: if it ``"looks"``."""
        store.set(f"{self._key}/witness/{dist.get_rank()}", state)

    def read_failure(self, store: Store) -> bool:
        """Take notice of another rank's error while this one may be waiting; whether there is one."""
        if not store.check([f"{self._key}/failed"]):
            return False
        self._cause = store.get(f"{self._key}/failed").decode()
        store.set(f"{self._key}/read/{dist.get_rank()}", "")
        return True

    def unanswered(self, store: Store) -> str:
        """The key of a question that this rank has not come to; empty without one."""
        question = self._question(self.questions + 1)
        if not store.check([f"{question}/asked"]):
            return ""
        store.set(f"{question}/noticed/{dist.get_rank()}", "")
        return f"{question}/elsewhere"

    @property
    def passed(self) -> int:
        """How many collectives this rank has come to."""
        return self._passed


class _Witness(threading.Thread):
    """Answers for a rank that waits in a collective where the others ask what it comes to.

    Args:
        order: Whose questions it answers; it ends with it, and with the process group.
    """

    def __init__(self, order: CollectiveOrder) -> None:
        super().__init__(name="nnx-order", daemon=True)
        self._order = weakref.ref(order)
        self._store = default_store()
        self._watched = threading.get_ident()
        self._seen: tuple[object, ...] = ()
        self._since = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Return when the thread has ended, or has not in the time of a look."""
        self._stopped.set()
        self.join(_LOOK_EVERY)

    def run(self) -> None:
        """Look every now and then until there is nothing left to look at."""
        with suppress(RuntimeError, ValueError):  # the rank that keeps the store, or the group, is gone
            self._post("looks")
            while not self._stopped.wait(_LOOK_EVERY):
                order = self._order()
                if order is None or not self._is_current() or order.read_failure(self._store):
                    return
                self._look(order)
                del order
            self._post("has ended")

    def _post(self, state: str) -> None:
        order = self._order()
        if order is not None and self._is_current():
            order.post_witness(self._store, state)

    def _is_current(self) -> bool:
        return dist.is_initialized() and default_store() is self._store

    def _look(self, order: CollectiveOrder) -> None:
        key = order.unanswered(self._store)
        place = (_collective_of(self._watched) or _question_beside(order)) if key else None
        seen = (key, order.passed, place)
        if place is None or seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > order.stuck_after:
            self._store.set(key, f"rank {dist.get_rank()} {place[0]}")


def _is_of_connection(error: BaseException) -> bool:
    return is_lost_connection(error) or isinstance(error, dist.DistError)


def _question_beside(order: CollectiveOrder) -> tuple[str, int] | None:
    """The place whose question this rank waits in, of another order than this one."""
    asking = _asking
    return None if asking is None or asking[0] is order else (f"came to {asking[1]}", 0)


def _collective_of(thread: int) -> tuple[str, int] | None:
    """What a thread does in the collective that it is in, with the line; and how far it has come in it."""
    frame = sys._current_frames().get(thread)
    progress, name = (frame.f_lasti if frame else 0), ""
    while frame is not None:
        code = frame.f_code
        for (file, function), doing in _named_waits.items():
            if not name and code.co_name == function and code.co_filename.endswith(file):
                return doing, progress
        if code.co_filename.endswith("distributed_c10d.py") or code is wait_for_collective.__code__:
            name = code.co_name
        elif name and "/torch/" not in code.co_filename:
            doing, remedy = _named_functions.get(code.co_name, ("", ""))
            line = f"waits in {name}, called in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
            return _REMEDY.join(filter(None, (doing or line, remedy))), progress
        frame = frame.f_back
    return None

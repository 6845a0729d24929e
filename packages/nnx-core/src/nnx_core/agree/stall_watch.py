"""Answer the questions of other ranks while this rank waits in a collective.

A waiting rank cannot answer, and a computing rank will answer later. `StallWatch` distinguishes them in a
thread of its own. It reads the waits that engines announce (`nnx_core.agree.announced_waits`). User code
calls functions of ``torch.distributed`` without an announcement; for these alone the thread reads the stack.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from nnx_base._torch_compat import default_store
from nnx_core.agree.announced_waits import Wait, newest_wait
from nnx_core.agree.rank_failures import REMEDY
from nnx_core.agree.store_questions import Questions

_LOOK_EVERY = 0.5
"""Seconds between two polls: four within `_STUCK_AFTER`, at two requests to the store each."""

_STUCK_AFTER = 2.0
"""Seconds in one wait after which a rank counts as stuck: the ranks that ask cannot end its wait."""

_STUCK_AFTER_APART = 8.0
"""`_STUCK_AFTER` if other ranks do not compare: they may be slow to end the wait."""

_named_functions: dict[str, tuple[str, str]] = {}


def name_function(function: str, doing: str, *, remedy: str = "") -> None:
    """Describe the wait in a collective of a library function, for errors.

    Args:
        function: The name of the function.
        doing: Follows "rank 1" in errors.
        remedy: Replaces the remedy of the order.
    """
    _named_functions[function] = doing, remedy


class Watched(Protocol):
    """The order of collectives for which a `StallWatch` answers.

    Attributes:
        passed: The number of collectives that this rank has reached.
    """

    passed: int


class StallWatch(threading.Thread):
    """A thread that answers for a waiting rank. It ends with the order, and with the process group.

    Args:
        order: The order, whose `passed` grows while this rank makes progress.
        questions: The questions of the order.
    """

    def __init__(self, order: Watched, questions: Questions) -> None:
        super().__init__(name="nnx-stall-watch", daemon=True)
        self._order, self._questions = weakref.ref(order), questions
        self._store = default_store()
        self._user_thread = threading.get_ident()
        is_apart = len(questions.ranks) < dist.get_world_size()
        self._stuck_after = _STUCK_AFTER_APART if is_apart else _STUCK_AFTER
        self._stopped = threading.Event()
        self._seen: tuple[int, Wait | str | None] = 0, None
        self._since = 0.0

    def stop(self) -> None:
        """Stop the thread; wait for its end, for one interval at most."""
        self._stopped.set()
        self.join(_LOOK_EVERY)

    def run(self) -> None:
        """Poll until the order, the process group or the run ends."""
        with suppress(RuntimeError, ValueError):  # the process group or its store is gone
            self._post("looks")
            while not self._stopped.wait(_LOOK_EVERY):
                order = self._order()
                if order is None or not self._is_current() or self._questions.failures.notice(self._store):
                    return
                self._look(order)
                del order  # the thread must not keep it alive while it sleeps
            self._post("has ended")

    def _post(self, state: str) -> None:
        if self._order() is not None and self._is_current():
            self._questions.post_watch(self._store, state)

    def _is_current(self) -> bool:
        return dist.is_initialized() and default_store() is self._store

    def _look(self, order: Watched) -> None:
        """Answer a question if this rank has been in one wait for `_stuck_after` seconds."""
        answer = self._questions.notice(self._store)
        wait: Wait | str | None = None
        if answer is not None:
            wait = newest_wait(other_than=self._questions) or _torch_function_of(self._user_thread)
        # A new wait is a new object even for the same collective, so a rank that proceeds is never stuck.
        seen = order.passed, wait
        if answer is None or wait is None or seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > self._stuck_after:
            answer(wait.doing if isinstance(wait, Wait) else wait)


def _torch_function_of(thread: int) -> str | None:
    """Return the function of ``torch.distributed`` that a thread is in, and its caller outside of torch.

    The functions wait in C++ below ``distributed_c10d.py``, without any hook, so only the stack shows them.
    """
    frame, name = sys._current_frames().get(thread), ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            name = code.co_name
        elif name and "/torch/" not in code.co_filename:
            doing, remedy = _named_functions.get(code.co_name, ("", ""))
            line = f"waits in {name}, called in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
            return REMEDY.join(filter(None, (doing or line, remedy)))
        frame = frame.f_back
    return None

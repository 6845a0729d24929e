"""Order the one save that a process may have in flight with the work that must follow it.

A thread completes the save during training. The next save, a reader of the checkpoint, and the end of the run
wait for it first. Removals requested meanwhile are queued behind its commit. Its error is raised once, by the
first call that waits for the save or polls it, and logged at exit if no call did.
This module owns that order. It knows neither torch nor the steps of a save.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

__all__ = [
    "PendingSave",
    "after_save",
    "current",
    "settle",
    "settle_quietly",
    "take_error",
    "wait_until_saved",
]

log = logging.getLogger("nnx.checkpoint")

_current: PendingSave | None = None


class PendingSave:
    """A save that is completed in the background; made by `nnx_checkpoint.save_async`.

    Attributes:
        path: The path of the checkpoint.
        collective: True if other ranks take part in the save.
    """

    def __init__(self, path: str, work: Callable[[], None], *, collective: bool) -> None:
        self.path = path
        self.collective = collective
        self._real = os.path.realpath(path)
        self._error: BaseException | None = None
        self._noticed = False
        self._ended = False
        self._queue: list[tuple[str, Callable[[], None]]] = []
        self._lock = threading.Lock()
        # A daemon thread would be killed at exit in the middle of a save; Python joins this one.
        self._thread = threading.Thread(target=self._run, args=(work,), name="nnx-background-save")
        self._go = threading.Event()
        self._thread.start()
        self._go.set()

    def done(self) -> bool:
        """Return True if the save has ended on this rank, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the save. If it is collective, every rank must call this.

        Raises:
            CheckpointError: The save failed; the previous checkpoint is intact.
        """
        self._thread.join()
        self._noticed = True
        _forget(self)
        if self._error is not None:
            raise self._error

    def then(self, doing: str, action: Callable[[], None]) -> None:
        """Call an action after the commit, or never if the save fails.

        Args:
            doing: The purpose of the action, used in messages.
            action: Function called in the background, or at once if the save is committed already.
        """
        with self._lock:
            if not self._ended:
                self._queue.append((doing, action))
                return
        if self._error is None:
            action()
        else:
            _log_skipped(doing, self.path)

    def _run(self, work: Callable[[], None]) -> None:
        self._go.wait()  # let `start` return first: it would wait milliseconds for the GIL
        try:
            work()
        except BaseException as error:  # raised by `wait`
            self._error = error
        while (queued := self._next()) is not None:
            doing, action = queued
            if self._error is not None:
                _log_skipped(doing, self.path)
                continue
            try:
                action()
            except Exception as error:
                log.warning("%s failed: %s", doing, error)

    def _next(self) -> tuple[str, Callable[[], None]] | None:
        with self._lock:
            if self._queue:
                return self._queue.pop(0)
            self._ended = True
            return None

    def _report(self) -> None:
        self._thread.join()
        if self._error is not None and not self._noticed:
            log.error("Background save to '%s' failed: %s", self.path, self._error)


def start(path: str, work: Callable[[], None], *, collective: bool) -> PendingSave:
    """Start to complete a save in the background (after `settle`).

    Args:
        path: The path of the checkpoint.
        work: The function that completes the save.
        collective: True if other ranks take part in the save.
    """
    global _current  # noqa: PLW0603 - one for the process
    _current = PendingSave(path, work, collective=collective)
    return _current


def current() -> PendingSave | None:
    """Return the save that is in flight, or has ended without a `wait`; else None."""
    return _current


def settle() -> None:
    """Wait for the save in flight, if any, and raise its error."""
    if _current is not None:
        _current.wait()


def take_error() -> BaseException | None:
    """Wait for the save in flight; return its error, which no other call raises then."""
    try:
        settle()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    return None


def settle_quietly() -> None:
    """Wait for the save in flight and only log its error (for use while another error is raised)."""
    pending, error = _current, take_error()
    if pending is not None and error is not None:
        log.error("Background save to '%s' failed as well: %s", pending.path, error)


def wait_until_saved(path: str | os.PathLike[str]) -> None:
    """Wait for a save in flight to this path, without raising its error."""
    pending = _current
    if pending is None or pending._thread is threading.current_thread():
        return
    if os.path.realpath(path) == pending._real:
        pending._thread.join()


def after_save(doing: str, action: Callable[[], None]) -> None:
    """Call an action after the save in flight commits; never if it fails; at once without such a save.

    Args:
        doing: The purpose of the action, used in messages.
        action: Function called at most once.
    """
    if _current is None:
        action()
    else:
        _current.then(doing, action)


def _forget(pending: PendingSave) -> None:
    global _current  # noqa: PLW0603
    if _current is pending:
        _current = None


def _log_skipped(doing: str, path: str) -> None:
    log.warning("Skipped %s: saving '%s' failed.", doing, path)


def _at_exit() -> None:
    if _current is not None:
        _current._report()


atexit.register(_at_exit)

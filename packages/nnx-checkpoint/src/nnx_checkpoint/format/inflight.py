"""The one save that a process may have in flight, and what waits for it.

A thread completes it during training. The next save, a reader of the checkpoint, and the end of the run
waits for it first; removals asked for meanwhile are queued behind its commit. Its error is raised once,
where the program takes notice of the save, and logged at exit if nothing ever did.
This module owns that order. It knows neither torch nor what a save does.
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
        path: The path that it saves to.
        collective: True if other ranks have a part in it.
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
        # Not a daemon: Python waits for it at exit, so that no save is cut off.
        self._thread = threading.Thread(target=self._run, args=(work,), name="nnx-background-save")
        self._go = threading.Event()
        self._thread.start()
        self._go.set()

    def done(self) -> bool:
        """Return True if it has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended. If the save is collective, every rank must call this.

        Raises:
            CheckpointError: The save failed; the checkpoint that was there before is intact.
        """
        self._thread.join()
        self._noticed = True
        _forget(self)
        if self._error is not None:
            raise self._error

    def then(self, doing: str, action: Callable[[], None]) -> None:
        """Do something after the commit, or never if the save fails.

        Args:
            doing: The purpose of it, used in messages.
            action: Called in the background, or at once where the save is committed already.
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
        self._go.wait()  # else the caller would wait milliseconds for Python's lock to come back
        try:
            work()
        except BaseException as error:  # raised where the program takes notice
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
            log.error("The last background save, to '%s', failed: %s", self.path, self._error)


def start(path: str, work: Callable[[], None], *, collective: bool) -> PendingSave:
    """Begin to complete a save in the background; the caller has called `settle`.

    Args:
        path: The path that it saves to.
        work: The function that completes it.
        collective: True if other ranks do the same.
    """
    global _current  # noqa: PLW0603 - there is one for the process
    _current = PendingSave(path, work, collective=collective)
    return _current


def current() -> PendingSave | None:
    """The save that is in flight, or that has ended without anybody having noticed."""
    return _current


def settle() -> None:
    """Wait for the save in flight, if there is one, and raise its error."""
    if _current is not None:
        _current.wait()


def take_error() -> BaseException | None:
    """Wait for the save in flight; its error, which is then not raised anywhere else."""
    try:
        settle()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    return None


def settle_quietly() -> None:
    """Wait for the save in flight and only log its error: for where another error is on its way."""
    pending, error = _current, take_error()
    if pending is not None and error is not None:
        log.error("The background save to '%s' failed as well: %s", pending.path, error)


def wait_until_saved(path: str | os.PathLike[str]) -> None:
    """Wait if a checkpoint is being saved to this path; an error of that save is left to others."""
    pending = _current
    if pending is None or pending._thread is threading.current_thread():
        return
    if os.path.realpath(path) == pending._real:
        pending._thread.join()


def after_save(doing: str, action: Callable[[], None]) -> None:
    """Do something after the save in flight is committed, never if it fails, or now if there is none.

    Args:
        doing: The purpose of it, used in messages.
        action: Called once at most.
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
    log.warning("Skipped %s, because saving '%s' failed.", doing, path)


def _at_exit() -> None:
    if _current is not None:
        _current._report()


atexit.register(_at_exit)

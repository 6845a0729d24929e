"""The names of hivemind that this package uses; the only module that imports hivemind.

Checked with hivemind 1.1.12. It repairs three habits: threads of an `Optimizer` that could not be made keep
the process alive; averagers ignore SIGINT in the process that starts them; a killed peer leaves processes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast
from weakref import WeakMethod

from nnx_core.errors import PackageNotInstalledError

try:
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager
    from hivemind.utils import get_dht_time
except ImportError as error:
    raise PackageNotInstalledError(
        f"the package hivemind cannot be imported ({error})",
        remedy="Run `pip install hivemind==1.1.12`; it has wheels for Linux and for macOS on ARM.",
    ) from error

__all__ = ["DHT", "GradientAverager", "SwarmOptimizer", "at_exit", "get_dht_time", "show_events", "starting"]

DHT = hivemind.DHT
PRIVATE_NAMES = {"threading._register_atexit": "3.10 to 3.14"}
"""Private names, with the versions that have them."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_starting = threading.Event()


class _Events(logging.Filter):
    """Passes hivemind's warnings, its other lines on demand, and no tracebacks of its end."""

    level = logging.WARNING

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":  # a progress tracker that ended in a request
            return "coro=<wait_for()" not in record.getMessage()
        asked_by_the_dead = record.name == "hivemind.dht.dht" and record.funcName == "_run"
        return record.levelno >= self.level and not asked_by_the_dead


_events = _Events()
logging.getLogger("asyncio").addFilter(_events)
for _handler in logging.getLogger("hivemind").handlers:
    _handler.addFilter(_events)


def show_events(verbose: bool) -> None:
    """Show all of hivemind's log lines, or its warnings only."""
    _events.level = logging.INFO if verbose else logging.WARNING


def _end_with_parent() -> None:
    """Let the kernel end a process of hivemind with the process that has started it."""
    if _starting.is_set() and _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


os.register_at_fork(after_in_child=_end_with_parent)


@contextmanager
def starting() -> Iterator[None]:
    """Return a context to start processes of hivemind in: they end with this one, and SIGINT stays."""
    handler = signal.getsignal(signal.SIGINT)
    _starting.set()
    try:
        yield
    finally:
        _starting.clear()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def at_exit(close: Callable[[], None]) -> None:
    """Call a method of a living object before Python waits for threads at its end, sooner than `atexit`."""
    method = WeakMethod(close)

    def call() -> None:
        living = method()
        if living is not None:
            living()

    cast(Any, threading)._register_atexit(call)


class SwarmOptimizer(hivemind.Optimizer):  # type: ignore[misc] # hivemind has no types
    """An optimizer of hivemind that leaves no thread if it cannot be made.

    Args:
        after_load: A function that is called after a download of a peer's state.
        **arguments: Those of ``hivemind.Optimizer``.
    """

    def __init__(self, *, after_load: Callable[[SwarmOptimizer], None], **arguments: Any) -> None:
        self._after_load = after_load
        try:
            super().__init__(**arguments)
        except BaseException:
            for averager in (getattr(self, "state_averager", None), getattr(self, "grad_averager", None)):
                if averager is not None:
                    averager.shutdown()
            if hasattr(self, "tracker"):
                self.tracker.shutdown(timeout=1.0)
            raise

    def is_alive(self) -> bool:
        """Return True until it is shut down; the destructor asks, also after a constructor that raised."""
        with suppress(AttributeError):
            return bool(super().is_alive())
        return False

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Download the state of a peer."""
        super().load_state_from_peers(**kwargs)
        self._after_load(self)

"""Run clean-up that keeps the first error.

After an error the other ranks may be gone. A collective of the clean-up then fails as well, with an error
that names no cause. This module calls every action, adds its error to the first error as a note, and raises
the first error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["CleanUp", "clean_up", "clean_up_after_error", "note"]

log = logging.getLogger("nnx.errors")


def note(error: BaseException, text: str) -> None:
    """Add a line that tracebacks show below an error (Python 3.10 has no notes: log the line).

    Example:
        >>> error = ValueError("bad sample 17")
        >>> note(error, "Gathering the model failed as well.")
    """
    add = getattr(error, "add_note", None)
    if add is None:
        log.error("%s: %s", type(error).__name__, text)
    else:
        add(text)


class CleanUp:
    """Run all actions of a clean-up one after the other, even if some fail.

    Args:
        after: The error that caused the clean-up; None if nothing has failed yet.

    Attributes:
        error: The first error, `after` or that of an action.

    Example:
        >>> cleaning = CleanUp(ValueError("bad sample 17"))
        >>> cleaning.run("gathering the model", lambda: 1 / 0)
        >>> cleaning.finish()
        >>> cleaning.error
        ValueError('bad sample 17')
    """

    def __init__(self, after: BaseException | None = None) -> None:
        self.error = self._after = after

    def run(self, doing: str, action: Callable[[], object]) -> None:
        """Call an action; keep its error if it is the first, else add it to the first error as a note.

        Args:
            doing: Name of the action in the note, such as "gathering the model".
            action: The function to call.
        """
        try:
            action()
        except Exception as error:
            if self.error is None:
                self.error = error
            elif error is not self.error:
                note(self.error, f"After this error, {doing} failed as well: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Raise the first error, unless it is `after`, which the caller raises."""
        if self.error is not None and self.error is not self._after:
            raise self.error


@contextmanager
def clean_up(doing: str, *actions: Callable[[], object]) -> Iterator[None]:
    """Call actions at the end of a block, in place of ``finally`` where they may fail.

    Args:
        doing: Name of the actions in a note of the block's error.
        *actions: The functions to call, in this order; an error skips none of them.

    Raises:
        Exception: The block's own error; without one, the first error of an action.
    """
    with clean_up_after_error(doing, *actions):
        yield
    cleaning = CleanUp()
    for action in actions:
        cleaning.run(doing, action)
    cleaning.finish()


@contextmanager
def clean_up_after_error(doing: str, *actions: Callable[[], object]) -> Iterator[None]:
    """Call actions only if a block fails, in place of ``except BaseException`` and ``raise``.

    Args:
        doing: Name of the actions in a note of the block's error.
        *actions: The functions to call, in this order; an error skips none of them.
    """
    try:
        yield
    except BaseException as error:
        cleaning = CleanUp(error)
        for action in actions:
            cleaning.run(doing, action)
        raise

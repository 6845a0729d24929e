"""Run the same number of prediction steps on every rank.

To predict, Lightning deals samples out without padding, so that one rank may have a batch more than
another. Where a forward is collective the others would leave that rank waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


class EvenPrediction:
    """Repeats a rank's last step as often as the ranks with more batches need; its results are dropped.

    Attributes:
        is_known: True if the numbers of batches are.

    Example:
        >>> even = EvenPrediction()
        >>> even.start([2], most=lambda own: 4)
        >>> steps = []
        >>> for batch in ("first", "last"):
        ...     steps.append(batch)
        ...     even.after_step(lambda: steps.append("again"), batch)
        >>> steps
        ['first', 'last', 'again', 'again']
    """

    def __init__(self) -> None:
        self._own = self._missing = 0
        self.is_known = False

    def start(self, batches: Sequence[float], *, most: Callable[[int], int]) -> None:
        """Find out how many steps this rank has to add. Collective where all ranks know their numbers.

        Args:
            batches: The number of batches of each loader of this rank; infinite where it is not known.
            most: The largest of all ranks' numbers.
        """
        self._own = self._missing = 0
        self.is_known = float("inf") not in batches
        if not self.is_known:
            return
        self._own = int(sum(batches))
        self._missing = most(self._own) - self._own

    def after_step(self, repeat: Callable[[], object], *args: Any) -> None:
        """Count a step; after this rank's last one, run the missing ones.

        Args:
            repeat: Runs the same step again.
            *args: Of the step. One that fetches its own batches cannot be repeated.
        """
        self._own -= 1
        if self._own or any(isinstance(value, Iterator) for value in args):
            return
        for _ in range(self._missing):
            repeat()


def _renamed(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same step under another name, by which engines compare the ranks."""

    def renamed(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    renamed.__name__ = name
    return renamed

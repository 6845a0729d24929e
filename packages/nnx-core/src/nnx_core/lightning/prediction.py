"""Run the same number of prediction steps on every rank.

For prediction, Lightning distributes samples without padding, so one rank may have a batch more than another.
If the forward is collective, that rank would wait forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


class EvenPrediction:
    """Repeats a rank's last step, without results, until all ranks have run equally many steps.

    Attributes:
        is_known: True if the numbers of batches are known.

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
        """Compute the number of steps to repeat. Collective if all ranks know their numbers of batches.

        Args:
            batches: The number of batches of each loader of this rank; infinite if unknown.
            most: Returns the largest number over the ranks. Collective.
        """
        self._own = self._missing = 0
        self.is_known = float("inf") not in batches
        if not self.is_known:
            return
        self._own = int(sum(batches))
        self._missing = most(self._own) - self._own

    def after_step(self, repeat: Callable[[], object], *args: Any) -> None:
        """Count a step; after this rank's last one, repeat it as often as necessary.

        Args:
            repeat: Runs the same step again.
            *args: The arguments of the step; with an iterator among them it cannot be repeated.
        """
        self._own -= 1
        if self._own or any(isinstance(value, Iterator) for value in args):
            return
        for _ in range(self._missing):
            repeat()


def _renamed(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the step under another name, by which engines compare the ranks."""

    def renamed(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    renamed.__name__ = name
    return renamed

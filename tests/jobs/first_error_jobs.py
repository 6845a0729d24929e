"""Jobs of `test_first_error.py`: runs that lose the connection, and faults planted in their clean-up."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from nnx_checkpoint.clean_up import CleanUp
from nnx_conformance.checks.manners_failures import Ending
from nnx_conformance.checks.manners_first_error import lose_the_connection
from nnx_conformance.subject import Subject

_OF_TEARDOWN = ("gathering the model", "removing averaged weights", "closing")


def lose_it(subject: Subject, meeting: str, place: str) -> Ending:
    """Lose the connection at a place."""
    subject.prepare()
    return lose_the_connection(subject, meeting, place)


def lose_it_carelessly(subject: Subject, meeting: str, place: str, in_step: bool) -> Ending:
    """The same where errors of clean-up are raised where they occur.

    Args:
        subject: The strategy.
        meeting: See `lose_the_connection`.
        place: The place.
        in_step: True for the engine's clean-up of a step, False for teardown.
    """
    careful = CleanUp.run

    def run(cleaning: CleanUp, doing: str, action: Callable[[], object]) -> None:
        if doing.startswith(_OF_TEARDOWN) is in_step:
            careful(cleaning, doing, action)
        else:
            action()

    with patch.object(CleanUp, "run", run):
        return lose_it(subject, meeting, place)

"""Jobs of `test_first_error.py`: runs that lose the connection, and planted faults in their clean-up."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from nnx_base.clean_up import CleanUp
from nnx_conformance.checks.lifecycle.errors import Ending
from nnx_conformance.checks.lifecycle.first_error import fail_before_the_model, lose_the_connection
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


def reset_in_vain(subject: Subject, meeting: str, is_careless: bool) -> Ending:
    """Fail before the model's first call where FSDP2 cannot be reset, with the planted fault or without."""
    subject.prepare()
    with patch("nnx_fsdp.sharding.begin_anew", side_effect=AttributeError("no such order")):
        if not is_careless:
            return fail_before_the_model(subject, meeting)
        with patch.object(CleanUp, "run", _raise_at_once):
            return fail_before_the_model(subject, meeting)


def _raise_at_once(cleaning: CleanUp, doing: str, action: Callable[[], object]) -> None:
    action()

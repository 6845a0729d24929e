"""Jobs for the tests of the conformance suite's framework."""

from __future__ import annotations

import os
import time

from nnx_conformance import Subject


def name_of(subject: Subject) -> str:
    """Return the request to the worker."""
    return subject.strategy


def sleep(subject: Subject, seconds: float) -> None:
    """Take longer than the check may."""
    time.sleep(seconds)


def fail_on_rank(subject: Subject, guilty: int) -> None:
    """Raise on one rank, in an error of two lines."""
    if int(os.environ["RANK"]) == guilty:
        print("printed before the end")
        raise RuntimeError("planted\n\tin a job")

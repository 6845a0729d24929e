"""The conformance suite: the promises that every strategy keeps, tried in real processes.

`run_conformance` and `nnx conformance` check a strategy, `StrategyConformance` makes the checks tests of
a plugin. Start reading at `check`; the checks themselves are in `checks`.
"""

from nnx.testing.conformance.check import Check, all_checks
from nnx.testing.conformance.report import Report, Result
from nnx.testing.conformance.runner import Session, run_conformance, select_checks
from nnx.testing.conformance.subject import Subject

__all__ = [
    "Check",
    "Report",
    "Result",
    "Session",
    "Subject",
    "all_checks",
    "run_conformance",
    "select_checks",
]

"""The conformance suite: the promises that every strategy keeps, tried in real processes that stay warm.

`run_conformance` and `nnx conformance` check a strategy, `StrategyConformance` makes the checks tests of
a plugin, `WorkerPool` runs functions on several ranks. Start reading at `check`; the checks themselves are in
`checks`. Importing this package is light; `StrategyConformance` needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_conformance.check import Check, all_checks
    from nnx_conformance.pool import JobError, WorkerPool, shared_pool
    from nnx_conformance.report import Report, Result
    from nnx_conformance.runner import Session, run_conformance, select_checks
    from nnx_conformance.subject import Subject
    from nnx_conformance.suite import StrategyConformance

__all__ = [
    "Check",
    "JobError",
    "Report",
    "Result",
    "Session",
    "StrategyConformance",
    "Subject",
    "WorkerPool",
    "all_checks",
    "run_conformance",
    "select_checks",
    "shared_pool",
]

_HOME = {
    "Check": "check",
    "JobError": "pool",
    "Report": "report",
    "Result": "report",
    "Session": "runner",
    "StrategyConformance": "suite",
    "Subject": "subject",
    "WorkerPool": "pool",
    "all_checks": "check",
    "run_conformance": "runner",
    "select_checks": "runner",
    "shared_pool": "pool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

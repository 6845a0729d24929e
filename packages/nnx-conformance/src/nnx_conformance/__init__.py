"""The conformance suite tests the promises of strategies in real, warm processes.

`run_conformance` and `nnx conformance` check a strategy, `StrategyConformance` makes the checks pytest tests
of a plugin, `WorkerPool` runs functions on several ranks. `assert_equal_runs` and `nnx diff` compare two
runs. Start reading at `check`; the folder `checks` has the checks, and `diff` the comparison of runs.
Importing this package is light; `StrategyConformance` needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_conformance.diff.testing import assert_equal_runs
    from nnx_conformance.pool import JobError, WorkerPool, shared_pool
    from nnx_conformance.runner import run_conformance
    from nnx_conformance.subject import Subject
    from nnx_conformance.suite import StrategyConformance

__all__ = [
    "JobError",
    "StrategyConformance",
    "Subject",
    "WorkerPool",
    "assert_equal_runs",
    "run_conformance",
    "shared_pool",
]

_HOME = {
    "JobError": "pool",
    "StrategyConformance": "suite",
    "Subject": "subject",
    "WorkerPool": "pool",
    "assert_equal_runs": "diff.testing",
    "run_conformance": "runner",
    "shared_pool": "pool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

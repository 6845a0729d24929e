"""Tools for testing strategies: the conformance suite, and worker processes that stay warm between tests.

Importing this package is light; `StrategyConformance` needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.testing.conformance import Subject, run_conformance
    from nnx.testing.conformance.suite import StrategyConformance
    from nnx.testing.pool import JobError, WorkerPool, shared_pool

__all__ = ["StrategyConformance", "Subject", "run_conformance", "JobError", "WorkerPool", "shared_pool"]

_HOME = {
    "StrategyConformance": "nnx.testing.conformance.suite",
    "Subject": "nnx.testing.conformance",
    "run_conformance": "nnx.testing.conformance",
    "JobError": "nnx.testing.pool",
    "WorkerPool": "nnx.testing.pool",
    "shared_pool": "nnx.testing.pool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nnx.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

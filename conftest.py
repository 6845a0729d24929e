"""Fixtures that tests of every package share."""

from __future__ import annotations

import os

import pytest

from nnx.testing.pool import WorkerPool, shared_pool

# Torch asks for the name of whoever connects to a store, and name servers drop some of so many questions:
# wait for an answer for one second, not five. Processes that tests start inherit this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Up to four worker processes that stay warm for the whole session, the conformance suite's too."""
    return shared_pool()

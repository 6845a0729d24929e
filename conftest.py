"""Fixtures that tests of every package share."""

from __future__ import annotations

import pytest

from nnx.testing.pool import WorkerPool, shared_pool


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Up to four worker processes that stay warm for the whole session, the conformance suite's too."""
    return shared_pool()

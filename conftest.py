"""Fixtures that tests of every package share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nnx.testing.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Up to four worker processes that stay warm for the whole session."""
    with WorkerPool(size=4) as workers:
        yield workers

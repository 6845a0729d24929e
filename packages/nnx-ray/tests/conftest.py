"""Clusters of real raylets on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # before Ray is imported, which would write a token into the home
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three raylets of two CPUs each, and a head that has none; this process is connected to them."""
    with _started(3) as made:
        yield made


@pytest.fixture
def empty_cluster() -> Iterator[Any]:
    """A head that has no CPU; this process is connected to it."""
    with _started(0) as made:
        yield made


@contextmanager
def _started(nodes: int) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(TESTS)]))
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False},
        shutdown_at_exit=False,
    )
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=2)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        os.environ["PYTHONPATH"] = before
        ray.shutdown()
        made.shutdown()
        sys.stdout.flush()

"""Fixtures that tests of every package share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from longest_first import ordered
from nnx.testing.pool import WorkerPool, shared_pool

_SET_BY_LAUNCHERS = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
)
_STARTUP = str(Path(__file__).parent / "tests" / "startup")


def pytest_configure(config: pytest.Config) -> None:
    """Let every Python that a test starts find `startup/sitecustomize.py`, which makes imports cheaper."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would begin with the files of the most tests
    given = os.environ.get("PYTHONPATH", "")
    if _STARTUP not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, given]))
    if _STARTUP not in sys.path:
        sys.path.append(_STARTUP)  # some tests make the variable of a script out of this
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; under xdist, too, which hands out whole files in this order."""
    items[:] = ordered(items)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and thousands of tests: they all stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Up to four worker processes that stay warm for the whole session, the conformance suite's too."""
    return shared_pool()


@pytest.fixture(autouse=True)
def out_of_the_world() -> Iterator[None]:
    """Let a test that trains in this process leave its process group, and the port of it, to itself.

    Scripts that later tests start would inherit the port, find it taken, and wait.
    """
    before = {name: os.environ.get(name) for name in _SET_BY_LAUNCHERS}
    was_in_a_world = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_in_a_world:
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

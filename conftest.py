"""Fixtures that tests of every package share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import turns
from longest_first import ordered
from nnx_conformance.pool import WorkerPool, shared_pool

pytest_plugins = ["sites"]

_SET_BY_LAUNCHERS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("NODE_RANK", "GROUP_RANK", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the tests whose turn it is (see `turns`), and begin with the files that take longest.

    Under xdist, too, which hands out whole files in this order.
    """
    turns.mark_what_has_no_turn(items)
    if not any("::" in argument for argument in config.args):
        taken = turns.chosen(items, os.environ.get("NNX_MATRIX", ""))
        left = set(items).difference(taken)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = taken
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
    """Begin and end a test without a launcher's variables, and leave the process group that it made.

    Scripts that tests start would inherit the port, find it taken, and wait. What a fixture of a module or
    of the session has trained in this process is cleared away, too: hence also before the test.
    """
    _forget_the_launcher()
    was_in_a_world = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_in_a_world:
        dist.destroy_process_group()
    _forget_the_launcher()


def _forget_the_launcher() -> None:
    for name in _SET_BY_LAUNCHERS:
        os.environ.pop(name, None)

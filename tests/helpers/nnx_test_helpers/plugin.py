"""The pytest plugin: fixtures of every package's tests, and the import path of their jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from nnx_test_helpers.selection import MARKERS, mark_full, select_named
from nnx_test_helpers.sites import clean_names, run_python, site

if TYPE_CHECKING:
    from nnx_conformance.pool import WorkerPool

__all__ = ["clean_names", "out_of_the_world", "pool", "run_python", "site"]

_SET_BY_LAUNCHERS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("NODE_RANK", "GROUP_RANK", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and let tests and their worker processes import the modules of ``tests/jobs``.

    A package's folder has no settings of its own: pytest would read them in place of the monorepo's.
    """
    sys.path.insert(0, str(config.rootpath / "tests"))
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    select_named(config)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by ``-m``
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that the default run leaves out."""
    mark_full(items)


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Up to four worker processes that stay warm for the whole session, the conformance suite's too."""
    from nnx_conformance.pool import shared_pool

    return shared_pool()


@pytest.fixture(autouse=True)
def out_of_the_world() -> Iterator[None]:
    """Begin and end a test without a launcher's environment variables, and destroy its process group.

    Otherwise scripts that a test starts would inherit the port, find it taken, and wait. The process group of
    a fixture of the module or session is destroyed as well, hence also before the test.
    """
    import torch.distributed as dist

    _forget_the_launcher()
    was_in_a_world = dist.is_initialized()
    yield
    if dist.is_initialized() and not was_in_a_world:
        dist.destroy_process_group()
    _forget_the_launcher()


def _forget_the_launcher() -> None:
    for name in _SET_BY_LAUNCHERS:
        os.environ.pop(name, None)

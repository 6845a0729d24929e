"""Setup of every test run. Code that the tests of all packages share is in `tests/helpers`."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

_STARTUP = str(Path(__file__).parent / "tests" / "startup")


def pytest_configure(config: pytest.Config) -> None:
    """Make the Pythons that tests start cheap: they find `startup/sitecustomize.py`, and more."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # keep the order of testpaths: the longest first
    given = os.environ.get("PYTHONPATH", "")
    if _STARTUP not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, given]))
    if _STARTUP not in sys.path:
        sys.path.append(_STARTUP)  # some tests make the variable of a script out of this
    # Tests start a hundred Pythons: what the first of them compiles is for all, whatever the machine's habit.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.pop("PYTHONWARNINGS", None)  # tests read the warnings of their processes
    # Several workers share the cores, and start processes: each has one thread, as under torchrun.
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # in this process torch has read the variable by now
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let every test draw the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and thousands of tests: they all stay to the end."""
    gc.collect()
    gc.freeze()

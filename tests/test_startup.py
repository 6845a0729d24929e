"""The effects of `tests/startup` on every Python that a test starts: it skips unused imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys
import lightning.pytorch, torchmetrics
assert gc.get_threshold()[0] == 20_000
assert not {"transformers", "scipy", "matplotlib"} & set(sys.modules)
assert not any(finder.__module__ == "sitecustomize" for finder in sys.meta_path if isinstance(finder, type))

import matplotlib, scipy.signal
import torch
from lightning_utilities.core.imports import RequirementCache
from torchmetrics import MeanMetric
mean = MeanMetric()
mean.update(torch.tensor([1.0, 3.0]))
assert mean.compute() == 2
assert RequirementCache("torch>=2") and not RequirementCache("scipy") and not RequirementCache("nothing")
"""


@pytest.mark.full
def test_lightning_comes_without_what_torchmetrics_adds_and_the_rest_is_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""Directories saved by Lightning's own DeepSpeedStrategy resume under every stage, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from jobs.deepspeed_native_jobs import FIXTURES, resume_native
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.training import Run

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

STAGES = {"nnx_deepspeed_2": {}, "nnx_deepspeed_3": {"persistence_threshold": 10}}
STEPS = 8
"""Of two epochs; the directories are of the end of the first."""


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("name", ["zero2_world2_lightning", "zero3_world2_lightning"])
def test_what_deepspeed_saved_goes_on_as_it_did_there(pool: WorkerPool, name: str, strategy: str) -> None:
    wanted = load_file(FIXTURES / "deepspeed_expected" / f"{name}.safetensors")
    run = Run(strategy=strategy, options=STAGES[strategy], steps=STEPS)
    for losses, weights in pool.run(resume_native, name, run, world_size=2):
        torch.testing.assert_close(torch.tensor(losses), wanted["losses"][4:], rtol=0, atol=1e-6)
        assert weights
        for key, value in weights.items():
            torch.testing.assert_close(value, wanted[f"next.model.{key}"], rtol=0, atol=1e-6)

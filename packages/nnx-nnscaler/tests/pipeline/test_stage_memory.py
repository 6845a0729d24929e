"""`nnx plan` counts a pipeline's activations by its schedule, and no more stages than layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nnx


def peak(devices: int, **options: Any) -> int:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    plan = nnx.plan(
        layers, torch.zeros(4096, 64), devices=devices, strategies=["nnscaler_pp"], options=options
    )
    found = plan.rows[0].estimate
    assert found is not None
    return found.peak


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    assert peak(4, pipeline_nmicros=16) == peak(4)
    assert peak(4, pipeline_nmicros=16, pipeline_scheduler="1f1b") < 0.6 * peak(4)
    assert peak(4, pipeline_nmicros=4, pipeline_scheduler="1f1b") == peak(4)


@pytest.mark.full
def test_there_are_no_more_stages_than_layers() -> None:
    assert peak(64) == peak(8) < peak(4)
    assert peak(64, plan_ngpus=4) == peak(4)

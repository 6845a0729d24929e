"""Fixtures of the local engine's gradient tests."""

from __future__ import annotations

import pytest
import torch

from jobs.colossalai_local import TIERS, UNITS, ByHand, Layers, lay_out


@pytest.fixture(params=TIERS, ids=lambda one: one.value)
def laid_out(request):
    """A model, its engine, and the same training by hand."""
    model = Layers()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine = lay_out(model, request.param)
    yield model, engine, by_hand
    engine.device.close()

"""What tests of the local engine's gradients share."""

from __future__ import annotations

import pytest
import torch

from jobs.colossalai_local import TIERS, UNITS, ByHand, Layers, lay_out


@pytest.fixture(params=TIERS, ids=lambda one: one.value)
def laid_out(request):
    """A model, its engine, and what is to be done by hand."""
    model = Layers()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine = lay_out(model, request.param)
    yield model, engine, by_hand
    engine.device.close()

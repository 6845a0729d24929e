"""Which chunks go on in the background, where some of a model lie on the device."""

from __future__ import annotations

import pytest
import torch

from jobs.colossalai_layers import Layer, Model
from nnx_colossalai.optimizers.stepping import Stepper
from nnx_colossalai.plan.spec import Tier

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("tier", [Tier.GATHERED, Tier.SHARDED])
def test_a_chunk_whose_masters_lie_on_the_device_is_stepped_at_once(tier: Tier) -> None:
    models = [Model(Layer), Model(Layer)]
    for chunk in models[0].chunks[::2]:
        chunk.tier = tier
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    stepper = Stepper(models[0].chunks, overlap="exact")
    for step in range(3):
        for model in models:
            model.loss_and_backward(step)
        stepper.step(optimizers[0], optimizers[0].step)
        optimizers[1].step()
        for chunk in models[1].chunks:
            chunk.refresh()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for chunk in models[0].chunks:
            if chunk.pending is not None:
                chunk.pending()
    stepper.finish()
    stepper.close()
    for chunk in models[0].chunks:
        in_background = {name.startswith("nnx-optimizer-step") for name in chunk.refreshed_in}
        assert in_background == {chunk.tier.steps_on_host}
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)

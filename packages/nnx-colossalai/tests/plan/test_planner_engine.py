"""The planner's predictions against the engine's allocations and copies on a simulated device."""

import random

import pytest
import torch
from torch import nn

from jobs.colossalai_local import Layer, Layers, inputs, lay_out, optimizer_of, refresh
from jobs.simulated_device import SimDevice
from nnx_colossalai.plan.cost import MemoryModel
from nnx_colossalai.plan.schedule import work
from nnx_colossalai.plan.spec import Group, ModelSpec, Tier

INNER = (130, 57, 201, 33, 88)
NAMES = (*(f"layers.{at}" for at in range(len(INNER))), "")


class Watched(SimDevice):
    """Remembers the most that was in use, and for the host all that was made."""

    peak = 0

    def empty(self, numel, dtype):
        made = super().empty(numel, dtype)
        self.peak = max(self.peak, self.used)
        return made

    def restore(self, tensor):
        super().restore(tensor)
        self.peak = max(self.peak, self.used)


def ragged():
    model = Layers()
    model.layers = nn.ModuleList(map(Layer, INNER))
    return model


def spec_of(model, working):
    sizes = [sum(one.numel() for one in layer.parameters()) for layer in (*model.layers, model.head)]
    return ModelSpec(
        groups=tuple(
            Group(name=name, numel=size, trainable=size) for name, size in zip(NAMES, sizes, strict=True)
        ),
        working_bytes=working,
        optimizer_bytes=0,
    )


def trained(tiers, dtype, *, accumulate):
    """Three steps; the engine's device after them, and bytes moved in the last step."""
    model, device = ragged(), Watched(2**24)
    engine = lay_out(model, dict(zip(NAMES, tiers, strict=True)), dtype=dtype, device=device)
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        if step == 2:
            device.traffic.to_device = device.traffic.to_host = 0
        optimizer.zero_grad()
        for micro in range(accumulate):
            x = inputs(10 * step + micro)
            engine.run_step(model, lambda model, x: model(x).float().square().mean(), model, x).backward()
        optimizer.step()
        refresh(engine)
    moved = device.traffic.to_device, device.traffic.to_host
    engine.unparallelize(model)
    device.close()
    return device.peak, moved


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(4))
def test_the_engine_holds_what_was_predicted_but_for_what_autograd_makes(seed):
    """Gradients on their way and optimizer state are not made through the device, so they are left out."""
    draw = random.Random(seed)
    tiers = [draw.choice(list(Tier)) for _ in NAMES]
    spec = spec_of(ragged(), 2)
    model = MemoryModel(spec)
    gradients = sum(one[tier].gradients for one, tier in zip(model.footprints, tiers, strict=True))
    predicted = gradients + max(
        moment.weights + moment.masters + moment.gathered + moment.staging
        for moment in model.memory(tiers).timeline
    )
    peak, _ = trained(tiers, torch.bfloat16, accumulate=2)
    assert peak == predicted


@pytest.mark.quick(every=3, first=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["mixed", "full"])
@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.value)
def test_the_engine_moves_the_bytes_that_were_predicted(tier, dtype):
    spec = spec_of(ragged(), 2 if dtype else 4)
    works = [work(spec, group, tier) for group in spec.groups]
    _, moved = trained([tier] * len(NAMES), dtype, accumulate=1)
    assert moved == (sum(one.to_device for one in works), sum(one.to_host for one in works))

"""Single omissions of a chunk that numbers of ordinary trainings do not show, each provoked."""

from __future__ import annotations

import pytest
import torch

from jobs.colossalai_local import ByHand, Layers, inputs, lay_out, refresh, same_bits
from nnx_colossalai.device.simulated import SimDevice
from nnx_colossalai.plan.spec import Tier

UNITS = ("layers.0", "layers.1", "layers.2", "")
on_host = pytest.mark.parametrize("tier", [Tier.OFFLOADED, Tier.STREAMED], ids=lambda one: one.value)


def mean_square(model, x):
    return model(x).float().square().mean()


def step_of_both(engine, model, by_hand, seed):
    """The same step of a model in chunks and by hand; whether anything differs."""
    for one in (*model.parameters(), *by_hand.masters.values()):
        one.grad = None
    loss = engine.run_step(model, mean_square, model, inputs(seed))
    loss.backward()
    assert loss.item() == by_hand.backward(lambda copied: mean_square(copied, inputs(seed)))
    assert same_bits(model, by_hand.masters) == []


def add_to_both(model, by_hand, value):
    """As an averaging callback would, in place."""
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.add_(value)
            by_hand.masters[name].add_(value)


@pytest.mark.parametrize("tier", list(Tier), ids=lambda one: one.value)
def test_masters_changed_in_place_between_two_steps_are_what_the_next_one_uses(tier):
    model = Layers()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine = lay_out(model, tier)
    for seed in range(3):
        step_of_both(engine, model, by_hand, seed)
        add_to_both(model, by_hand, 0.125)  # nobody refreshes
    engine.device.close()


@on_host
def test_weights_fetched_ahead_for_a_step_that_does_not_use_them_are_waited_for(tier):
    """The copy of the first chunk is under way when a step ends that never came to it."""
    model = Layers()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine = lay_out(model, tier, device=SimDevice(to_device=20_000.0))  # some 20 ms a layer
    step_of_both(engine, model, by_hand, 0)
    add_to_both(model, by_hand, 0.125)
    refresh(engine)
    assert engine.run_step(model, lambda: None) is None
    step_of_both(engine, model, by_hand, 1)
    engine.device.close()

"""A planted fault of a chunk that ordinary training does not reveal: an unnoticed change of masters."""

from __future__ import annotations

import pytest
import torch

from jobs.colossalai_local import ByHand, Layers, inputs, lay_out, same_bits
from nnx_colossalai.plan.spec import Tier

UNITS = ("layers.0", "layers.1", "layers.2", "")


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

"""The gradients are the same for every way of observing them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jobs.colossalai_local import TIERS, UNITS, Layers, both, inputs, lay_out, mean_square, same_bits
from nnx_colossalai.plan.spec import Tier

each_tier = pytest.mark.parametrize("tier", TIERS, ids=lambda one: one.value)


def heard_by_engine(model):
    """Of each parameter, whether the engine had a hook on it when its gradient was accumulated."""
    heard = {}
    for name, one in model.named_parameters():
        one.register_post_accumulate_grad_hook(
            lambda one, name=name: heard.__setitem__(name, len(one._post_accumulate_grad_hooks) > 1)
        )
    return heard


@pytest.mark.quick(every=4)
@each_tier
def test_one_parameter_tells_of_a_chunk_on_the_device_once_the_order_is_known(tier):
    model = Layers()
    engine = lay_out(model, tier)
    heard = heard_by_engine(model)
    counts = []
    for seed in range(3):
        engine.run_step(model, mean_square, model, inputs(seed)).backward()
        counts.append(sum(heard.values()))
    together = len(heard) if tier.steps_on_host else len(UNITS)
    assert counts == [len(heard), together, together]
    assert all(len(one._post_accumulate_grad_hooks) == 2 for one in model.parameters())
    engine.device.close()


def test_another_order_is_learned():
    def lower(model, x):
        return model.layers[1].down(torch.ones(3, 13, dtype=torch.bfloat16)).float().sum()

    model = Layers()
    engine = lay_out(model, Tier.GATHERED)
    heard = heard_by_engine(model)
    counts = []
    for loss in (mean_square, lower, lower, lower):
        heard.clear()
        engine.run_step(model, loss, model, inputs(0)).backward()
        counts.append(sum(heard.values()))
    of_lower = len(list(model.layers[1].down.parameters()))
    assert counts == [len(list(model.parameters())), 0, of_lower, 1]
    engine.device.close()


@pytest.mark.quick(every=4, first=2)
def test_gradients_count_whatever_comes_last_or_not_at_all(laid_out):
    """The last of a chunk so far is unused, frozen, or first; a backward fails, or is of few parameters."""

    def skips(model, x):
        return model(x).float().square().mean() + 0 * model.layers[2](model.layers[0](x.bfloat16())).sum()

    def part(model, x):
        return model.layers[1](x.bfloat16()).float().square().mean()

    def fails(model, x):
        value = mean_square(model, x)
        value.register_hook(lambda _: 1 / 0)
        return value

    model, engine, by_hand = laid_out
    both(laid_out, 0)
    for seed, loss in enumerate((mean_square, skips, part, mean_square, part, skips, mean_square), start=1):
        both(laid_out, seed, loss)
        assert same_bits(model, by_hand.masters) == [], seed
    with pytest.raises(ZeroDivisionError):
        engine.run_step(model, fails, model, inputs(9)).backward()
    both(laid_out, 10)
    for of in (model, by_hand.model):
        of.layers[1].up.requires_grad_(False)
    by_hand.masters["layers.1.up.weight"].requires_grad_(False)
    both(laid_out, 11)
    assert same_bits(model, by_hand.masters) == []


def test_gradients_of_backwards_inside_of_a_backward_are_added_up_in_float32():
    """In float32: 256 and 1 have no sum in bfloat16. The first two steps have no backward inside."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    engine = lay_out(model, {"": Tier.GATHERED})

    def loss(model, inside):
        x, y = (torch.tensor([[value]], dtype=torch.bfloat16, requires_grad=True) for value in (256.0, 1.0))
        if not inside:
            return model[1](model[0](x)).sum()
        return sum(checkpoint(model[1], one, use_reentrant=True).sum() for one in (x, y))

    for inside in (False, False, True, True):
        model.zero_grad()
        engine.run_step(model, loss, model, inside).backward()
        assert not inside or model[1].weight.grad.item() == 257.0
    engine.device.close()


@pytest.mark.quick(every=4)
@each_tier
def test_modules_inside_of_a_unit_are_called_without_hooks_of_ours(tier):
    """Only in it, and not where weights come and go; also after an error in it."""
    model = Layers()
    engine = lay_out(model, tier)
    inner, before = model.layers[1].up, model.layers[1].up._forward_pre_hooks.copy()
    assert before
    seen = []
    inner.register_forward_pre_hook(lambda module, _: seen.append(len(module._forward_pre_hooks)))
    x = inputs(0)
    engine.run_step(model, mean_square, model, x).backward()
    engine.run_step(model, lambda x: model.layers[1].up(x.bfloat16()).float().sum(), x).backward()
    assert seen == [2 if tier is Tier.STREAMED else 1, 2]
    assert next(iter(inner._forward_pre_hooks)) == next(iter(before))

    failing = inner.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run_step(model, mean_square, model, x)
    failing.remove()
    assert next(iter(inner._forward_pre_hooks)) == next(iter(before))
    assert len(inner._forward_hooks) == 1
    engine.device.close()

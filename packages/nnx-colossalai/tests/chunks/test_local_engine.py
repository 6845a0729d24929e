"""Chunks in one process are bitwise equal to a handwritten loop with masters, for all kinds of models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from jobs.colossalai_local import (
    TIERS,
    WIDTH,
    ByHand,
    Layer,
    Layers,
    inputs,
    lay_out,
    optimizer_of,
    refresh,
    same_bits,
    units_of,
)
from jobs.simulated_device import SimDevice
from nnx_colossalai.chunks.local import LocalEngine
from nnx_colossalai.plan.spec import Tier
from nnx_core.backend import ParallelContext

UNITS = ("layers.0", "layers.1", "layers.2", "")
MIXED = dict(zip(UNITS, (Tier.STREAMED, Tier.OFFLOADED, Tier.SHARDED, Tier.STREAMED), strict=True))
PLACINGS = [*TIERS, MIXED]
each_tier = pytest.mark.parametrize("tier", PLACINGS, ids=lambda one: one.value if one in TIERS else "mixed")


def mean_square(model, x):
    return model(x).float().square().mean()


def train(model, tiers, *, dtype=torch.bfloat16, steps=2, micro_batches=1, loss=mean_square, units=None):
    """Train with chunks and by hand; return both models and their differences."""
    units = tuple(tiers) if isinstance(tiers, dict) else UNITS
    by_hand = ByHand(model, dtype, units)
    reference = optimizer_of(by_hand.masters.values())
    engine = lay_out(model, tiers, dtype=dtype)
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(micro_batches):
            x = inputs(10 * step + micro)
            value = engine.run_step(model, loss, model, x)
            value.backward()
            assert value.item() == by_hand.backward(lambda copied, x=x: loss(copied, x))
        assert same_bits(model, by_hand.masters) == []
        optimizer.step()
        reference.step()
        refresh(engine)
    assert same_bits(model, by_hand.masters) == []
    engine.unparallelize(model)
    engine.device.close()
    assert same_bits(model, by_hand.masters) == []
    return model


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
@each_tier
def test_masters_and_gradients_are_those_of_a_loop_by_hand(tier, dtype, micro_batches):
    train(Layers(), tier, dtype=dtype, micro_batches=micro_batches)


@pytest.mark.quick(every=5, first=1)
@each_tier
def test_weights_that_are_their_own_masters_train_in_16_bits(tier):
    train(Layers().bfloat16(), tier, dtype=None, loss=lambda model, x: mean_square(model, x.bfloat16()))


class Odd(nn.Module):
    """Everything that is unlike a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = Layer()
        self.first.up.requires_grad_(False)
        self.shared = Layer(inner=5)
        self.outer = nn.Sequential(Layer(), Layer())
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.unused = nn.Linear(3, 3)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(13, WIDTH, bias=False)
        self.tied.weight = self.outer[0].down.weight

    def forward(self, x):
        x = self.shared(self.first(x))
        x = self.shared(self.outer(x) * self.scale)
        image = x.reshape(1, 2, 4, 4).to(self.conv.weight.dtype)
        pooled = self.conv(image).mean() + self.precise.mean()
        return x * pooled + self.tied(F.pad(x, (0, 5)).to(self.tied.weight.dtype))


@pytest.mark.quick(every=5, first=2)
@pytest.mark.parametrize("placing", range(5))
def test_odd_parameters_and_nested_shared_and_tied_modules_train(placing):
    names = ("first", "shared", "outer.0", "outer", "")
    tiers = [TIERS[(place + placing) % 4] if placing < 4 else Tier.STREAMED for place in range(5)]
    model = Odd()
    objects = dict(model.named_parameters())
    train(model, dict(zip(names, tiers, strict=True)))
    assert all(one is objects[name] for name, one in model.named_parameters())
    assert model.tied.weight is model.outer[0].down.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.steps.dtype == torch.int64 and model.phase.dtype == torch.complex64


def test_the_order_of_elements_stays_in_a_step_and_between():
    model = Odd()
    engine = lay_out(model, {"": Tier.OFFLOADED})
    strides = [model.conv.weight.stride()]
    model.conv.register_forward_hook(lambda module, *_: strides.append(module.weight.stride()))
    mean_square(model, inputs(1)).backward()
    strides += [model.conv.weight.stride(), model.conv.weight.grad.stride()]
    assert strides == [(18, 1, 6, 2)] * 4
    engine.device.close()


def test_layers_with_running_statistics_train_at_16_bits_with_weights_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    engine = lay_out(model, {"": Tier.OFFLOADED})
    dtypes = []
    model[1].register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = engine.run_step(model, mean_square, model, inputs(0))
    loss.backward()
    assert dtypes == [torch.float32]
    assert model[1].weight.grad.abs().sum() > 0 and model[1].weight.grad.dtype == torch.float32
    engine.device.close()


@pytest.mark.quick(every=5)
@each_tier
def test_between_steps_parameters_are_masters_and_in_a_step_they_are_not(tier):
    model = Layers()
    engine = lay_out(model, tier)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, _: seen.append(module.up.weight.dtype))
    loss = engine.run_step(model, mean_square, model, inputs(0))
    assert seen == [torch.bfloat16]
    loss.backward()
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert {one.grad.dtype for one in model.parameters()} == {torch.float32}
    engine.device.close()


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("tier", [Tier.GATHERED, Tier.SHARDED])
def test_where_masters_are_the_working_weights_nothing_is_hooked_and_nothing_kept_twice(tier):
    model = Layers()
    engine = lay_out(model, tier, dtype=None)
    assert engine.device.used == 4 * sum(one.numel() for one in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(one._backward_hooks or one._post_accumulate_grad_hooks for one in model.parameters())
    engine.device.close()


def test_laying_out_twice_changes_nothing():
    model = Layers()
    engine = lay_out(model, Tier.OFFLOADED)
    pointers = [one.data_ptr() for one in model.parameters()]
    assert engine.parallelize(model, []) == {}
    assert [one.data_ptr() for one in model.parameters()] == pointers
    engine.device.close()


def test_a_model_on_the_meta_device_gets_values_and_stays_tied():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
    before = dict(model.named_parameters())
    engine = LocalEngine(ParallelContext(device=torch.device("cpu")), SimDevice(), torch.bfloat16)
    replaced = engine.parallelize(model, units_of(model, {"": Tier.OFFLOADED}))
    assert replaced == {before[name]: one for name, one in model.named_parameters()}
    assert model[1].weight is model[0].weight
    assert model[0].weight.abs().sum() > 0 and not model[0].weight.is_meta
    assert mean_square(model, torch.ones(2, 4)).item() > 0
    engine.device.close()


@pytest.mark.quick(every=5, first=4)
@each_tier
@pytest.mark.parametrize("reentrant", [True, False])
def test_forwards_that_run_again_within_backward_have_the_right_weights(tier, reentrant):
    def recomputed(model, x):
        x = x.clone().requires_grad_()
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return model.head(x.to(model.head.weight.dtype)).float().square().mean()

    train(Layers(), tier, loss=recomputed)


@pytest.mark.quick(every=5)
@each_tier
def test_a_group_of_layers_that_runs_again_within_backward_has_the_right_weights(tier):
    def recomputed(model, x):
        x = checkpoint(nn.Sequential(*model.layers), x.requires_grad_(), use_reentrant=False)
        return model.head(x).float().square().mean()

    train(Layers(), tier, loss=recomputed)


@pytest.mark.quick(every=5, first=1)
@each_tier
def test_two_backwards_over_one_graph_accumulate_twice(tier):
    model = Layers()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    by_hand.backward(lambda copied: mean_square(copied, inputs(0)))
    engine = lay_out(model, tier)
    loss = engine.run_step(model, mean_square, model, inputs(0))
    loss.backward(retain_graph=True)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    once = {name: one.grad.clone() for name, one in model.named_parameters()}
    loss.backward()
    assert same_bits(model, by_hand.masters) != []
    for name, one in model.named_parameters():
        assert torch.equal(once[name], by_hand.masters[name].grad), name
        assert torch.equal(one.grad, 2 * once[name]), name
    engine.device.close()


@pytest.mark.quick(every=5, first=2)
@each_tier
def test_a_step_that_runs_backward_and_the_optimizers_itself_is_right(tier):
    model = Layers()
    model.automatic_optimization = False
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    front = [name for name in by_hand.masters if name.startswith("layers.0")]
    back = [name for name in by_hand.masters if not name.startswith("layers.0")]
    named = dict(model.named_parameters())
    engine = lay_out(model, tier)
    optimizers = [optimizer_of(named[name] for name in names) for names in (front, back)]
    references = [optimizer_of(by_hand.masters[name] for name in names) for names in (front, back)]

    def part(model, x):
        return model.layers[0](x).float().square().mean()

    def by_parts(model, x):
        return model.head(model.layers[1](model.layers[0](x))).float().square().mean()

    def step():
        for optimizer, loss in zip(optimizers, (part, by_parts), strict=True):
            optimizer.zero_grad()
            loss(model, inputs(0)).backward()
            assert {one.dtype for one in model.parameters()} == {torch.float32}
            optimizer.step()
            refresh(engine)

    for _ in range(3):
        engine.run_step(model, step)
        for reference, loss in zip(references, (part, by_parts), strict=True):
            reference.zero_grad()
            by_hand.backward(lambda copied, loss=loss: loss(copied, inputs(0).bfloat16()))
            reference.step()
        for name, one in model.named_parameters():
            assert torch.equal(one, by_hand.masters[name]), name
    engine.device.close()


@pytest.mark.quick(every=5, first=3)
@each_tier
def test_evaluation_computes_with_working_weights_and_leaves_masters(tier):
    model = Layers()
    reference = copy.deepcopy(model).bfloat16()
    engine = lay_out(model, tier)
    used = engine.device.used
    with torch.no_grad():
        out = engine.run_step(model, model, inputs(0))
        assert torch.equal(out, reference(inputs(0).bfloat16()))
        assert {one.dtype for one in model.parameters()} == {torch.float32}
        assert torch.equal(model(inputs(1)), reference(inputs(1).bfloat16()))  # outside of any step
        assert torch.equal(
            model.layers[1].up(inputs(1).bfloat16()), reference.layers[1].up(inputs(1).bfloat16())
        )
    with torch.inference_mode():
        assert torch.equal(model(inputs(2)), reference(inputs(2).bfloat16()))
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert engine.device.used == used
    engine.device.close()


@pytest.mark.quick(every=5, first=4)
@each_tier
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_after_an_exception_masters_are_back_and_the_next_step_is_right(tier, where):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("on purpose")

    def failing(model, x):
        x = model.layers[0](x)
        if where == "forward":
            model.layers[1].up(x.bfloat16())
            raise ValueError("on purpose")
        x = Failing.apply(x)
        return model.head(model.layers[2](model.layers[1](x))).float().square().mean()

    model = Layers()
    masters = copy.deepcopy(dict(model.named_parameters()))
    engine = lay_out(model, tier)
    used = engine.device.used
    with pytest.raises(ValueError, match="on purpose"):
        loss = engine.run_step(model, failing, model, inputs(0))
        if where == "between":
            raise ValueError("on purpose")
        loss.backward()
    engine.finish()
    model.zero_grad()
    assert engine.device.used == used
    assert same_bits(model, masters) == []
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    by_hand.backward(lambda copied: mean_square(copied, inputs(0)))
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


def test_a_step_whose_result_needs_no_backward_is_over_at_once():
    model = Layers()
    engine = lay_out(model, Tier.STREAMED)
    assert engine.run_step(model, lambda x: print(model(x).dtype), inputs(0)) is None
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    value = engine.run_step(model, lambda x: {"loss": model(x).detach(), "size": 4}, inputs(0))
    assert value["size"] == 4
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    engine.device.close()


@pytest.mark.quick(every=5, first=1)
@each_tier
def test_copies_of_a_model_and_pickled_ones_are_plain_and_leave_it_alone(tier):
    model = Layers()
    plain = copy.deepcopy(model)
    engine = lay_out(model, tier)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    used = engine.device.used
    for copied in copies:
        assert torch.equal(copied(inputs(0)), plain(inputs(0)))
        copied(inputs(0)).sum().backward()
    assert engine.device.used == used
    assert all(one.grad is None for one in model.parameters())
    engine.unparallelize(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    engine.device.close()

"""User changes of gradients and parameters between and within steps take effect, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jobs.colossalai_local import (
    TIERS,
    UNITS,
    WIDTH,
    ByHand,
    Layer,
    Layers,
    both,
    inputs,
    lay_out,
    mean_square,
    optimizer_of,
    refresh,
    same_bits,
)
from jobs.simulated_device import SimDevice
from nnx_colossalai.chunks.local_chunk import Slot
from nnx_colossalai.chunks.local_gradients import Gradients
from nnx_colossalai.device import HostDevice
from nnx_colossalai.plan.spec import Tier

each_tier = pytest.mark.parametrize("tier", TIERS, ids=lambda one: one.value)
HOSTED = [Tier.OFFLOADED, Tier.STREAMED]


@pytest.mark.quick(every=4)
def test_hooks_of_the_user_see_and_change_gradients_of_the_working_dtype(laid_out):
    model, _, by_hand = laid_out
    seen = []

    def doubled(gradient):
        seen.append(gradient.dtype)
        return gradient * 2

    def after(parameter):
        seen.append(parameter.grad.dtype)
        parameter.grad.clamp_(-0.01, 0.01)

    for of in (model, by_hand.model):
        of.layers[1].up.weight.register_hook(doubled)
        of.layers[1].up.weight.register_post_accumulate_grad_hook(after)
    both(laid_out, 0)
    both(laid_out, 1)
    assert seen == [torch.bfloat16] * 8
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=1)
def test_gradients_that_the_user_sets_or_changes_between_backwards_count(laid_out):
    model, _, by_hand = laid_out
    both(laid_out, 0)
    for name, one in (*model.named_parameters(), *by_hand.masters.items()):
        if "up" in name:
            one.grad.mul_(0.5)
        elif "bias" in name:
            one.grad = torch.ones_like(one)
        elif "head" in name:
            one.grad = None
    both(laid_out, 1)
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_let_go_between_forward_and_backward_as_trainers_do(laid_out, set_to_none):
    model, engine, by_hand = laid_out
    both(laid_out, 0)
    loss = engine.run_step(model, mean_square, model, inputs(1))
    model.zero_grad(set_to_none=set_to_none)
    loss.backward()
    for one in by_hand.masters.values():
        one.grad = None if set_to_none else torch.zeros_like(one)
    by_hand.backward(lambda copied: mean_square(copied, inputs(1)))
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=3)
def test_gradients_held_on_to_are_not_overwritten(laid_out):
    model, _, _ = laid_out
    both(laid_out, 0)
    held = [one.grad for one in model.parameters()]
    copies = [one.clone() for one in held]
    model.zero_grad()
    both(laid_out, 1)
    assert all(torch.equal(one, other) for one, other in zip(held, copies, strict=True))


@pytest.mark.quick(every=4)
def test_letting_gradients_go_frees_their_memory(laid_out):
    model, engine, _ = laid_out
    used = engine.device.used
    both(laid_out, 0)
    model.zero_grad()
    assert engine.device.used == used


class Asked(SimDevice):
    """Counts how often it is asked for host memory."""

    asked = 0

    def host_empty(self, numel, dtype):
        self.asked += 1
        return super().host_empty(numel, dtype)


@pytest.mark.quick(every=4, first=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("tier", HOSTED, ids=lambda one: one.value)
def test_gradients_on_the_host_lie_where_the_last_ones_did(tier, dtype):
    model = Layers()
    engine = lay_out(model, tier, dtype=dtype, device=Asked(delays=1, max_delay=0.0003))
    asked, places = [], []
    for seed in range(3):
        before = engine.device.asked
        model.zero_grad()
        for micro in range(2):
            engine.run_step(model, mean_square, model, inputs(2 * seed + micro)).backward()
        asked.append(engine.device.asked - before)
        places.append([one.grad.data_ptr() for one in model.parameters()])
    assert asked[0] > 0
    assert asked[1:] == [0, 0]
    assert places[0] == places[1] == places[2]
    engine.device.close()


@pytest.mark.quick(every=4, first=2)
def test_gradients_between_steps_are_those_of_the_masters(laid_out):
    model, _, by_hand = laid_out
    both(laid_out, 0)
    for one in (*model.parameters(), *by_hand.masters.values()):
        (one**2).sum().backward()
    both(laid_out, 1)
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=3)
def test_gradients_asked_for_alone_leave_nothing_behind(laid_out):
    model, engine, by_hand = laid_out
    both(laid_out, 0)

    def step(model, x):
        asked = torch.autograd.grad(mean_square(model, x), list(model.parameters()))
        assert {one.dtype for one in asked} == {torch.bfloat16}
        return mean_square(model, x)

    loss = engine.run_step(model, step, model, inputs(1))
    model.zero_grad()
    loss.backward()
    for one in by_hand.masters.values():
        one.grad = None
    by_hand.backward(lambda copied: mean_square(copied, inputs(1)))
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4)
def test_gradients_of_gradients_are_right(laid_out):
    def penalty(model, x):
        x = x.clone().requires_grad_()
        [slope] = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
        return slope.float().square().mean() + mean_square(model, x)

    model, _, by_hand = laid_out
    both(laid_out, 0, penalty)
    assert same_bits(model, by_hand.masters) == []
    both(laid_out, 1)
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=1)
def test_backward_for_some_parameters_only_leaves_others_alone(laid_out):
    model, engine, by_hand = laid_out
    loss = engine.run_step(model, mean_square, model, inputs(0))
    loss.backward(inputs=[model.layers[1].up.weight])
    by_hand.backward(lambda copied: mean_square(copied, inputs(0)))
    for name, one in model.named_parameters():
        expected = by_hand.masters[name].grad if name == "layers.1.up.weight" else None
        assert (one.grad is None) == (expected is None), name
        assert expected is None or torch.equal(one.grad, expected)


@pytest.mark.quick(every=4, first=2)
@each_tier
def test_sparse_gradients_stay_sparse(tier):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    by_hand = ByHand(model, torch.bfloat16, [""])
    engine = lay_out(model, {"": tier})
    words = torch.tensor([1, 1, 5])
    for _ in range(2):
        engine.run_step(model, mean_square, model, words).backward()
        by_hand.backward(lambda copied: mean_square(copied, words))
    gradient, expected = model[0].weight.grad, by_hand.masters["0.weight"].grad
    assert gradient.is_sparse and gradient.dtype == torch.float32
    assert torch.equal(gradient.to_dense(), expected.to_dense())
    engine.device.close()


@pytest.mark.quick(every=4, first=3)
@each_tier
def test_parameters_that_are_unfrozen_and_frozen_later_get_and_lose_gradients(tier):
    model = Layers()
    model.layers[0].requires_grad_(False)
    engine = lay_out(model, tier)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    assert all(one.grad is None for one in model.layers[0].parameters())
    model.zero_grad()
    model.layers[0].requires_grad_(True)
    model.layers[1].requires_grad_(False)
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    by_hand.backward(lambda copied: mean_square(copied, inputs(0)))
    assert model.layers[0].up.weight.grad is not None
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


@pytest.mark.quick(every=4)
def test_masters_that_are_changed_between_steps_are_what_the_next_one_computes_with(laid_out):
    model, engine, by_hand = laid_out
    optimizer, reference = optimizer_of(model.parameters()), optimizer_of(by_hand.masters.values())
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        both(laid_out, step)
        optimizer.step()
        refresh(engine)
        reference.step()
        for one in (*model.parameters(), *by_hand.masters.values()):
            if step == 0:
                one.data.clamp_(-0.1, 0.1)
            elif step == 1:
                with torch.no_grad():
                    one.mul_(0.75)
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=1)
def test_masters_that_are_exchanged_for_an_evaluation_count_in_it_and_not_after(laid_out):
    model, engine, by_hand = laid_out
    both(laid_out, 0)
    own = [one.detach().clone() for one in model.parameters()]
    for one in model.parameters():
        one.data.mul_(0.5)
    with torch.no_grad():
        halved = engine.run_step(model, model, inputs(1))
        for one, value in zip(model.parameters(), own, strict=True):
            one.copy_(value)
        whole = engine.run_step(model, model, inputs(1))
        assert not torch.equal(halved, whole)
        for one in model.parameters():
            one.data.mul_(0.5)
    for one, value in zip(model.parameters(), own, strict=True):
        one.data.copy_(value)
    both(laid_out, 2)
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=2)
def test_weights_that_a_forward_changes_in_place_are_kept(laid_out):
    model, engine, _ = laid_out

    def normalizes(model, x):
        with torch.no_grad():
            model.layers[1].up.weight.fill_(0.5)
        return mean_square(model, x)

    others = {name: one.detach().clone() for name, one in model.named_parameters()}
    others.pop("layers.1.up.weight")
    engine.run_step(model, normalizes, model, inputs(0)).backward()
    assert torch.equal(model.layers[1].up.weight, torch.full((13, WIDTH), 0.5))
    for name, one in model.named_parameters():
        assert name not in others or torch.equal(one, others[name]), name
    with torch.no_grad():
        weights = []
        model.layers[1].up.register_forward_hook(lambda module, *_: weights.append(module.weight.unique()))
        engine.run_step(model, model, inputs(0))
    assert weights[0].tolist() == [0.5]


@pytest.mark.quick(every=4, first=3)
@pytest.mark.parametrize("early", [True, False])
def test_a_weight_that_is_used_while_its_module_does_not_run_is_there(laid_out, early):
    def loss(model, x):
        used = F.linear(x.bfloat16(), model.layers[1].up.weight).float().mean() if early else 0.0
        value = mean_square(model, x)
        penalty = sum(one.float().square().sum() for one in model.parameters())
        return value + used + 0.01 * penalty

    model, _, by_hand = laid_out
    for seed in range(2):
        both(laid_out, seed, loss)
        assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4)
def test_two_graphs_before_their_backwards_are_both_right(laid_out):
    model, engine, by_hand = laid_out
    first = engine.run_step(model, mean_square, model, inputs(0))
    second = engine.run_step(model, mean_square, model, inputs(1))
    second.backward()
    first.backward()
    for seed in (1, 0):
        by_hand.backward(lambda copied, seed=seed: mean_square(copied, inputs(seed)))
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=1)
def test_a_forward_without_run_step_trains_too(laid_out):
    model, _, by_hand = laid_out
    mean_square(model, inputs(0)).backward()
    by_hand.backward(lambda copied: mean_square(copied, inputs(0)))
    assert same_bits(model, by_hand.masters) == []


@pytest.mark.quick(every=4, first=2)
@each_tier
def test_a_graph_that_returns_an_object_of_an_unknown_class_trains(tier):
    class Output:
        def __init__(self, value):
            self.value = value

    class Wrapped(Layers):
        def forward(self, x):
            return Output(super().forward(x))

    model = Wrapped()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine = lay_out(model, tier)

    def loss(model, x):
        return model(x).value.float().square().mean()

    output = engine.run_step(model, model, inputs(0))
    output.value.float().square().mean().backward()
    by_hand.backward(lambda copied: loss(copied, inputs(0)))
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


@pytest.mark.quick(every=4, first=1)
@pytest.mark.parametrize("tier", HOSTED, ids=lambda one: one.value)
def test_a_layer_that_is_called_twice_gets_one_gradient_and_one_hook(tier):
    torch.manual_seed(1)
    model = nn.ModuleDict({"layer": Layer(), "head": nn.Linear(WIDTH, 2)})

    def loss(model, x):
        return model["head"](model["layer"](model["layer"](x.bfloat16()))).float().square().mean()

    by_hand = ByHand(model, torch.bfloat16, ["layer"])
    engine = lay_out(model, {"layer": tier, "": tier})
    calls = []
    model["layer"].up.weight.register_hook(lambda gradient: calls.append(gradient.dtype))
    engine.run_step(model, loss, model, inputs(0)).backward()
    by_hand.backward(lambda copied: loss(copied, inputs(0)))
    assert calls == [torch.bfloat16]
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("kept_by", ["module", "hook"])
@each_tier
def test_a_loss_over_what_a_layer_keeps_beside_its_output_is_right(tier, kept_by):
    class Keeping(Layer):
        def forward(self, x):
            result = super().forward(x)
            late = self.down(self.up(x))
            if kept_by == "module":
                self.kept = late
            return result

    class Net(Layers):
        def __init__(self):
            super().__init__()
            self.layers[0] = Keeping()
            self.outputs = []

        def forward(self, x):
            self.outputs.clear()
            result = super().forward(x)
            kept = self.layers[0].kept if kept_by == "module" else self.outputs[-1]
            return result.float().square().mean() + kept.float().square().mean() * 3

    model = Net()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    if kept_by == "hook":
        for of in (model, by_hand.model):
            keep = of.outputs.append
            of.layers[0].down.register_forward_hook(lambda _, __, output, keep=keep: keep(output))
    engine = lay_out(model, tier)
    for seed in range(2):
        engine.run_step(model, model, inputs(seed)).backward()
        by_hand.backward(lambda copied, seed=seed: copied(inputs(seed)))
        assert same_bits(model, by_hand.masters) == []
    engine.device.close()


@pytest.mark.quick(every=4, first=1)
@pytest.mark.parametrize("again", ["take", "put_aside"])
def test_a_gradient_that_comes_while_another_waits_to_be_converted_is_added(again):
    """In float32: 256 and 1 have no sum in bfloat16."""
    parameter = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    slot = Slot(parameter, torch.empty(3, 2, device="meta"), torch.zeros(3, 2), parameter.data, on_host=False)
    gradients = Gradients(HostDevice())
    parameter.grad = torch.full_like(parameter, 256)
    gradients.take(slot)
    parameter.grad = torch.ones_like(parameter)
    getattr(gradients, again)(slot)
    gradients.finish()
    assert torch.equal(slot.total, torch.full((3, 2), 257.0))


@pytest.mark.quick(every=4, first=2)
def test_a_parameter_that_is_frozen_keeps_the_gradient_it_has(laid_out):
    model, _, _ = laid_out
    both(laid_out, 0)
    frozen = model.layers[0].up.weight.requires_grad_(False)
    before = frozen.grad.clone()
    engine = laid_out[1]
    engine.run_step(model, mean_square, model, inputs(1)).backward()
    assert torch.equal(frozen.grad, before)

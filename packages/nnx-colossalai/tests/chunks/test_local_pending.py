"""Chunks that an optimizer steps in the background: a use of a chunk waits for that chunk only."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from jobs.colossalai_local import TIERS, UNITS, ByHand, Layers, inputs, lay_out, mean_square, same_bits
from nnx_colossalai.plan.spec import Tier
from nnx_core.view.guard import part_of
from nnx_core.view.pending import Pending, guard_pending, unguard_pending

each_tier = pytest.mark.parametrize("tier", TIERS, ids=lambda one: one.value)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)


class Background:
    """Steps chunks in a thread, one at a time when told to."""

    def __init__(self, engine):
        self.waited, self._gates, self._done, self._thread = [], {}, {}, None
        self._work = []
        for chunk in sorted(engine.chunks, key=lambda chunk: chunk.index):
            aliases = []
            for master in chunk.masters.values():
                if master.grad is not None:
                    alias = master.detach()
                    alias.grad = master.grad
                    aliases.append(alias)
            self._gates[chunk.name], self._done[chunk.name] = threading.Event(), threading.Event()
            self._work.append((chunk, aliases))
            chunk.set_pending(lambda name=chunk.name: self._wait(name))

    def _wait(self, name):
        self.waited.append(name)
        for chunk, _ in self._work:  # those before it are stepped before it
            self._gates[chunk.name].set()
            if chunk.name == name:
                break
        assert self._done[name].wait(10)

    def start(self, *, at_once):
        def run():
            for chunk, aliases in self._work:
                if not at_once:
                    self._gates[chunk.name].wait(10)
                with torch.no_grad():
                    for alias in aliases:
                        alias.sub_(alias.grad, alpha=0.5)
                chunk.refresh()
                self._done[chunk.name].set()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self):
        for gate in self._gates.values():
            gate.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


def step_by_hand(by_hand):
    with torch.no_grad():
        for one in by_hand.masters.values():
            if one.grad is not None:
                one.sub_(one.grad, alpha=0.5)
                one.grad = None


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("at_once", [True, False])
@dtypes
@each_tier
def test_forwards_wait_for_their_own_chunk_only_and_numbers_are_those_by_hand(tier, dtype, at_once):
    model = Layers()
    by_hand = ByHand(model, dtype, UNITS)
    engine = lay_out(model, tier, dtype=dtype)
    background = None
    for seed in range(3):
        loss = engine.run_step(model, mean_square, model, inputs(seed))
        if background is not None:
            background.end()
            names = [name for name in background.waited if name]
            assert names == ["layers.0", "layers.1", "layers.2"]
        model.zero_grad()
        loss.backward()
        by_hand.backward(lambda copied, seed=seed: mean_square(copied, inputs(seed)))
        assert same_bits(model, by_hand.masters) == []
        background = Background(engine)
        model.zero_grad()
        background.start(at_once=at_once)
        step_by_hand(by_hand)
        assert not at_once or background.waited == []
    engine.finish()
    background.end()
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


@pytest.mark.quick(every=5, first=1)
@each_tier
def test_a_chunk_is_used_while_a_later_one_is_still_being_stepped(tier):
    model = Layers()
    engine = lay_out(model, tier)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    background = Background(engine)
    background.start(at_once=False)
    seen = []
    model.layers[0].register_forward_hook(lambda *_: seen.append(list(background.waited)))
    engine.run_step(model, mean_square, model, inputs(0))
    assert "layers.0" in seen[0] and "layers.1" not in seen[0] and "layers.2" not in seen[0]
    background.end()
    engine.device.close()


USES = {
    "sum": lambda one: one.sum(),
    "data": lambda one: one.data.sum(),
    "detach": lambda one: one.detach().sum(),
    "item": lambda one: one.flatten()[0].item(),
    "in a list": lambda one: torch.stack([one, one]).sum(),
    "deepcopy": lambda one: copy.deepcopy(one).sum(),
    "pickle": lambda one: pickle.loads(pickle.dumps(one)).sum(),
    "repr": repr,
    "numpy": lambda one: one.detach().numpy().sum(),
    "in place": lambda one: one.data.add_(1),
}


@pytest.mark.quick(every=5, first=2)
@pytest.mark.parametrize("use", USES)
@dtypes
def test_whoever_looks_at_a_master_that_is_being_stepped_waits_for_it(use, dtype):
    model = Layers()
    engine = lay_out(model, Tier.OFFLOADED, dtype=dtype)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    background = Background(engine)
    background.start(at_once=False)
    USES[use](model.layers[2].up.weight)
    assert background.waited == ["layers.2"]
    assert not isinstance(part_of(model.layers[2].down.bias), Pending)
    background.end()
    engine.device.close()


@pytest.mark.quick(every=5, first=1)
@dtypes
def test_what_is_written_to_a_master_after_waiting_for_it_counts(dtype):
    model = Layers()
    engine = lay_out(model, Tier.OFFLOADED, dtype=dtype)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    background = Background(engine)
    background.start(at_once=True)
    for one in model.parameters():
        one.data.clamp_(-0.05, 0.05)
    model.zero_grad()
    background.end()
    by_hand = ByHand(model, dtype, UNITS)
    engine.run_step(model, mean_square, model, inputs(1)).backward()
    by_hand.backward(lambda copied: mean_square(copied, inputs(1)))
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


def test_what_tells_nothing_of_the_values_does_not_wait():
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    guard_pending([weight], lambda: pytest.fail("waits"))
    assert (weight.shape, weight.dim(), weight.numel(), weight.requires_grad) == ((2, 3), 2, 6, True)
    assert weight.dtype == torch.float32 and weight.is_leaf and weight in {weight}
    weight.grad = None
    torch.optim.SGD([weight], lr=0.1).zero_grad()
    weight.register_hook(lambda gradient: gradient).remove()
    assert isinstance(weight, nn.Parameter) and weight.grad is None
    unguard_pending([weight])
    assert type(weight) is nn.Parameter and "_part" not in vars(weight)


def test_an_error_of_the_background_reaches_whoever_uses_the_chunk():
    model = Layers()
    engine = lay_out(model, Tier.OFFLOADED)

    def wait():
        raise RuntimeError("the step failed")

    engine.chunks[1].set_pending(wait)
    with pytest.raises(RuntimeError, match="the step failed"):
        engine.run_step(model, mean_square, model, inputs(0))
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    engine.device.close()


def test_an_evaluation_that_leaves_a_chunk_alone_does_not_wait_for_it():
    model = Layers()
    engine = lay_out(model, Tier.STREAMED)
    engine.chunks[2].set_pending(lambda: pytest.fail("waits"))
    with torch.no_grad():
        engine.run_step(model, lambda: model.layers[0](inputs(0)))
    engine.chunks[2].set_pending(None)
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    engine.device.close()


def test_a_later_guard_takes_the_place_of_an_earlier_one():
    seen = []
    weight = nn.Parameter(torch.ones(2))
    guard_pending([weight], lambda: (seen.append(1), unguard_pending([weight])))
    guard_pending([weight], lambda: (seen.append(2), unguard_pending([weight])))
    assert weight.sum() == 2 and seen == [2]


def wait_once(*weights):
    """The list that waiting is noted in."""
    seen = []
    guard_pending(weights, lambda: (seen.append("waits"), unguard_pending(weights)))
    return seen


def test_a_backward_that_names_a_pending_weight_waits_for_it():
    weight = nn.Parameter(torch.ones(2))
    loss = weight.square().sum()
    seen = wait_once(weight)
    loss.backward(inputs=[weight])
    assert weight.grad.tolist() == [2, 2] and seen == ["waits"]


def test_a_transform_of_a_pending_weight_waits_for_it():
    weight = nn.Parameter(torch.ones(2))
    seen = wait_once(weight)
    assert torch.func.grad(lambda one: one.square().sum())(weight).tolist() == [2, 2] and seen == ["waits"]


def test_a_list_of_pending_tensors_is_changed_after_waiting_for_all():
    first, second = torch.ones(2), torch.ones(2)
    seen = [wait_once(first), wait_once(second)]
    torch._foreach_mul_([first, second], 3.0)
    assert (first + second).tolist() == [6, 6] and seen == [["waits"], ["waits"]]


def test_the_memory_of_a_pending_tensor_is_its_own_after_waiting():
    weight = nn.Parameter(torch.ones(2))
    address, seen = weight.data_ptr(), wait_once(weight)
    assert weight.data_ptr() == address and seen == ["waits"]

"""The memory and the copies of chunks: prefetching, releasing, moving, running out of memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from jobs.colossalai_local import (
    TIERS,
    ByHand,
    Layers,
    inputs,
    lay_out,
    optimizer_of,
    refresh,
    same_bits,
)
from jobs.simulated_device import SimDevice
from nnx_colossalai.chunks.local_chunk import segments_of
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.plan.spec import Tier

UNITS = ("layers.0", "layers.1", "layers.2", "")
each_tier = pytest.mark.parametrize("tier", TIERS, ids=lambda one: one.value)


def mean_square(model, x):
    return model(x).float().square().mean()


class Watched(SimDevice):
    """Remembers the most that was in use, and which copies were asked for, beside the events of a test."""

    def __init__(self, capacity=None, **kwargs):
        super().__init__(capacity, **kwargs)
        self.most, self.log = 0, []

    def empty(self, numel, dtype):
        tensor = super().empty(numel, dtype)
        self.most = max(self.most, self.used)
        return tensor

    def restore(self, tensor):
        super().restore(tensor)
        self.log.append(("fetch", tensor.numel()))
        self.most = max(self.most, self.used)


def sizes(model):
    return {name: sum(one.numel() for one in model.get_submodule(name).parameters()) for name in UNITS[:3]}


@pytest.mark.quick(every=5)
@each_tier
def test_bytes_on_the_device_and_on_the_bus_are_those_of_the_tier(tier):
    model = Layers()
    numel = sum(one.numel() for one in model.parameters())
    engine = lay_out(model, tier, device=SimDevice())
    resident = {Tier.GATHERED: 6, Tier.SHARDED: 6, Tier.OFFLOADED: 2, Tier.STREAMED: 0}[tier]
    assert engine.device.used == resident * numel
    optimizer = optimizer_of(model.parameters())
    moved = []
    for seed in range(3):
        before = copy.copy(engine.device.traffic)
        optimizer.zero_grad()
        for micro in range(2):
            engine.run_step(model, mean_square, model, inputs(seed + micro)).backward()
        optimizer.step()
        refresh(engine)
        after = engine.device.traffic
        moved.append((after.to_device - before.to_device, after.to_host - before.to_host))
    gradients = 4 * numel if tier.steps_on_host else 0
    up = {Tier.OFFLOADED: 2, Tier.STREAMED: 2 * 2 * 2}.get(tier, 0) * numel
    assert moved == [(up, gradients)] * 3
    engine.device.close()


def test_streamed_weights_are_on_the_device_one_or_two_chunks_at_a_time():
    model = Layers()
    model.head = nn.Identity()
    device = Watched()
    engine = lay_out(model, dict.fromkeys(UNITS, Tier.STREAMED), device=device)
    largest = 2 * max(sizes(model).values())
    for seed in range(3):
        engine.run_step(model, mean_square, model, inputs(seed)).backward()
        assert device.used == 0
    assert device.most == 2 * largest
    engine.device.close()


def test_the_next_chunk_is_fetched_before_the_one_in_use_is_done_with():
    model = Layers()
    device = Watched()
    model.layers[0].up, model.layers[2].up = nn.Linear(8, 17), nn.Linear(8, 21)
    model.layers[0].down, model.layers[2].down = nn.Linear(17, 8), nn.Linear(21, 8)
    names = {count: name for name, count in sizes(model).items()}
    engine = lay_out(model, {**dict.fromkeys(UNITS[:3], Tier.STREAMED), "": Tier.GATHERED}, device=device)
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, number=number: device.log.append(("done", number)))
    for seed in range(2):
        device.log.clear()
        engine.run_step(model, mean_square, model, inputs(seed)).backward()
    log = [(what, names.get(which, which)) for what, which in device.log]
    assert log == [
        ("fetch", "layers.0"),
        ("fetch", "layers.1"),
        ("done", 0),
        ("fetch", "layers.2"),
        ("done", 1),
        ("done", 2),
        ("fetch", "layers.2"),
        ("fetch", "layers.1"),
        ("fetch", "layers.0"),
    ]
    assert [chunk.index for chunk in engine.chunks] == [1, 2, 3, 0]
    engine.device.close()


def test_where_there_is_no_room_to_fetch_ahead_the_step_goes_on_without():
    model = Layers()
    largest = 2 * max(sizes(model).values())
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    tiers = {**dict.fromkeys(UNITS[:3], Tier.STREAMED), "": Tier.OFFLOADED}
    head = 2 * sum(one.numel() for one in model.head.parameters())
    engine = lay_out(model, tiers, device=SimDevice(head + 2 * largest, delays=1, max_delay=0.0003))
    for seed in range(3):
        engine.run_step(model, mean_square, model, inputs(seed)).backward()
        by_hand.backward(lambda copied, seed=seed: mean_square(copied, inputs(seed)))
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


def test_without_room_for_a_chunk_the_step_says_so_and_masters_are_back():
    model = Layers()
    masters = copy.deepcopy(dict(model.named_parameters()))
    engine = lay_out(model, Tier.STREAMED, device=SimDevice())
    engine.device.capacity = 100
    with pytest.raises(DeviceMemoryError, match="100 bytes are allowed"):
        engine.run_step(model, mean_square, model, inputs(0))
    assert same_bits(model, masters) == []
    assert engine.device.used == 0
    engine.device.capacity = 2**20
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    assert model.head.weight.grad is not None
    engine.device.close()


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("to", TIERS, ids=lambda one: one.value)
@pytest.mark.parametrize("start", TIERS, ids=lambda one: one.value)
def test_chunks_move_between_steps_with_their_masters_and_gradients(start, to, dtype):
    model = Layers()
    by_hand = ByHand(model, dtype, UNITS)
    engine = lay_out(model, start, dtype=dtype)
    optimizer, reference = optimizer_of(model.parameters()), optimizer_of(by_hand.masters.values())

    def both(seed):
        engine.run_step(model, mean_square, model, inputs(seed)).backward()
        by_hand.backward(lambda copied: mean_square(copied, inputs(seed)))

    both(0)
    engine.move(model, {"layers.0": to, "": to})
    assert same_bits(model, by_hand.masters) == []
    assert [chunk.tier for chunk in engine.chunks] == [to, start, start, to]
    both(1)
    optimizer.step()
    reference.step()
    refresh(engine)
    engine.move(model, {"layers.1": to, "layers.2": to})
    both(2)
    assert same_bits(model, by_hand.masters) == []
    model.zero_grad()
    elsewhere = lay_out(Layers(), to, dtype=dtype)
    assert engine.device.used == elsewhere.device.used
    for one in (engine, elsewhere):
        one.device.close()


def test_a_chunk_that_finds_no_room_stays_where_it_was():
    model = Layers()
    by_hand = ByHand(model, torch.bfloat16, UNITS)
    engine = lay_out(model, Tier.STREAMED, device=SimDevice(1000))
    with pytest.raises(DeviceMemoryError):
        engine.move(model, {"layers.1": Tier.GATHERED})
    assert engine.chunks[1].tier is Tier.STREAMED and engine.device.used == 0
    engine.run_step(model, mean_square, model, inputs(0)).backward()
    by_hand.backward(lambda copied: mean_square(copied, inputs(0)))
    assert same_bits(model, by_hand.masters) == []
    engine.device.close()


@pytest.mark.quick(every=5, first=3)
@each_tier
def test_taken_down_a_model_has_memory_of_its_own_and_the_device_none_of_it(tier):
    model = Layers()
    engine = lay_out(model, tier)
    objects = list(model.parameters())
    engine.unparallelize(model)
    assert engine.device.used == 0
    assert all(one is before for one, before in zip(model.parameters(), objects, strict=True))
    assert len({one.untyped_storage().data_ptr() for one in objects}) == len(objects)
    assert engine.unparallelize(model) == {}
    engine.device.close()


def test_flat_buffers_are_exactly_full_and_parameters_aligned_as_their_sizes_allow():
    parameters = {
        "odd": nn.Parameter(torch.ones(7)),
        "even": nn.Parameter(torch.ones(64, 3)),
        "none": nn.Parameter(torch.ones(0)),
        "four": nn.Parameter(torch.ones(4)),
        "frozen": nn.Parameter(torch.ones(5), requires_grad=False),
        "wide": nn.Parameter(torch.ones(2, dtype=torch.float64)),
    }
    segments = segments_of(parameters, lambda one: one.dtype)
    assert [segment.numel for segment in segments] == [7 + 192 + 4, 5, 2]
    assert segments[0].names == ("even", "none", "four", "odd")
    assert segments[0].offsets == (0, 192, 192, 196)
    buffer = torch.arange(203.0)
    views = segments[0].views(buffer)
    assert torch.equal(torch.cat([view.flatten() for view in views]), buffer)

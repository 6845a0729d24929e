"""Every planted fault of a schedule gives wrong numbers on the simulated device."""

from __future__ import annotations

import doctest
import gc
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from jobs import simulated_device
from jobs.simulated_device import SimDevice
from nnx_colossalai.ledger import DeviceMemoryError


@pytest.fixture
def device() -> Iterator[SimDevice]:
    made = SimDevice(10_000, delays=0)
    yield made
    made.close()


def on_host(device: SimDevice, value: float, numel: int = 8) -> torch.Tensor:
    return device.host_empty(numel, torch.float32).fill_(value)


def test_a_missing_wait_before_computing_shows(device: SimDevice) -> None:
    weights = device.empty(8, torch.float32).fill_(5)
    with device.paused():
        event = device.copy(weights, on_host(device, 1))
        assert weights.isnan().all(), "not even the old values may be seen"
        assert not event.over
    device.compute_waits(event)
    assert event.over
    assert weights.eq(1).all()


def test_a_missing_wait_on_the_host_shows(device: SimDevice) -> None:
    host = on_host(device, 5)
    with device.paused():
        event = device.copy(host, device.empty(8, torch.float32).fill_(2))
        assert host.isnan().all()
    device.host_waits(event)
    assert host.eq(2).all()


def test_a_source_that_is_overwritten_too_early_shows(device: SimDevice) -> None:
    weights, host = device.empty(8, torch.float32), on_host(device, 1)
    with device.paused():
        event = device.copy(weights, host)
        host.fill_(9)
    device.compute_waits(event)
    assert weights.eq(9).all()


def test_a_staging_buffer_that_is_filled_again_too_early_shows(device: SimDevice) -> None:
    staging, weights = on_host(device, 1), device.empty(8, torch.float32)
    gradient = device.empty(8, torch.float32).fill_(3)
    with device.paused():
        up = device.copy(weights, staging)
        device.copy(staging, gradient)
    device.compute_waits(up)
    assert not weights.eq(1).any()


def test_use_after_release_shows(device: SimDevice) -> None:
    weights = device.empty(8, torch.float32).fill_(1)
    view = weights[2:]
    device.release(weights)
    assert view.isnan().all()


def test_a_gradient_of_released_weights_shows(device: SimDevice) -> None:
    weights = device.empty(8, torch.float32).fill_(1)
    x = torch.ones(8, requires_grad=True)
    loss = (x * weights).sum()
    device.release(weights)
    loss.backward()
    assert x.grad is not None
    assert x.grad.isnan().all()


def test_what_is_not_initialised_is_not_zero_by_chance(device: SimDevice) -> None:
    assert device.empty(8, torch.bfloat16).isnan().all()
    assert device.host_empty(8, torch.float64).isnan().all()
    assert device.empty(8, torch.int32).eq(2**31 - 1).all()
    assert device.empty(8, torch.bool).all()
    weights = device.empty(8, torch.float32).fill_(1)
    device.release(weights)
    device.restore(weights)
    assert weights.isnan().all()


def test_releasing_the_source_of_a_copy_under_way_does_not_harm_it(device: SimDevice) -> None:
    host, weights = on_host(device, 0), device.empty(8, torch.float32).fill_(4)
    with device.paused():
        event = device.copy(host, weights)
        device.release(weights)
        assert device.used == 0
        assert weights.isnan().all()
    device.host_waits(event)
    assert host.eq(4).all()


def test_a_copy_under_way_does_not_write_into_memory_that_is_released_and_restored(device: SimDevice) -> None:
    weights = device.empty(8, torch.float32)
    with device.paused():
        event = device.copy(weights, on_host(device, 1))
        device.release(weights)
        device.restore(weights)
        weights.fill_(2)
    device.compute_waits(event)
    assert weights.eq(2).all()


def test_memory_that_only_a_copy_refers_to_is_waited_for_when_there_is_no_room() -> None:
    device = SimDevice(1000, to_host=20_000.0)
    gradient = device.empty(1000, torch.uint8).fill_(3)
    host = device.host_empty(1000, torch.uint8)
    event = device.copy(host, gradient)
    del gradient
    assert device.used == 1000
    device.empty(1000, torch.uint8)
    assert event.over
    assert host.eq(3).all()
    device.close()


def test_restoring_waits_for_such_memory_too() -> None:
    device = SimDevice(1000, to_host=20_000.0)
    weights = device.empty(600, torch.uint8)
    device.release(weights)
    gradient = device.empty(800, torch.uint8)
    device.copy(device.host_empty(800, torch.uint8), gradient)
    del gradient
    device.restore(weights)
    assert device.used == 600
    device.close()


def test_the_budget_can_shrink_between_steps(device: SimDevice) -> None:
    held = device.empty(100, torch.float32)
    device.capacity = 500
    with pytest.raises(
        DeviceMemoryError, match="simulated device for 101 bytes: 400 bytes are in use, and 500 bytes"
    ):
        device.empty(101, torch.uint8)
    assert held.numel() == 100


def test_copies_of_one_lane_run_in_order_and_lanes_do_not_wait_for_each_other() -> None:
    device = SimDevice(to_device=1000.0)  # 100 ms for 100 bytes
    up = [device.copy(device.empty(100, torch.uint8), device.host_empty(100, torch.uint8)) for _ in range(3)]
    down = device.copy(device.host_empty(100, torch.uint8), device.empty(100, torch.uint8))
    device.host_waits(down)
    assert not up[0].over
    device.compute_waits(up[1])
    assert up[0].over
    device.close()
    assert up[2].over, "closing finishes what was begun"


def test_a_copy_takes_as_long_as_its_bytes_need() -> None:
    device = SimDevice(to_device=10_000.0, to_host=100_000.0)
    weights, host = device.empty(1000, torch.bfloat16), device.host_empty(1000, torch.float32).zero_()
    start = time.monotonic()
    device.compute_waits(device.copy(weights, host))
    between = time.monotonic()
    device.host_waits(device.copy(host, weights))
    assert between - start >= 0.2
    assert time.monotonic() - between >= 0.04
    device.close()


def test_delays_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(seed: int | None) -> list[float]:
        slept: list[float] = []
        monkeypatch.setattr(simulated_device.time, "sleep", slept.append)
        device = SimDevice(delays=seed, max_delay=0.5)
        weights, host = device.empty(1, torch.float32), device.host_empty(1, torch.float32)
        for _ in range(20):
            device.compute_waits(device.copy(weights, host))
        device.close()
        return slept

    random.seed(1)
    first = delays(7)
    random.seed(2)
    assert first == delays(7) != delays(8)
    assert 5 < len(first) < 20, "some copies are immediate"
    assert all(0 <= delay <= 0.5 for delay in first)
    assert delays(None) == []


def test_a_copy_that_fails_says_so_to_whoever_waits(device: SimDevice) -> None:
    event = device.copy(device.empty(4, torch.float32), torch.empty(4, device="meta"))
    with pytest.raises(RuntimeError, match="a simulated copy failed"):
        device.compute_waits(event)
    later = device.copy(device.empty(8, torch.float32), on_host(device, 1))
    device.compute_waits(later)


def test_a_wait_that_cannot_end_does_not_hang(device: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_device, "_WAIT_LIMIT", 0.05)
    with device.paused(), pytest.raises(TimeoutError, match="not over after"):
        device.compute_waits(device.copy(device.empty(8, torch.float32), on_host(device, 1)))


def test_threads_end_when_the_device_is_closed() -> None:
    before = set(threading.enumerate())
    device = SimDevice(delays=1)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    device.close()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(RuntimeError, match="is closed"):
        device.copy(device.empty(1, torch.float32), device.host_empty(1, torch.float32))
    device.close()  # again changes nothing


def test_threads_end_when_the_device_is_forgotten() -> None:
    before = set(threading.enumerate())
    device = SimDevice(delays=1)
    device.copy(device.empty(1, torch.float32), device.host_empty(1, torch.float32))
    mine = set(threading.enumerate()) - before
    del device
    gc.collect()
    for thread in mine:
        thread.join(5)
    assert len(mine) == 2
    assert not any(thread.is_alive() for thread in mine)


def test_several_threads_may_copy_at_once(device: SimDevice) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            weights, host = device.empty(8, torch.float32), on_host(device, number)
            device.compute_waits(device.copy(weights, host))
            if not weights.eq(number).all():
                wrong.append(number)
            device.release(weights)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert wrong == []
    assert device.traffic.to_device == 4 * 20 * 32


def streamed_sum(
    device: SimDevice, layers: list[torch.Tensor], *, wait: bool = True, reuse: bool = False
) -> float:
    """Add up layers that come through two device buffers, as a streamed forward does; faults on request."""
    buffers = [device.empty(8, torch.float32) for _ in range(2)]
    events = [device.copy(buffers[0], layers[0])]
    total = 0.0
    for number in range(len(layers)):
        if number + 1 < len(layers):
            # The fault: the buffer that is about to be read.
            slot = number % 2 if reuse else (number + 1) % 2
            events.append(device.copy(buffers[slot], layers[number + 1]))
        if wait:
            device.compute_waits(events[number])
        total += float(buffers[number % 2].sum())
    return total


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_that_waits_is_right_under_any_delays(seed: int) -> None:
    device = SimDevice(delays=seed)
    layers = [on_host(device, value) for value in range(6)]
    assert streamed_sum(device, layers) == 8 * 15
    device.close()


@pytest.mark.parametrize("fault", ["no wait", "buffer reused"])
def test_a_schedule_with_a_fault_is_wrong_under_some_delays(fault: str) -> None:
    sums = []
    for seed in range(20):
        device = SimDevice(delays=seed)
        layers = [on_host(device, value) for value in range(6)]
        sums.append(streamed_sum(device, layers, wait=fault != "no wait", reuse=fault == "buffer reused"))
        device.close()
    assert any(total != 8 * 15 for total in sums)


def test_the_example_in_its_docstring_is_true():
    assert doctest.testmod(simulated_device) == (0, 6)

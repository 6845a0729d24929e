"""The guarantees of every device to the engine."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jobs.simulated_device import SimDevice
from nnx_colossalai.backend import make_device
from nnx_colossalai.device import Device, HostDevice, host_memory
from nnx_colossalai.ledger import DeviceMemoryError, Ledger
from nnx_colossalai.plan.spec import format_bytes
from nnx_core.backend import ParallelContext
from nnx_core.errors import NnxError, UnsupportedError

CAPACITY = 64 * 2**20


@pytest.fixture(params=["host", "simulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Device[Any]]:
    if request.param == "host":
        made: Device[Any] = HostDevice(CAPACITY)
    elif request.param == "simulated":
        made = SimDevice(CAPACITY, delays=3)
    elif torch.cuda.is_available():
        from nnx_colossalai.cuda import CudaDevice

        made = CudaDevice(torch.device("cuda"), CAPACITY)
    else:
        pytest.skip("no CUDA device here")
    yield made
    made.close()


def there_and_back(device: Device[Any], values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the device in `dtype`, and back in the values' own."""
    out, back = (device.host_empty(values.numel(), values.dtype) for _ in range(2))
    weights = device.empty(values.numel(), dtype)
    out.copy_(values)
    device.compute_waits(device.copy(weights, out))
    device.host_waits(device.copy(back, weights))
    return back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_come_back_as_they_were_rounded(device: Device[Any], dtype: torch.dtype) -> None:
    values = torch.randn(1000)
    assert torch.equal(there_and_back(device, values, dtype), values.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_what_is_no_floating_point_is_copied_too(device: Device[Any], dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(there_and_back(device, values, dtype), values)


def test_the_bytes_of_the_target_are_counted_in_each_direction(device: Device[Any]) -> None:
    there_and_back(device, torch.zeros(1000), torch.bfloat16)
    assert (device.traffic.to_device, device.traffic.to_host) == (2000, 4000)


def test_parts_of_buffers_can_be_copied(device: Device[Any]) -> None:
    host, weights = device.host_empty(10, torch.float32), device.empty(10, torch.float32)
    host.copy_(torch.arange(10.0))
    device.host_waits(device.copy(weights, host))
    device.host_waits(device.copy(host[2:4], weights[6:8]))
    assert host[2:4].tolist() == [6.0, 7.0]


def test_no_elements_are_copied_like_many(device: Device[Any]) -> None:
    host, weights = device.host_empty(0, torch.float32), device.empty(0, torch.float32)
    device.host_waits(device.copy(weights, host))
    assert device.traffic.to_device == 0


def test_autograd_does_not_notice_a_copy(device: Device[Any]) -> None:
    weights = device.empty(3, torch.float32)
    host = device.host_empty(3, torch.float32)
    device.compute_waits(device.copy(weights, host.fill_(2)))
    parameter = torch.nn.Parameter(weights)
    loss = (parameter * parameter).sum()
    device.compute_waits(device.copy(parameter, host.fill_(3)))
    loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [6.0, 6.0, 6.0]


def test_memory_made_in_inference_mode_is_ordinary(device: Device[Any]) -> None:
    with torch.inference_mode():
        weights, host = device.empty(3, torch.float32), device.host_empty(3, torch.float32)
    device.compute_waits(device.copy(weights, host.fill_(2)))
    assert not weights.is_inference()
    weights.requires_grad_().sum().backward()


def test_released_memory_comes_back_under_the_same_tensor_and_its_views(device: Device[Any]) -> None:
    weights, host = device.empty(6, torch.float32), device.host_empty(6, torch.float32)
    view = weights[2:4].view(1, 2)
    device.release(weights)
    device.restore(weights)
    host.copy_(torch.arange(6.0))
    device.compute_waits(device.copy(weights, host))
    assert view.tolist() == [[2.0, 3.0]]


def test_a_copy_may_still_run_when_its_memory_is_released_and_reused(device: Device[Any]) -> None:
    numel = 2**20
    back, weights = device.host_empty(numel, torch.float32), device.empty(numel, torch.float32)
    weights.fill_(7)
    event = device.copy(back, weights)
    device.release(weights)
    others = [device.empty(numel, torch.float32).fill_(number) for number in range(4)]
    device.host_waits(event)
    assert back.eq(7).all()
    assert [int(other.sum() / numel) for other in others] == [0, 1, 2, 3]


def test_what_does_not_fit_is_refused_with_the_numbers(device: Device[Any]) -> None:
    asked = 2 * CAPACITY
    with pytest.raises(DeviceMemoryError, match=rf"No room on .* for .*\({asked} bytes\)") as caught:
        device.empty(asked, torch.uint8)
    assert (caught.value.asked, caught.value.allowed) == (asked, CAPACITY)
    assert caught.value.used <= CAPACITY
    assert "Raise device_memory" in caught.value.remedy
    device.empty(CAPACITY // 2, torch.uint8)  # the refused bytes are not counted


def test_several_have_memory_each_or_none_at_all(device: Device[Any]) -> None:
    ones = [tensor.fill_(1) for tensor in device.empty_each((3, 5), torch.float32)]
    assert [tensor.numel() for tensor in ones] == [3, 5]
    assert len({tensor.untyped_storage().data_ptr() for tensor in ones}) == 2
    with pytest.raises(DeviceMemoryError):
        device.empty_each((CAPACITY // 2, CAPACITY), torch.uint8)
    device.empty(CAPACITY // 2, torch.uint8)  # nothing is left of those that were refused


@pytest.mark.parametrize(
    ("kind", "names"), [("cpu", HostDevice), ("meta", None)], ids=["cpu", "neither cpu nor cuda"]
)
def test_a_rank_gets_the_device_of_its_context(kind: str, names: type[Device[Any]] | None) -> None:
    context = ParallelContext(device=torch.device(kind), world_size=4, local_world_size=2)
    if names is None:
        with pytest.raises(UnsupportedError, match=r"device 'meta'.*accelerator='cpu'"):
            make_device(context)
    else:
        assert isinstance(make_device(context, capacity=100), names)
        assert make_device(context, capacity=100).capacity == 100
        assert make_device(context).capacity == host_memory() // 2


class TestAccounts:
    """Devices in host memory, whose memory limit is exact."""

    @pytest.fixture(params=["host", "simulated"])
    def device(self, request: pytest.FixtureRequest) -> Iterator[HostDevice | SimDevice]:
        made = HostDevice(1000) if request.param == "host" else SimDevice(1000)
        yield made
        made.close()

    def test_memory_in_use_is_what_was_handed_out_and_lives(self, device: HostDevice | SimDevice) -> None:
        first, second = device.empty(100, torch.float32), device.empty(100, torch.bfloat16)
        assert device.used == 600
        device.release(first)
        assert device.used == 200
        device.restore(first)
        part = second[:10]
        del second
        assert device.used == 600
        del part
        gc.collect()
        assert device.used == 400

    def test_host_memory_is_not_the_devices(self, device: HostDevice | SimDevice) -> None:
        host = device.host_empty(10_000, torch.float32)
        assert (device.used, host.numel()) == (0, 10_000)

    def test_the_budget_can_be_used_to_the_last_byte_and_no_further(
        self, device: HostDevice | SimDevice
    ) -> None:
        held = device.empty(1000, torch.uint8)
        with pytest.raises(DeviceMemoryError, match="for 1 bytes: 1000 bytes are in use, and 1000 bytes are"):
            device.empty(1, torch.uint8)
        device.release(held)
        other = device.empty(1, torch.uint8)
        with pytest.raises(DeviceMemoryError, match="for 1000 bytes: 1 bytes are in use"):
            device.restore(held)
        del other
        device.restore(held)

    def test_forgotten_memory_makes_room(self, device: HostDevice | SimDevice) -> None:
        for _ in range(10):
            device.empty(900, torch.uint8)
        assert device.used == 0

    def test_mistakes_of_the_engine_are_named(self, device: HostDevice | SimDevice) -> None:
        weights, host = device.empty(4, torch.float32), device.host_empty(4, torch.float32)
        stranger = torch.zeros(4)
        with pytest.raises(ValueError, match="allocated neither tensor"):
            device.copy(stranger, stranger.clone())
        with pytest.raises(ValueError, match=r"both tensors are on (cpu|the simulated device)"):
            device.copy(weights, device.empty(4, torch.float32))
        with pytest.raises(ValueError, match="both tensors are on the host"):
            device.copy(host, device.host_empty(4, torch.float32))
        with pytest.raises(ValueError, match=r"cannot copy shape \(2,\) into shape \(4,\)"):
            device.copy(weights, host[:2])
        with pytest.raises(ValueError, match="did not allocate the tensor as device memory"):
            device.release(host)
        with pytest.raises(ValueError, match="was not released"):
            device.restore(weights)
        device.release(weights)
        with pytest.raises(ValueError, match="release memory twice"):
            device.release(weights)
        with pytest.raises(ValueError, match="from or to released memory"):
            device.copy(host, weights)

    def test_a_tensor_of_someone_else_lies_opposite_to_the_known_one(
        self, device: HostDevice | SimDevice
    ) -> None:
        device.host_waits(device.copy(device.host_empty(4, torch.float32), torch.zeros(4)))
        device.compute_waits(device.copy(device.empty(4, torch.float32), torch.zeros(4)))
        assert (device.traffic.to_device, device.traffic.to_host) == (16, 16)


def test_a_machine_without_memory_left_raises_the_same_error_and_counts_nothing() -> None:
    device = HostDevice(2**62)
    with pytest.raises(DeviceMemoryError, match=r"No room on cpu for 1048576\.00 TiB"):
        device.empty(2**60, torch.uint8)
    with pytest.raises(DeviceMemoryError):
        device.host_empty(2**60, torch.uint8)
    assert device.used == 0


def test_the_hosts_memory_is_really_given_back() -> None:
    device = HostDevice(1000)
    weights = device.empty(100, torch.float32)
    device.release(weights)
    assert weights.untyped_storage().nbytes() == 0
    assert weights.shape == (100,)
    device.restore(weights)
    assert weights.untyped_storage().nbytes() == 400


# --- the accounts of a device do not grow with the number of steps -----------------------------------------


def test_what_every_step_drops_is_forgotten_without_anyone_asking() -> None:
    ledger = Ledger("cpu", capacity=2**40)
    kept = [torch.empty(1) for _ in range(10)]
    for tensor in kept:
        ledger.reserve(4)
        ledger.add_device(tensor)
    for _ in range(20_000):
        ledger.reserve(4)
        ledger.add_device(torch.empty(1))
        ledger.add_host(torch.empty(1))
    assert len(ledger._entries) < 2_000
    assert ledger.used == 4 * len(kept)


def test_many_that_are_alive_are_not_asked_again_for_each_new_one() -> None:
    ledger = Ledger("cpu", capacity=2**40)
    looks = 0

    def counted() -> None:
        nonlocal looks
        looks += 1

    ledger._forget_expired = counted  # type: ignore[method-assign]
    kept = [torch.empty(1) for _ in range(5_000)]
    for tensor in kept:
        ledger.reserve(4)
        ledger.add_device(tensor)
    assert 1 <= looks <= 4


# --- what an error about memory says, and that it survives the way to another rank -------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (24 * 2**30, "24.00 GiB (25769803776 bytes)"),
        (2**60, "1048576.00 TiB (1152921504606846976 bytes)"),
    ],
)
def test_bytes_are_readable_and_exact(number: int, text: str) -> None:
    assert format_bytes(number) == text


def test_the_error_names_bytes_and_knobs() -> None:
    error = DeviceMemoryError.no_room("cuda:1", asked=3 * 2**30, used=2**30, allowed=3 * 2**30)
    assert str(error) == (
        "No room on cuda:1 for 3.00 GiB (3221225472 bytes): 1.00 GiB (1073741824 bytes) are in use, "
        "and 3.00 GiB (3221225472 bytes) are allowed. Raise device_memory, offload more of the model to host "
        "memory (a higher offload_fraction or stream_fraction), or lower the batch size."
    )
    assert isinstance(error, NnxError)
    assert isinstance(error, MemoryError)


def test_the_error_keeps_its_numbers_on_the_way_to_another_rank() -> None:
    error = DeviceMemoryError("no room.", remedy="Buy more.", asked=1, used=2, allowed=3)
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.asked, other.used, other.allowed) == ("no room. Buy more.", 1, 2, 3)

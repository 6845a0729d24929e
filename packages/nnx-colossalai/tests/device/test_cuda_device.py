"""The CUDA device without a card: its memory accounts, its lock, and its state after a refusal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nnx_colossalai import cuda
from nnx_colossalai.backend import make_device
from nnx_colossalai.cuda import CudaDevice
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_core.backend import ParallelContext


class WithoutCard(CudaDevice):
    """Keeps accounts as on a card, of tensors in host memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.is_full = False
        self._running: deque[Any] = deque()
        self._sizes = {}
        self._lock = RLock()

    def _with_room(self, nbytes: int, allocate: Callable[[], Any]) -> Any:
        if self.is_full:
            raise DeviceMemoryError.no_room("cpu", asked=nbytes, used=0, allowed=0)
        return allocate()


class Card:
    """A stand-in for torch.cuda: a card with 10 GiB, of which 8 are free, and the limits that were set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits = [0.75]
        lane = SimpleNamespace(synchronize=lambda: None)
        answers: dict[str, Any] = {
            "mem_get_info": lambda _: (8 * 2**30, 10 * 2**30),
            "memory_reserved": lambda _: 0,
            "get_per_process_memory_fraction": lambda _: self.limits[-1],
            "set_per_process_memory_fraction": lambda share, _: self.limits.append(share),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(cuda, "_new_stream", lambda _: lane)


def test_the_users_own_limit_is_put_back_when_the_device_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    device = CudaDevice(torch.device("cuda", 0), 2**30)
    assert (device.capacity, card.limits) == (2**30, [0.75, 0.1])
    device.close()
    assert card.limits == [0.75, 0.1, 0.75]


@pytest.mark.parametrize(("world_size", "reserved"), [(1, 0), (2, 2**30)])
def test_without_a_budget_a_card_is_not_planned_to_the_last_byte(
    world_size: int, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch)
    device = make_device(ParallelContext(device=torch.device("cuda", 0), world_size=world_size))
    assert device.capacity == int(0.9 * 8 * 2**30) - reserved
    device.close()
    assert card.limits == [0.75], "what is not planned may be used"


def test_what_was_refused_can_be_asked_for_again() -> None:
    device, tensor = WithoutCard(), torch.ones(8)
    device.release(tensor)
    device.is_full = True
    for _ in range(2):
        with pytest.raises(DeviceMemoryError):
            device.restore(tensor)
    device.is_full = False
    device.restore(tensor)
    assert tensor.untyped_storage().nbytes() == 32


def test_others_are_not_kept_waiting_while_the_host_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    device, other = WithoutCard(), torch.ones(8)

    class ConvertedError(Exception):
        """The end of the test: a copy needs a card."""

    def convert(source: Tensor, dtype: torch.dtype) -> Tensor:
        thread = Thread(target=device.release, args=(other,), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "a release waits for the conversion"
        raise ConvertedError

    monkeypatch.setattr(device, "_converted_on_host", convert)
    with pytest.raises(ConvertedError):
        device.copy(torch.empty(8, dtype=torch.bfloat16), torch.ones(8))
    assert other.untyped_storage().nbytes() == 0

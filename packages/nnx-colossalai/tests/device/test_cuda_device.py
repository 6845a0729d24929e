"""What of the CUDA device can be tried without a card: its accounts, its lock, and what a refusal leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nnx_colossalai.device import cuda
from nnx_colossalai.device.cuda import CudaDevice
from nnx_colossalai.errors import DeviceMemoryError


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


@pytest.mark.parametrize("answer", [0, 1])
def test_a_refused_registration_leaves_no_error_for_the_next_kernel(
    answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = False

    def register(*_: int) -> int:
        nonlocal pending
        pending = bool(answer)
        return answer

    def launch(*_: Any, **__: Any) -> None:
        nonlocal pending
        was_pending, pending = pending, False
        if was_pending:
            raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", launch)
    assert cuda._register(4096, 4096) is not bool(answer)
    assert not pending

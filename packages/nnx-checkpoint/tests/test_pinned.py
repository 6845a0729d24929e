"""Memory that is registered with a driver is unregistered when its last user is gone, and not before."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnx_checkpoint.writing import copy, pinned
from nnx_checkpoint.writing.pinned import registered_empty


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_driver_knows_exactly_the_bytes_asked_for(dtype: torch.dtype) -> None:
    known: dict[int, int] = {}
    tensor = registered_empty(
        1001, dtype, register=lambda at, nbytes: not known.update({at: nbytes}), unregister=known.pop
    )
    assert tensor is not None
    assert (tensor.shape, tensor.dtype) == ((1001,), dtype)
    assert known == {tensor.data_ptr(): 1001 * dtype.itemsize}
    tensor.zero_()
    view = tensor[1000:]
    del tensor
    gc.collect()
    assert len(known) == 1, "a view still reads it"
    assert view.item() == 0
    del view
    gc.collect()
    assert known == {}


def test_the_memory_is_still_there_when_it_is_made_unknown() -> None:
    seen: list[float] = []

    def look(address: int) -> None:
        import ctypes

        seen.append(ctypes.c_float.from_address(address).value)

    tensor = registered_empty(4, torch.float32, register=lambda at, nbytes: True, unregister=look)
    assert tensor is not None
    tensor.fill_(3.5)
    del tensor
    gc.collect()
    assert seen == [3.5]


def test_a_driver_that_refuses_gives_nothing() -> None:
    refused = registered_empty(4, torch.float32, register=lambda at, nbytes: False, unregister=print)
    assert refused is None


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
    assert pinned._register(4096, 4096) is not bool(answer)
    assert not pending


def test_the_copies_of_a_background_save_are_pinned_in_exactly_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def make(numel: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(numel)
        return torch.empty(numel, dtype=dtype)

    monkeypatch.setattr(copy, "pinned_empty", make)
    arena = copy.Arena()
    for size, is_pinned in ((100, False), (100, True), (90, True), (100, False), (130, True)):
        assert arena._large_enough(size, is_pinned).nbytes >= size
    assert made == [100, 130]

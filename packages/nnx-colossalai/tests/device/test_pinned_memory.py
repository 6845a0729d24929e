"""Memory that is made known to a driver is made unknown when its last user is gone, and not before."""

from __future__ import annotations

import gc

import pytest
import torch

from nnx_colossalai.device.device import registered_empty


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

"""Broadcasts of tensors with dtypes that process groups do not support."""

import pytest
import torch
import torch.distributed as dist

from nnx_base.ranks import broadcast_tensor


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_integers_that_backends_lack_are_broadcast(dtype, shape):
    tensor = torch.full(shape, 7, dtype=dtype)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        broadcast_tensor(tensor)
    finally:
        dist.destroy_process_group()
    assert tensor.tolist() == torch.full(shape, 7).tolist()

"""The host as the device: training on CPU.

Copies are real and happen at once, in the thread that asks for them, so there is nothing to wait for. It owns
no thread, and never keeps memory alive.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from nnx_colossalai.device.device import Device, Traffic
from nnx_colossalai.device.ledger import Direction, Ledger, check_shapes
from nnx_colossalai.errors import DeviceMemoryError

__all__ = ["HostDevice", "host_memory"]


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class HostDevice(Device[None]):
    """Host memory, of which one part is called the device's.

    Args:
        capacity: Bytes of the device's part; None: the machine's memory, shared among its ranks.
        local_world_size: Ranks of this machine.

    Example:
        >>> device = HostDevice(capacity=1024)
        >>> weights, staging = device.empty(4, torch.float32), device.host_empty(4, torch.float32)
        >>> device.compute_waits(device.copy(weights, staging.fill_(1)))
        >>> weights.sum().item(), device.used, device.traffic.to_device
        (4.0, 16, 16)
    """

    torch_device = torch.device("cpu")

    def __init__(self, capacity: int | None = None, *, local_world_size: int = 1) -> None:
        self._ledger = Ledger("cpu", host_memory() // local_world_size if capacity is None else capacity)
        self.traffic = Traffic()

    @property
    @override
    def capacity(self) -> int:
        return self._ledger.capacity

    @property
    @override
    def used(self) -> int:
        return self._ledger.used

    @override
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.empty_each((numel,), dtype)[0]

    @override
    def empty_each(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        nbytes = sum(numels) * dtype.itemsize
        self._ledger.reserve(nbytes)
        try:
            tensors = self._allocate(numels, dtype)
        except DeviceMemoryError:
            self._ledger.cancel(nbytes)
            raise
        self._ledger.add_device(*tensors)
        return tensors

    @override
    def release(self, tensor: Tensor) -> None:
        self._ledger.release(tensor)
        tensor.untyped_storage().resize_(0)

    @override
    def restore(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(self._ledger.restore(tensor))

    @override
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = self._allocate((numel,), dtype)[0]
        self._ledger.add_host(tensor)
        return tensor

    @override
    def copy(self, target: Tensor, source: Tensor) -> None:
        check_shapes(target, source)
        self._ledger.check_resident(target, source)
        nbytes = target.numel() * target.element_size()
        if self._ledger.direction(target, source) is Direction.TO_DEVICE:
            self.traffic.to_device += nbytes
        else:
            self.traffic.to_host += nbytes
        with torch.no_grad():
            # ``data`` has a version counter of its own.
            target.data.copy_(source)

    @override
    def compute_waits(self, event: None) -> None:
        """Nothing: copies are over when `copy` returns."""

    @override
    def host_waits(self, event: None) -> None:
        """Nothing: copies are over when `copy` returns."""

    def _allocate(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        try:
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                return [torch.empty(numel, dtype=dtype, device="cpu") for numel in numels]
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            raise DeviceMemoryError.no_room(
                "cpu", asked=sum(numels) * dtype.itemsize, used=self.used, allowed=self.capacity
            ) from error

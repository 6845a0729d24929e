"""The device as the engine uses it: memory with a budget, a copy lane beside the computing one, events.

Two implement it: `HostDevice` (the host is the device: CPU training) and
`nnx_colossalai.cuda.CudaDevice`. The tests have a third, a host with a byte budget, a bandwidth and random
delays, on which a wait that is missing shows as wrong numbers. The engine never calls ``torch.cuda`` itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nnx_colossalai.ledger import DeviceMemoryError, Direction, Ledger, check_shapes

EventT = TypeVar("EventT")


@dataclass(slots=True)
class Traffic:
    """Bytes that were copied since the counters were last set to zero.

    Attributes:
        to_device: The bytes from host to device.
        to_host: The bytes from device to host.
    """

    to_device: int = 0
    to_host: int = 0


class Device(ABC, Generic[EventT]):
    """Where a rank computes.

    Attributes:
        torch_device: The device of the tensors that computing needs.
        traffic: The bytes that were copied between host and device.
    """

    torch_device: torch.device
    traffic: Traffic

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that this rank may use on the device."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes of device memory that are in use now."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-d tensor in device memory, not initialised.

        Raises:
            DeviceMemoryError: It does not fit; the error names the bytes asked for, in use and allowed.
        """

    def empty_each(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Several of `empty`, each with memory of its own: all of them, or none.

        Raises:
            DeviceMemoryError: Raised as by `empty`.
        """
        return [self.empty(numel, dtype) for numel in numels]

    @abstractmethod
    def release(self, tensor: Tensor) -> None:
        """Free the storage of a tensor of `empty`: its memory may be reused at once, by computing as well.

        Copies that still read or write it are waited for on the lane that reuses it, not by the caller. The
        tensor object and views of it keep their shapes and may be held on to, for `restore`; nobody may read
        or write them meanwhile. A tensor of `empty` that is merely forgotten is freed too.
        """

    @abstractmethod
    def restore(self, tensor: Tensor) -> None:
        """Give a released tensor, and all views of it, memory again, not initialised.

        Raises:
            DeviceMemoryError: It does not fit.
        """

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-d tensor in host memory, pinned where that makes copies faster.

        It must live until the copies of it are over; those of `copy` see to that themselves.
        """

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> EventT:
        """Copy between host and device on the copy lane, after what computing has been given so far.

        There is a lane in each direction, and copies of one lane happen in the order of the calls. At least
        one of the two is memory of `empty` or `host_empty` (or lies on an accelerator), which tells the
        direction. Autograd does not see the write: version counters stay. Any thread may call.

        Dtypes may differ: the conversion happens on the side of the source's memory, so that the bytes on
        the bus are those of `target`.

        Args:
            target: Written; nobody may read it before the event.
            source: Read; nobody may write it before the event.

        Returns:
            An event that is over when `target` is complete.
        """

    @abstractmethod
    def compute_waits(self, event: EventT) -> None:
        """What computing is given from now on starts after the event; the caller does not wait."""

    @abstractmethod
    def host_waits(self, event: EventT) -> None:
        """Wait until the event is over, and what it wrote can be read by this thread."""

    def close(self) -> None:
        """Finish the copies under way and end threads, if any; the device is not used afterwards."""


# The host as the device: training on CPU.
#
# Copies are real and happen at once, in the thread that asks for them, so there is nothing to wait for. It
# owns no thread, and never keeps memory alive.


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

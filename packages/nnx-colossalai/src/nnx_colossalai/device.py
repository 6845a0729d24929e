"""Define the device interface of the engine: memory with a budget, copy lanes that overlap compute, events.

`HostDevice` implements it for CPU training, where the host is the device. `nnx_colossalai.cuda.CudaDevice`
implements it for CUDA. The tests have a third: a host with a byte budget, a bandwidth and random delays, on
which a missing wait shows as wrong numbers. The engine never calls ``torch.cuda`` itself.
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
    """Bytes copied since the counters were last set to zero.

    Attributes:
        to_device: The bytes from host to device.
        to_host: The bytes from device to host.
    """

    to_device: int = 0
    to_host: int = 0


class Device(ABC, Generic[EventT]):
    """The device of one rank.

    Attributes:
        torch_device: The torch device of the tensors in its memory.
        traffic: The bytes copied between host and device.
    """

    torch_device: torch.device
    traffic: Traffic

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The bytes that this rank may use on the device."""

    @property
    @abstractmethod
    def used(self) -> int:
        """The bytes of device memory that are in use now."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised 1-d tensor in device memory.

        Raises:
            DeviceMemoryError: There is no room; the error names the bytes requested, in use and allowed.
        """

    def empty_each(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Allocate several tensors as `empty` does, each with memory of its own; all of them, or none.

        Raises:
            DeviceMemoryError: There is no room for all of them.
        """
        return [self.empty(numel, dtype) for numel in numels]

    @abstractmethod
    def release(self, tensor: Tensor) -> None:
        """Free the storage of a tensor of `empty`; compute and copies may reuse the memory at once.

        The lane that reuses the memory waits for copies that still use it; the caller does not wait. The
        tensor and its views keep their shapes for `restore`, and must not be read or written until then.
        Deleting a tensor of `empty` frees its memory too.
        """

    @abstractmethod
    def restore(self, tensor: Tensor) -> None:
        """Allocate memory again for a released tensor and its views; the values are uninitialised.

        Raises:
            DeviceMemoryError: There is no room.
        """

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised 1-d tensor in host memory, pinned if that makes copies faster.

        It must live until its copies are complete; `copy` keeps a reference until then.
        """

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> EventT:
        """Copy between host and device on a copy lane, after the kernels launched so far.

        Each direction has one lane, which copies in the order of the calls. At least one tensor is memory of
        `empty` or `host_empty`, or is on an accelerator; this tells the direction. Autograd does not see the
        write: version counters stay. Any thread may call.

        Dtypes may differ: the source's side converts, so that `target` sets the number of bytes on the bus.

        Args:
            target: The tensor to write; it must not be read before the event.
            source: The tensor to read; it must not be written before the event.

        Returns:
            An event that is complete when `target` is.
        """

    @abstractmethod
    def compute_waits(self, event: EventT) -> None:
        """Make kernels launched from now on wait for the event; the caller does not wait."""

    @abstractmethod
    def host_waits(self, event: EventT) -> None:
        """Wait until the event is complete and this thread can read the tensor that it wrote."""

    def close(self) -> None:
        """Wait for all copies and end all threads; the device must not be used afterwards."""


def host_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class HostDevice(Device[None]):
    """A device in host memory with a budget, for training on CPU.

    Copies are real, and complete when `copy` returns, so no event is necessary. The device has no thread, and
    its ledger keeps no memory alive.

    Args:
        capacity: The budget in bytes; None divides the machine's memory among its ranks.
        local_world_size: The number of ranks on this machine.

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
            # Through ``data``, which has its own version counter: autograd must not see the write.
            target.data.copy_(source)

    @override
    def compute_waits(self, event: None) -> None:
        """Do nothing: copies are complete when `copy` returns."""

    @override
    def host_waits(self, event: None) -> None:
        """Do nothing: copies are complete when `copy` returns."""

    def _allocate(self, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        try:
            # An inference tensor could not be used in training later.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                return [torch.empty(numel, dtype=dtype, device="cpu") for numel in numels]
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            raise DeviceMemoryError.no_room(
                "cpu", asked=sum(numels) * dtype.itemsize, used=self.used, allowed=self.capacity
            ) from error

"""The device as the engine uses it: memory with a budget, a copy lane beside the computing one, events.

Three implement it: `HostDevice` (the host is the device: CPU training),
`nnx_colossalai.device.cuda.CudaDevice` and `nnx_colossalai.device.simulated.SimDevice`, a host with a byte
budget, a bandwidth and random delays, on which a wait that is missing shows as wrong numbers. The engine
never calls ``torch.cuda`` itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Device", "Traffic"]

EventT = TypeVar("EventT")


@dataclass(slots=True)
class Traffic:
    """Bytes that were copied since the counters were last set to zero.

    Attributes:
        to_device: From host to device.
        to_host: From device to host.
    """

    to_device: int = 0
    to_host: int = 0


class Device(ABC, Generic[EventT]):
    """Where a rank computes.

    Attributes:
        torch_device: Of the tensors that computing needs.
        traffic: What was copied between host and device.
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
            DeviceMemoryError: As `empty`.
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
        """A new 1-d tensor in host memory, pinned where that makes copies faster."""

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

"""The device as the engine uses it: memory with a budget, a copy lane beside the computing one, events.

Two implement it: `HostDevice` (the host is the device: CPU training) and
`nnx_colossalai.cuda.CudaDevice`. The tests have a third, a host with a byte budget, a bandwidth and random
delays, on which a wait that is missing shows as wrong numbers. The engine never calls ``torch.cuda`` itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from nnx_checkpoint.collective import all_gather_object, control_group
from nnx_colossalai.plan.spec import RankResources, Rates, format_bytes
from nnx_core.calibration import calibrated
from nnx_core.communicator import GroupCommunicator
from nnx_core.errors import NnxError
from nnx_core.hardware import Hardware, sent_share

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


# --- host ------------------------------------------------------------------------------------------------
#
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


# --- ledger ----------------------------------------------------------------------------------------------
#
# Which memory belongs to the device and which to the host, and how much of the device's is in use.
#
# On a host that stands for a device no tensor tells where it lies, so what was handed out is remembered by
# its storage, weakly: memory that is forgotten without being released is noticed. It never holds a tensor
# alive.


_FEW = 1024

StorageKey = StorageWeakRef
"""Names a storage without keeping it; the name is not given to another while anyone has it."""


class Direction(str, Enum):
    """Which way a copy goes."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


@dataclass(slots=True)
class _Entry:
    nbytes: int
    on_device: bool
    resident: bool = True


class Ledger:
    """Accounts of one device that lies in host memory.

    Args:
        name: The name of the device in errors.
        capacity: Bytes that may be in use at a time.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self._entries: dict[StorageWeakRef, _Entry] = {}
        self._used = 0
        self._most_entries = (
            _FEW  # before those that expired are looked for: training drops some in every step
        )
        self._lock = RLock()

    @property
    def used(self) -> int:
        """Bytes of device memory in use."""
        with self._lock:
            self._forget_expired()
            return self._used

    def reserve(self, nbytes: int) -> None:
        """Count bytes as in use, which are about to be handed out.

        Raises:
            DeviceMemoryError: They do not fit.
        """
        with self._lock:
            if self._used + nbytes > self.capacity:
                # Asking all storages takes time, so only when it matters.
                self._forget_expired()
            if self._used + nbytes > self.capacity:
                raise DeviceMemoryError.no_room(
                    self.name, asked=nbytes, used=self._used, allowed=self.capacity
                )
            self._used += nbytes

    def add_device(self, *tensors: Tensor) -> None:
        """Remember device memory whose bytes were reserved."""
        self._add(tensors, on_device=True)

    def add_host(self, tensor: Tensor) -> None:
        """Remember host memory."""
        self._add((tensor,), on_device=False)

    def release(self, tensor: Tensor) -> None:
        """Count a tensor's memory as free."""
        with self._lock:
            entry = self._own(tensor)
            if not entry.resident:
                raise ValueError("memory is released twice")
            entry.resident = False
            self._used -= entry.nbytes

    def restore(self, tensor: Tensor) -> int:
        """Reserve a released tensor's bytes again, and return their number.

        Raises:
            DeviceMemoryError: They do not fit.
        """
        with self._lock:
            entry = self._own(tensor)
            if entry.resident:
                raise ValueError("memory is restored that was not released")
            self.reserve(entry.nbytes)
            entry.resident = True
            return entry.nbytes

    def cancel(self, nbytes: int) -> None:
        """Take back a reservation that came to nothing."""
        with self._lock:
            self._used -= nbytes

    def direction(self, target: Tensor, source: Tensor) -> Direction:
        """Which way a copy goes: what is not remembered lies opposite to what is."""
        with self._lock:
            sides = [self._side(target), self._side(source)]
        if sides[0] == sides[1]:
            wrong = {None: "neither was made by it", True: "both lie on it", False: "both lie on the host"}
            raise ValueError(f"copies go between host and {self.name}, but of these two {wrong[sides[0]]}")
        to_device = sides[0] is True or sides[1] is False
        return Direction.TO_DEVICE if to_device else Direction.TO_HOST

    def check_resident(self, *tensors: Tensor) -> None:
        """Refuse tensors whose memory is released."""
        with self._lock:
            for tensor in tensors:
                entry = self._entries.get(storage_key(tensor))
                if entry is not None and not entry.resident:
                    raise ValueError("a copy reads or writes memory that is released")

    def _own(self, tensor: Tensor) -> _Entry:
        entry = self._entries.get(storage_key(tensor))
        if entry is None or not entry.on_device:
            raise ValueError("the tensor is no device memory of this device")
        return entry

    def _side(self, tensor: Tensor) -> bool | None:
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry.on_device

    def _add(self, tensors: Iterable[Tensor], *, on_device: bool) -> None:
        with self._lock:
            if len(self._entries) >= self._most_entries:
                self._forget_expired()
                self._most_entries = max(_FEW, 2 * len(self._entries))
            for tensor in tensors:
                self._entries[storage_key(tensor)] = _Entry(tensor.nbytes, on_device)

    def _forget_expired(self) -> None:
        for key in [key for key in self._entries if is_gone(key)]:
            entry = self._entries.pop(key)
            if entry.on_device and entry.resident:
                self._used -= entry.nbytes


def check_shapes(target: Tensor, source: Tensor) -> None:
    """Refuse a copy that would broadcast."""
    if target.shape != source.shape:
        raise ValueError(f"cannot copy shape {tuple(source.shape)} into shape {tuple(target.shape)}")


def storage_key(tensor: Tensor) -> StorageKey:
    """The name of the memory that a tensor is a view of."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_gone(key: StorageKey) -> bool:
    """Whether nothing refers to the storage any more."""
    return bool(key.expired())  # type: ignore[no-untyped-call]


# --- no room -----------------------------------------------------------------------------------------------
#
# The error of a device that has no room: what was asked for, what is in use, and what is allowed.


_KNOB = (
    "Raise device_memory, let more of the model lie in host memory (a higher offload_fraction or "
    "stream_fraction), or lower the batch size."
)


class DeviceMemoryError(NnxError, MemoryError):
    """A device has no room for what was asked for.

    Args:
        message: A sentence that says what failed.
        remedy: A sentence that tells the user what to do about it.
        asked: Bytes that were asked for.
        used: Bytes in use at that moment.
        allowed: Bytes that this rank may use.
    """

    def __init__(
        self, message: str, *, remedy: str = _KNOB, asked: int = 0, used: int = 0, allowed: int = 0
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.asked, self.used, self.allowed = asked, used, allowed

    @classmethod
    def no_room(cls, device: str, *, asked: int, used: int, allowed: int) -> DeviceMemoryError:
        """The error for one allocation.

        Example:
            >>> print(DeviceMemoryError.no_room("cpu", asked=100, used=950, allowed=1000).message)
            No room on cpu for 100 bytes: 950 bytes are in use, and 1000 bytes are allowed.
        """
        message = (
            f"No room on {device} for {format_bytes(asked)}: {format_bytes(used)} are in use, "
            f"and {format_bytes(allowed)} are allowed."
        )
        return cls(message, asked=asked, used=used, allowed=allowed)

    def __reduce__(self) -> tuple[object, ...]:
        # An error that travels from one rank to the others keeps its numbers.
        return (_rebuild, (type(self), self.message, self.remedy, self.asked, self.used, self.allowed))


def _rebuild(
    cls: type[DeviceMemoryError], message: str, remedy: str, asked: int, used: int, allowed: int
) -> DeviceMemoryError:
    return cls(message, remedy=remedy, asked=asked, used=used, allowed=allowed)


# --- budgets and rates -------------------------------------------------------------------------------------
#
# What a rank may use and how fast it is: budgets from options or the machine, rates from its figures.
#
# The figures are measured once for the machine by `nnx_core.calibration`. All ranks of a world use rank 0's
# and the smallest of their budgets, so that they make the same plan.


_HOST_SHARE = 0.9
_CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resources(
    device: Device[Any],
    *,
    host_bytes: int | None = None,
    local_world_size: int = 1,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    rates: Rates | None = None,
) -> RankResources:
    """Budgets and rates of this world: those of `rates`, else measured once for the machine. Collective.

    A simulated device is not measured: its copies say nothing of a machine, and plans on it must repeat.

    Args:
        device: The device of this rank; its capacity is its budget.
        host_bytes: Budget of this rank in host memory; None: its share of what is free.
        local_world_size: Ranks that share the host.
        dtype: The dtype that forward and backward compute in.
        group: All ranks; None in a single process.
        rates: The rates to use instead of measuring.
    """
    control = control_group() if group is not None else None
    if rates is None:
        real = isinstance(device, HostDevice) or device.torch_device.type != "cpu"
        rates = _measured(device, dtype, group, control) if real else Rates()
    host = available_host_bytes(local_world_size) if host_bytes is None else host_bytes
    budgets = all_gather_object((device.capacity, host), control)
    return RankResources(
        device_bytes=min(one for one, _ in budgets),
        host_bytes=min(other for _, other in budgets),
        **asdict(rates),
    )


def _measured(
    device: Device[Any],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    control: dist.ProcessGroup | None,
) -> Rates:
    figures = calibrated(
        GroupCommunicator(group),
        device.torch_device,
        group=control,
        room=None if device.torch_device.type == "cpu" else max(device.capacity - device.used, 0) // 4,
    )
    return rates_of(figures, dtype, ranks=1 if group is None else dist.get_world_size(group))


def rates_of(figures: Hardware, dtype: torch.dtype, *, ranks: int) -> Rates:
    """The rates that a plan counts with.

    Args:
        figures: The figures of the machine.
        dtype: The dtype that forward and backward compute in.
        ranks: Number of ranks; a single one gathers nothing, and keeps the default.
    """
    collective = Rates().collective
    if ranks > 1:
        collective = sent_share("all_gather", ranks) / figures.link(ranks).throughput("all_gather", ranks)
    return Rates(
        to_device=figures.to_device,
        to_host=figures.to_host,
        host_step=1 / figures.host_update,
        device_step=1 / figures.fused_update,
        collective=collective,
        flops=figures.flops(str(dtype).removeprefix("torch.")),
    )


def available_host_bytes(local_world_size: int = 1) -> int:
    """A rank's share of the host memory that is free, with some left for everything else.

    Memory that only caches files counts as free, and the limit of a container as the size of the machine.

    Example:
        >>> 0 < available_host_bytes(2) < available_host_bytes()
        True
    """
    free = min(_free_of_machine(), _free_of_container(), host_memory())
    return max(int(free * _HOST_SHARE) // local_world_size, 1)


def _free_of_machine() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return host_memory()


def _free_of_container() -> int:
    for limit, used in _CGROUP:
        with suppress(OSError, ValueError):  # no such file, or "max"
            return max(int(Path(limit).read_text()) - int(Path(used).read_text()), 1)
    return host_memory()

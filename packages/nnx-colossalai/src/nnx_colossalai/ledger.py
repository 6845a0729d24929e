"""The ledger of a device's memory.

Which memory belongs to the device and which to the host, and how much of the device's is in use.

On a host that stands for a device no tensor tells where it lies, so what was handed out is remembered by
its storage, weakly: memory that is forgotten without being released is noticed. It never holds a tensor
alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from threading import RLock

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nnx_colossalai.plan.spec import format_bytes
from nnx_core.errors import NnxError

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
    """Return True if nothing refers to the storage any more."""
    return bool(key.expired())  # type: ignore[no-untyped-call]


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

"""Account for the memory of a device that is simulated in host memory.

A tensor in host memory does not tell whether it counts as device or host memory. So the ledger records every
allocation by its storage. It refers to storages weakly: it keeps no tensor alive, and notices memory that is
freed without `Ledger.release`.
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
"""A weak reference to a storage; it stays unique for as long as the key exists."""


class Direction(str, Enum):
    """The direction of a copy."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


@dataclass(slots=True)
class _Entry:
    nbytes: int
    on_device: bool
    resident: bool = True


class Ledger:
    """Accounts for the memory of one simulated device.

    Args:
        name: The name of the device in errors.
        capacity: The bytes that may be in use at a time.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self._entries: dict[StorageWeakRef, _Entry] = {}
        self._used = 0
        # Training drops some storages in every step; above this number of entries expired ones are removed.
        self._most_entries = _FEW
        self._lock = RLock()

    @property
    def used(self) -> int:
        """The bytes of device memory in use."""
        with self._lock:
            self._forget_expired()
            return self._used

    def reserve(self, nbytes: int) -> None:
        """Count bytes as in use before their allocation.

        Raises:
            DeviceMemoryError: There is no room.
        """
        with self._lock:
            if self._used + nbytes > self.capacity:
                # Only now, because checking all storages takes time.
                self._forget_expired()
            if self._used + nbytes > self.capacity:
                raise DeviceMemoryError.no_room(
                    self.name, asked=nbytes, used=self._used, allowed=self.capacity
                )
            self._used += nbytes

    def add_device(self, *tensors: Tensor) -> None:
        """Record device memory whose bytes were reserved."""
        self._add(tensors, on_device=True)

    def add_host(self, tensor: Tensor) -> None:
        """Record host memory."""
        self._add((tensor,), on_device=False)

    def release(self, tensor: Tensor) -> None:
        """Count a tensor's memory as free."""
        with self._lock:
            entry = self._own(tensor)
            if not entry.resident:
                raise ValueError("cannot release memory twice")
            entry.resident = False
            self._used -= entry.nbytes

    def restore(self, tensor: Tensor) -> int:
        """Reserve a released tensor's bytes again, and return their number.

        Raises:
            DeviceMemoryError: There is no room.
        """
        with self._lock:
            entry = self._own(tensor)
            if entry.resident:
                raise ValueError("cannot restore memory that was not released")
            self.reserve(entry.nbytes)
            entry.resident = True
            return entry.nbytes

    def cancel(self, nbytes: int) -> None:
        """Cancel a reservation whose allocation failed."""
        with self._lock:
            self._used -= nbytes

    def direction(self, target: Tensor, source: Tensor) -> Direction:
        """Return the direction of a copy; an unrecorded tensor counts as opposite to the recorded one."""
        with self._lock:
            sides = [self._side(target), self._side(source)]
        if sides[0] == sides[1]:
            wrong = {
                None: "this device allocated neither tensor",
                True: f"both tensors are on {self.name}",
                False: "both tensors are on the host",
            }
            raise ValueError(
                f"cannot copy: {wrong[sides[0]]}, expected one on the host and one on {self.name}"
            )
        to_device = sides[0] is True or sides[1] is False
        return Direction.TO_DEVICE if to_device else Direction.TO_HOST

    def check_resident(self, *tensors: Tensor) -> None:
        """Raise an error for tensors whose memory is released."""
        with self._lock:
            for tensor in tensors:
                entry = self._entries.get(storage_key(tensor))
                if entry is not None and not entry.resident:
                    raise ValueError("cannot copy from or to released memory")

    def _own(self, tensor: Tensor) -> _Entry:
        entry = self._entries.get(storage_key(tensor))
        if entry is None or not entry.on_device:
            raise ValueError("this device did not allocate the tensor as device memory")
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
    """Raise an error for a copy that would broadcast."""
    if target.shape != source.shape:
        raise ValueError(f"cannot copy shape {tuple(source.shape)} into shape {tuple(target.shape)}")


def storage_key(tensor: Tensor) -> StorageKey:
    """Return the key of a tensor's storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_gone(key: StorageKey) -> bool:
    """Return True if the storage is freed."""
    return bool(key.expired())  # type: ignore[no-untyped-call]


_REMEDY = (
    "Raise device_memory, offload more of the model to host memory (a higher offload_fraction or "
    "stream_fraction), or lower the batch size."
)


class DeviceMemoryError(NnxError, MemoryError):
    """Raised when a device has no room for an allocation.

    Args:
        message: A sentence that names the failure.
        remedy: A sentence that says how to avoid it.
        asked: The bytes requested.
        used: The bytes in use at that moment.
        allowed: The bytes that this rank may use.
    """

    def __init__(
        self, message: str, *, remedy: str = _REMEDY, asked: int = 0, used: int = 0, allowed: int = 0
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.asked, self.used, self.allowed = asked, used, allowed

    @classmethod
    def no_room(cls, device: str, *, asked: int, used: int, allowed: int) -> DeviceMemoryError:
        """Make the error of one allocation.

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
        # Ranks send each other pickled errors, which would lose these numbers without it.
        return (_rebuild, (type(self), self.message, self.remedy, self.asked, self.used, self.allowed))


def _rebuild(
    cls: type[DeviceMemoryError], message: str, remedy: str, asked: int, used: int, allowed: int
) -> DeviceMemoryError:
    return cls(message, remedy=remedy, asked=asked, used=used, allowed=allowed)

"""A CUDA device: two copy streams beside the compute stream, and memory of the caching allocator.

Only this file calls ``torch.cuda``. It was written without a GPU at hand: no line of it has run on one yet.

The device does not use ``record_stream``, which would free memory at times that depend on timing. Instead it
refers to all tensors of a copy until the copy is complete. `release` makes the compute stream wait for copies
that still use the memory. The allocator reuses memory in the order of the compute stream, so it never reuses
memory that a copy uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nnx_checkpoint.writing.pinned import pinned_empty
from nnx_colossalai.device import Device, Traffic
from nnx_colossalai.ledger import DeviceMemoryError, StorageKey, check_shapes, is_gone, storage_key

__all__ = ["CudaDevice"]

T = TypeVar("T")

_SHARE = 0.9
_FOR_COMMUNICATION = 2**30


def default_capacity(available: int, world_size: int) -> int:
    """Return the bytes of a GPU that chunks are planned with, unless the user sets a budget.

    The rest is for memory that no plan counts: cuBLAS workspaces, gaps between the allocator's blocks and,
    above one rank, NCCL's buffers, which the allocator does not manage.

    Args:
        available: The free bytes.
        world_size: The number of ranks.

    Example:
        >>> default_capacity(80 * 2**30, 1) / 2**30, default_capacity(80 * 2**30, 8) / 2**30
        (72.0, 71.0)
    """
    reserved = _FOR_COMMUNICATION if world_size > 1 else 0
    return max(int(available * _SHARE) - reserved, 0)


@dataclass(slots=True)
class _Running:
    """A copy that may be running, and the tensors that must live until it is complete."""

    event: torch.cuda.Event
    tensors: tuple[Tensor, ...]


class CudaDevice(Device[torch.cuda.Event]):
    """A CUDA device, or a share of it.

    Args:
        torch_device: The torch device.
        capacity: Bytes that this process may reserve for all of torch's allocations; None: `default_capacity`
            of the free bytes.
        world_size: The number of ranks.
    """

    def __init__(
        self, torch_device: torch.device, capacity: int | None = None, *, world_size: int = 1
    ) -> None:
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self.torch_device = torch.device("cuda", index)
        self.traffic = Traffic()
        free, total = torch.cuda.mem_get_info(index)
        # Memory that the caching allocator holds is not free for CUDA, but this process can use it.
        available = free + torch.cuda.memory_reserved(index)
        self._fraction_before: float | None = None
        if capacity is None:
            self._capacity = default_capacity(available, world_size)
        else:
            self._capacity = min(capacity, available)
            if capacity < available:
                self._fraction_before = torch.cuda.get_per_process_memory_fraction(index)
                torch.cuda.set_per_process_memory_fraction(self._capacity / total, index)
        self._to_device = _new_stream(self.torch_device)
        self._to_host = _new_stream(self.torch_device)
        self._running: deque[_Running] = deque()
        self._sizes: dict[StorageKey, int] = {}
        self._lock = RLock()

    @property
    @override
    def capacity(self) -> int:
        return self._capacity

    @property
    @override
    def used(self) -> int:
        """The bytes that the caching allocator holds, in use or not: other processes cannot have them."""
        return torch.cuda.memory_reserved(self.torch_device)

    @override
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        def allocate() -> Tensor:
            with torch.inference_mode(False):
                return torch.empty(numel, dtype=dtype, device=self.torch_device)

        return self._with_room(numel * dtype.itemsize, allocate)

    @override
    def release(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            # The compute stream gets the memory next, so it waits for the copies.
            for running in self._running:
                if any(_shares(used, tensor) for used in running.tensors):
                    self._stream().wait_event(running.event)
            self._sizes = {key: size for key, size in self._sizes.items() if not is_gone(key)}
            self._sizes[storage_key(tensor)] = storage.nbytes()
        storage.resize_(0)

    @override
    def restore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        with self._lock:
            nbytes = self._sizes[key]
        self._with_room(nbytes, lambda: storage.resize_(nbytes))
        # Only after success: if there was no room, a retry needs the size.
        with self._lock:
            self._sizes.pop(key, None)

    @override
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return pinned_empty(numel, dtype)

    @override
    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        check_shapes(target, source)
        nbytes = target.numel() * target.element_size()
        # The conversion on the host is slow, so it happens outside of the lock.
        if not source.is_cuda and source.dtype != target.dtype:
            source = self._converted_on_host(source, target.dtype)
        with self._lock, torch.cuda.device(self.torch_device), torch.no_grad():
            self._forget_finished()
            if target.is_cuda:
                lane = self._to_device
                self.traffic.to_device += nbytes
            else:
                lane = self._to_host
                self.traffic.to_host += nbytes
            # Kernels launched so far may still write the source or read the target.
            lane.wait_stream(self._stream())
            with torch.cuda.stream(lane):
                converted = source if source.dtype == target.dtype else self._converted(source, target.dtype)
                # Through ``data``, which has its own version counter: autograd must not see the write.
                target.data.copy_(converted, non_blocking=True)
                event = _new_event()
                event.record(lane)
            self._running.append(_Running(event, (target, source, converted)))
        return event

    @override
    def compute_waits(self, event: torch.cuda.Event) -> None:
        self._stream().wait_event(event)

    @override
    def host_waits(self, event: torch.cuda.Event) -> None:
        event.synchronize()
        # The next copy would drop the references too, but it may come much later.
        with self._lock:
            self._forget_finished()

    @override
    def close(self) -> None:
        self._to_device.synchronize()
        self._to_host.synchronize()
        self._running.clear()
        if self._fraction_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.torch_device)

    def _stream(self) -> torch.cuda.Stream:
        """Return the compute stream: the current stream of the calling thread."""
        return torch.cuda.current_stream(self.torch_device)

    def _converted(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        # Called with the lane as the current stream: the allocator reuses the memory on that lane only.
        return self._with_room(source.numel() * dtype.itemsize, lambda: source.to(dtype))

    def _converted_on_host(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        # torch keeps pinned memory until asynchronous copies from it are complete.
        with torch.no_grad():
            return _pinned(source.shape, dtype).copy_(source)

    def _forget_finished(self) -> None:
        self._running = deque(running for running in self._running if not _is_over(running.event))

    def _with_room(self, nbytes: int, allocate: Callable[[], T]) -> T:
        """Allocate; if there is no room, wait for all copies and try once more."""
        try:
            return allocate()
        except torch.OutOfMemoryError:
            # Running copies hold tensors that are deleted elsewhere.
            with self._lock:
                for running in self._running:
                    running.event.synchronize()
                self._forget_finished()
        try:
            return allocate()
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError.no_room(
                str(self.torch_device), asked=nbytes, used=self.used, allowed=self.capacity
            ) from error


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate from torch's cache of pinned memory."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.is_cuda and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

"""A host that behaves like a device: a memory limit, slow copy lanes, memory that turns invalid.

On it a fault of the engine's schedule gives wrong numbers, on any machine. Copies run on their own threads,
after random delays. They read their source when they run, not when they are requested, so an early overwrite
of a source shows. The target is filled with NaN until its copy is complete, so a missing wait shows.
Released memory is filled with NaN as well, so its use shows; it stays allocated underneath, because a read of
freed memory would crash the process instead of giving an error.
This file owns the threads; they end with `SimDevice.close`, or when the device is deleted.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor
from typing_extensions import override

from nnx_colossalai.device import Device, Traffic, host_memory
from nnx_colossalai.ledger import DeviceMemoryError, Direction, Ledger, check_shapes

_WAIT_LIMIT = 60.0
"""Seconds after which a wait counts as hung."""


class SimEvent:
    """The end of one copy."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Return True if the copy is complete."""
        return self._over.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """Release the threads that wait."""
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """Block until the copy is complete.

        Raises:
            TimeoutError: It does not end.
        """
        if not self._over.wait(_WAIT_LIMIT):
            raise TimeoutError(f"a simulated copy is not over after {_WAIT_LIMIT:.0f} s")
        if self._error is not None:
            raise RuntimeError("a simulated copy failed") from self._error


@dataclass(slots=True, eq=False)
class _Copy:
    target: Tensor
    source: Tensor
    event: SimEvent = field(default_factory=SimEvent)


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction of the bus.

    Attributes:
        moving: Held while bytes move, by both lanes and by code that frees memory.
        open: Cleared while the lane is paused.
    """

    bandwidth: float | None
    delays: random.Random | None
    max_delay: float
    moving: threading.Lock
    open: threading.Event
    copies: SimpleQueue[_Copy | None] = field(default_factory=SimpleQueue)

    def run(self) -> None:
        """Run copies in order, until the end."""
        while (copy := self.copies.get()) is not None:
            self._pause(copy)
            while not self._move(copy):
                self.open.wait()

    def _pause(self, copy: _Copy) -> None:
        seconds = 0.0
        if self.bandwidth is not None:
            seconds += copy.target.numel() * copy.target.element_size() / self.bandwidth
        if self.delays is not None and self.delays.random() < 0.75:
            seconds += self.delays.uniform(0, self.max_delay)
        if seconds:
            time.sleep(seconds)

    def _move(self, copy: _Copy) -> bool:
        """Copy, unless the lane stands still; whether it was done."""
        error: BaseException | None = None
        with self.moving:
            if not self.open.is_set():
                return False
            try:
                with torch.no_grad():
                    copy.target.copy_(copy.source)
            except Exception as caught:
                error = caught
            # Memory that nobody else refers to is free from now on.
            copy.target = copy.source = torch.empty(0)
        copy.event.finish(error)
        return True


class SimDevice(Device[SimEvent]):
    """A simulated device in host memory.

    Only memory of `empty` counts against the memory limit, not torch's memory for activations.

    Args:
        capacity: Bytes of device memory; None: as much as the machine has.
        to_device: Bytes per second from host to device; None: no limit.
        to_host: Bytes per second from device to host; None: no limit.
        delays: Seed of the random delays before copies; None: no delays.
        max_delay: Longest delay, in seconds.

    Example:
        >>> device = SimDevice(capacity=1024, delays=0)
        >>> weights, staging = device.empty(4, torch.float32), device.host_empty(4, torch.float32)
        >>> with device.paused():
        ...     event = device.copy(weights, staging.fill_(1))
        ...     too_early = weights.sum().item()
        >>> device.compute_waits(event)
        >>> too_early, weights.sum().item()
        (nan, 4.0)
        >>> device.close()
    """

    torch_device = torch.device("cpu")

    def __init__(
        self,
        capacity: int | None = None,
        *,
        to_device: float | None = None,
        to_host: float | None = None,
        delays: int | None = None,
        max_delay: float = 0.001,
    ) -> None:
        self.traffic = Traffic()
        self._ledger = Ledger("the simulated device", host_memory() if capacity is None else capacity)
        self._moving, self._open = threading.Lock(), threading.Event()
        self._open.set()
        self._running: list[_Copy] = []
        self._closed = False
        self._lanes: dict[Direction, _Lane] = {}
        for direction, bandwidth in ((Direction.TO_DEVICE, to_device), (Direction.TO_HOST, to_host)):
            source = None if delays is None else random.Random(f"{delays} {direction.value}")
            self._lanes[direction] = _Lane(bandwidth, source, max_delay, self._moving, self._open)
        # The threads refer to lanes only, so that a forgotten device is collected.
        self._threads = [
            threading.Thread(target=lane.run, name=f"sim-{direction.value}", daemon=True)
            for direction, lane in self._lanes.items()
        ]
        for thread, lane in zip(self._threads, self._lanes.values(), strict=True):
            thread.start()
            _at_work[thread] = lane
        self._stop = weakref.finalize(self, _stop, list(self._lanes.values()))

    @property
    @override
    def capacity(self) -> int:
        return self._ledger.capacity

    @capacity.setter
    def capacity(self, nbytes: int) -> None:
        self._ledger.capacity = nbytes

    @property
    @override
    def used(self) -> int:
        return self._ledger.used

    @override
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        try:
            self._ledger.reserve(nbytes)
        except DeviceMemoryError:
            # Memory that is forgotten may be held by copies under way, as by a real allocator.
            self._drain()
            self._ledger.reserve(nbytes)
        tensor = _new(numel, dtype)
        self._ledger.add_device(tensor)
        return tensor

    @override
    def release(self, tensor: Tensor) -> None:
        self._ledger.release(tensor)
        storage = tensor.untyped_storage().data_ptr()
        with self._moving:
            for copy in self._unfinished():
                # They end as if memory were reused only after them.
                if copy.source.untyped_storage().data_ptr() == storage:
                    copy.source = copy.source.clone()
                if copy.target.untyped_storage().data_ptr() == storage:
                    copy.target = torch.empty_like(copy.target)
            _poison(tensor)

    @override
    def restore(self, tensor: Tensor) -> None:
        try:
            self._ledger.restore(tensor)
        except DeviceMemoryError:
            self._drain()
            self._ledger.restore(tensor)
        _poison(tensor)

    @override
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = _new(numel, dtype)
        self._ledger.add_host(tensor)
        return tensor

    @override
    def copy(self, target: Tensor, source: Tensor) -> SimEvent:
        if self._closed:
            raise RuntimeError("the simulated device is closed")
        check_shapes(target, source)
        self._ledger.check_resident(target, source)
        direction = self._ledger.direction(target, source)
        # ``data`` has a version counter of its own.
        copy = _Copy(target.data, source.data)
        nbytes = target.numel() * target.element_size()
        with self._moving:
            if direction is Direction.TO_DEVICE:
                self.traffic.to_device += nbytes
            else:
                self.traffic.to_host += nbytes
            _poison(copy.target)
            self._running = [*self._unfinished(), copy]
            self._lanes[direction].copies.put(copy)
        return copy.event

    @override
    def compute_waits(self, event: SimEvent) -> None:
        event.wait()

    @override
    def host_waits(self, event: SimEvent) -> None:
        event.wait()

    @override
    def close(self) -> None:
        self._closed = True
        self._open.set()
        self._stop()
        for thread in self._threads:
            thread.join(_WAIT_LIMIT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause all copies, so that code without a wait is sure to run too early."""
        with self._moving:
            self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def _unfinished(self) -> list[_Copy]:
        return [copy for copy in self._running if not copy.event.over]

    def _drain(self) -> None:
        with self._moving:
            events = [copy.event for copy in self._unfinished()]
        for event in events:
            event.wait()


def _stop(lanes: Sequence[_Lane]) -> None:
    for lane in lanes:
        lane.copies.put(None)


_at_work: weakref.WeakKeyDictionary[threading.Thread, _Lane] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    """Wait for the lanes of devices that nobody closed.

    A thread that lets a tensor go while the interpreter is taken down aborts the process.
    """
    lanes = dict(_at_work)
    for lane in lanes.values():
        lane.open.set()
    _stop(list(lanes.values()))
    for thread in lanes:
        thread.join(_WAIT_LIMIT)


def _new(numel: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
    _poison(tensor)
    return tensor


def _poison(tensor: Tensor) -> None:
    """Fill with values that no computation should see: NaN, or all bits set."""
    data = tensor.data
    with torch.no_grad():
        if data.dtype.is_floating_point or data.dtype.is_complex:
            data.fill_(float("nan"))
        elif data.dtype == torch.bool:
            data.fill_(True)
        else:
            data.fill_(torch.iinfo(data.dtype).max)

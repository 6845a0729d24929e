"""Measure the peak bytes of each phase of a step: CUDA's counters, or torch's CPU allocator in the profiler.

The profiler reports each block that the CPU's allocator makes and frees. A block that one operator makes and
frees is its workspace, and counts as no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from nnx_core._torch_compat import StorageWeakRef

__all__ = ["Block", "CpuMeter", "CudaMeter", "Measured", "Meter", "meter_of"]

_MAKES = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like")
) | {"[memory]"}
"""Operators whose block is a tensor: its end within them says nothing."""
_NEVER = 1 << 62
_MARK = "nnx:"


@dataclass(frozen=True, slots=True)
class Measured:
    """The truth of one phase.

    Attributes:
        tensors: The most bytes of tensors at one time; on CUDA all blocks count.
        allocated: The most bytes of all blocks.
    """

    tensors: int
    allocated: int


class Meter(ABC):
    """Measures phases, which follow one another. A phase that begins again replaces its first measurement."""

    @abstractmethod
    def begin(self, phase: str) -> None:
        """Begin a phase, and end the one before it."""

    @abstractmethod
    def finish(self) -> Mapping[str, Measured]:
        """End the last phase; return the truth of each."""

    @abstractmethod
    def close(self) -> None:
        """Stop measuring, also after an error."""


def meter_of(device: torch.device, held: Iterable[Tensor]) -> Meter:
    """Return a meter for a device, which measures from now on.

    Args:
        device: The device of this rank.
        held: The tensors that exist already.
    """
    return CudaMeter(device) if device.type == "cuda" else CpuMeter(held)


class CudaMeter(Meter):
    """Reads the counters of CUDA's caching allocator. It was not tried on a GPU.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = ""
        self._found: dict[str, Measured] = {}

    @override
    def begin(self, phase: str) -> None:
        self._end()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._phase = phase

    def _end(self) -> None:
        if self._phase:
            most = torch.cuda.max_memory_allocated(self._device)
            self._found[self._phase] = Measured(most, most)
            self._phase = ""

    @override
    def finish(self) -> Mapping[str, Measured]:
        self._end()
        return self._found

    @override
    def close(self) -> None:
        pass


class Block(NamedTuple):
    """Memory of the allocator, from its start to its end, in nanoseconds."""

    start: int
    end: int
    nbytes: int
    is_workspace: bool
    stack: tuple[str, ...]


Stack = tuple[tuple[str, int], ...]
"""The names and the ends of the operators around a block."""


class CpuMeter(Meter):
    """Follows the blocks of torch's CPU allocator with the profiler.

    Args:
        held: The tensors that exist already. Those that live at the first phase count.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
        # The profiler does not report the end of blocks that are older than itself.
        weak: Any = StorageWeakRef
        self._older = {at: (weak(one), one.nbytes()) for at, one in storages.items() if at}
        self._held: dict[int, int] | None = None
        self._phases: list[str] = []
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    @override
    def begin(self, phase: str) -> None:
        if self._held is None:
            living = ((at, nbytes) for at, (storage, nbytes) in self._older.items() if not storage.expired())
            self._held = dict(living)
        self._phases = [one for one in self._phases if one != phase] + [phase]
        self._mark(phase)

    def _mark(self, name: str) -> None:
        with record_function(_MARK + name):
            pass

    @override
    def finish(self) -> Mapping[str, Measured]:
        blocks, marks = self.blocks()
        starts = [marks[phase] for phase in self._phases]
        return {
            phase: peak_of(blocks, start, until)
            for phase, start, until in zip(self._phases, starts, [*starts[1:], marks["end"]], strict=True)
        }

    def blocks(self) -> tuple[list[Block], dict[str, int]]:
        """End the last phase; return all blocks, and the start of each phase in nanoseconds."""
        self._mark("end")
        self.close()
        stopped: Any = self._profiler.profiler
        return _Ledger(self._held or {}).read(stopped.kineto_results.experimental_event_tree())

    @override
    def close(self) -> None:
        profiler: Any = self._profiler.profiler
        if profiler is not None and profiler.kineto_results is None:
            self._profiler.stop()


def peak_of(blocks: list[Block], start: int, until: int) -> Measured:
    """Return the most bytes at one time from `start` to `until`."""
    changes = [(block.start, block.nbytes, block) for block in blocks]
    changes += [(block.end, -block.nbytes, block) for block in blocks]
    tensors = everything = 0
    most: tuple[int, int] | None = None
    for time, nbytes, block in sorted(changes, key=lambda change: change[0]):
        if time >= until:
            break
        if time >= start and most is None:
            most = tensors, everything
        everything += nbytes
        tensors += 0 if block.is_workspace else nbytes
        if most is not None:
            most = max(most[0], tensors), max(most[1], everything)
    return Measured(*(most or (tensors, everything)))


class _Ledger:
    """The blocks that are alive while the profiler's events are read in their order."""

    def __init__(self, held: Mapping[int, int]) -> None:
        self._live: dict[int, tuple[int, int, Stack]] = {
            address: (0, nbytes, ()) for address, nbytes in held.items()
        }
        self._addresses = sorted(self._live)
        self._blocks: list[Block] = []
        self._marks: dict[str, int] = {}

    def read(self, roots: Iterable[Any]) -> tuple[list[Block], dict[str, int]]:
        """Return all blocks, and the last time of each mark."""
        for time, address, nbytes, stack in sorted(self._events(roots), key=lambda one: one[0]):
            if nbytes < 0:
                if address in self._live:
                    self._end(address, time, seen=True)
            else:
                self._begin(address, time, nbytes, stack)
        for start, nbytes, stack in self._live.values():
            self._blocks.append(_block(start, _NEVER, nbytes, stack))
        return self._blocks, self._marks

    def _events(self, roots: Iterable[Any]) -> list[tuple[int, int, int, Stack]]:
        found: list[tuple[int, int, int, Stack]] = []
        waiting: list[tuple[Any, Stack]] = [(root, ()) for root in roots]
        while waiting:
            event, stack = waiting.pop()
            fields = event.extra_fields
            if hasattr(fields, "alloc_size"):
                found.append((event.start_time_ns, fields.ptr, fields.alloc_size, stack))
                continue
            if event.name.startswith(_MARK):
                name = event.name.removeprefix(_MARK)
                self._marks[name] = max(event.start_time_ns, self._marks.get(name, 0))
            inner = (*stack, (event.name, event.end_time_ns))
            waiting += [(child, inner) for child in event.children]
        return found

    def _begin(self, address: int, time: int, nbytes: int, stack: Stack) -> None:
        """Note a new block. Those in its place have ended, unseen, as in a thread of gloo."""
        place = bisect_left(self._addresses, address)
        covered = self._addresses[place : bisect_left(self._addresses, address + nbytes)]
        before = self._addresses[place - 1 : place] if place else []
        for other in covered + [one for one in before if one + self._live[one][1] > address]:
            self._end(other, time, seen=False)
        insort(self._addresses, address)
        self._live[address] = time, nbytes, stack

    def _end(self, address: int, time: int, *, seen: bool) -> None:
        start, nbytes, stack = self._live.pop(address)
        self._addresses.remove(address)
        last = time if seen else min(time, self._end_unseen(start, stack))
        self._blocks.append(_block(start, last, nbytes, stack))

    def _end_unseen(self, start: int, stack: Stack) -> int:
        """Return when a block ended at the latest that another thread freed: with its collective or phase."""
        sent = [until for name, until in stack if name.startswith(("c10d::", "gloo:"))]
        return (
            sent[0] if sent else min((time for time in self._marks.values() if time > start), default=start)
        )


def _block(start: int, end: int, nbytes: int, stack: Stack) -> Block:
    operators = [until for name, until in stack if name.startswith("aten::") and name not in _MAKES]
    is_workspace = bool(operators) and end <= operators[-1]
    return Block(start, end, nbytes, is_workspace, tuple(name for name, _ in stack))

"""Move gradients from a backward with working weights to the masters, at world size 1.

Autograd accumulates into ``param.grad`` at the working dtype. Hooks put an earlier gradient aside before it
does, so that no sum is computed in 16 bits. Hooks after it take the new gradient. On the device they convert
it, several small ones together. For masters in host memory the copy lane sends it at its own dtype, and the
host converts it. At the end of the backward the masters get their gradients.

This file owns the staging memory and the hooks on parameters; `local.Step` decides when a backward ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nnx_colossalai._torch_compat import Silenced, has_memory_alone, make_last, without_guards
from nnx_colossalai.chunks.local_chunk import LocalChunk, Slot, view_like
from nnx_colossalai.device import Device
from nnx_core._torch_compat import foreach_copy_

_BATCH = 1 << 20
"""Elements that wait for one conversion: a Python call between two kernels costs more than a small kernel."""

_LARGE = 1 << 14
"""The smallest number of elements of a total with memory of its own."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A gradient that the copy lane sends to host memory.

    Attributes:
        staging: The staging memory; None if the copy writes the total itself.
    """

    slot: Slot
    target: Tensor
    staging: Tensor | None
    event: Any
    nbytes: int


class Gradients:
    """Takes gradients at the working dtype and keeps totals for the masters.

    Args:
        device: The device that allocates and copies.
    """

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        self.limit = 0
        """Bytes that may be in flight before `take` waits."""
        self._transfers: deque[_Transfer] = deque()
        self._bytes_in_flight = 0
        self._staging: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._unconverted: dict[Slot, Tensor] = {}
        self._elements_unconverted = 0

    def put_aside(self, slot: Slot) -> None:
        """Add ``grad`` to the total before autograd accumulates into it."""
        parameter = slot.parameter
        kept = parameter.grad
        if kept is not None:
            if slot in self._unconverted:
                self._convert()
            parameter.grad = None
            # It has the working dtype if the user has set it, or if a failed backward has left it.
            if kept.dtype != slot.master.dtype:
                kept = kept.to(slot.master.dtype)
            slot.total = kept if slot.total is None else self._sum(slot, slot.total, kept)

    def take(self, slot: Slot) -> None:
        """Take the gradient after autograd has accumulated, and free it as soon as it is copied."""
        self.take_all((slot,))

    def take_all(self, slots: Iterable[Slot]) -> None:
        """Take the gradients of several parameters."""
        # Only a backward with create_graph has gradients enabled; others save the context manager.
        with torch.set_grad_enabled(False) if torch.is_grad_enabled() else nullcontext():
            for slot in slots:
                gradient = slot.parameter.grad
                if gradient is not None:
                    slot.parameter.grad = None
                    self._take(slot, gradient)

    def _take(self, slot: Slot, gradient: Tensor) -> None:
        if slot in self._unconverted:
            self._convert()
        if gradient.layout is not torch.strided or gradient.requires_grad:
            self._take_unusual(slot, gradient)
        elif slot.on_host:
            self._send(slot, gradient)
        elif slot.total is None:
            self._unconverted[slot] = gradient
            self._elements_unconverted += slot.numel
            if self._elements_unconverted >= _BATCH:
                self._convert()
        else:
            slot.total = self._sum(slot, slot.total, gradient)

    def _convert(self) -> None:
        """Convert the waiting gradients to totals."""
        waiting = self._unconverted
        self._unconverted, self._elements_unconverted = {}, 0
        with torch.no_grad():
            totals = self._new_together(list(waiting))
            foreach_copy_(totals, list(waiting.values()))
        for slot, total in zip(waiting, totals, strict=True):
            slot.total = total

    def _new_together(self, slots: list[Slot]) -> list[Tensor]:
        """Allocate totals on the device; small ones share memory.

        Each large one has memory of its own. Fewer, larger blocks would be returned to the system when they
        are freed, and allocating them again in every step takes longer than the conversion.
        """
        small: dict[torch.dtype, int] = {}
        offsets = {}
        large: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for slot in slots:
            if slot.numel < _LARGE:
                offsets[slot] = small.get(slot.dtype, 0)
                small[slot.dtype] = offsets[slot] + slot.numel
            else:
                large[slot.dtype].append(slot.numel)
        shared = {dtype: self._device.empty(numel, dtype) for dtype, numel in small.items()}
        own = {dtype: iter(self._device.empty_each(numels, dtype)) for dtype, numels in large.items()}
        return [
            shared[slot.dtype].as_strided(*slot.geometry, offsets[slot])
            if slot in offsets
            else next(own[slot.dtype]).as_strided(*slot.geometry)
            for slot in slots
        ]

    def _take_unusual(self, slot: Slot, gradient: Tensor) -> None:
        """Take a sparse gradient, or one with a graph, without staging."""
        # The lane may still write this slot's total.
        self._drain()
        with torch.enable_grad():
            moved = gradient.to(slot.master.device, slot.master.dtype)
            slot.total = moved if slot.total is None else slot.total + moved

    def _sum(self, slot: Slot, total: Tensor, gradient: Tensor) -> Tensor:
        if total.layout is not torch.strided or total.requires_grad or gradient.requires_grad:
            return total + gradient.to(total.device, total.dtype)
        # Converted first, because an in-place addition across dtypes is several times slower.
        return total.add_(gradient.to(total.device, total.dtype))

    def _new(self, slot: Slot) -> Tensor:
        if slot.on_host:
            return _on_host(slot, lambda numel, dtype: torch.empty(numel, dtype=dtype))
        return self._device.empty(slot.numel, slot.dtype).as_strided(*slot.geometry)

    def _send(self, slot: Slot, gradient: Tensor) -> None:
        numel, dtype = gradient.numel(), gradient.dtype
        nbytes = numel * gradient.element_size()
        while self._transfers and self._bytes_in_flight + nbytes > self.limit:
            self._receive()
        # The first gradient in the master's dtype becomes the total; others need a conversion or a sum.
        if dtype == slot.master.dtype and slot.total is None:
            slot.total = target = _on_host(slot, self._device.host_empty)
            staging = None
        else:
            free = self._staging[numel, dtype]
            staging = free.pop() if free else self._device.host_empty(numel, dtype)
            target = view_like(staging, slot.template)
        event = self._device.copy(target, gradient)
        self._transfers.append(_Transfer(slot, target, staging, event, nbytes))
        self._bytes_in_flight += nbytes

    def _receive(self) -> None:
        """Wait for the oldest transfer, and add it to its total."""
        transfer = self._transfers.popleft()
        self._bytes_in_flight -= transfer.nbytes
        self._device.host_waits(transfer.event)
        if transfer.staging is None:
            return
        slot = transfer.slot
        with torch.no_grad():
            if slot.total is None:
                slot.total = self._new(slot)
                slot.total.copy_(transfer.target)
            else:
                slot.total = self._sum(slot, slot.total, transfer.target)
        # Free only now: until the event the lane writes it, and until the sum is done the host reads it.
        self._staging[transfer.staging.numel(), transfer.staging.dtype].append(transfer.staging)

    def _drain(self) -> None:
        while self._transfers:
            self._receive()

    def finish(self) -> None:
        """Wait until all totals are complete."""
        if self._unconverted:
            self._convert()
        self._drain()

    def forget_staging(self) -> None:
        """Free the staging memory, which backwards otherwise reuse."""
        self._drain()
        self._staging.clear()

    def give(self, slot: Slot) -> None:
        """Set the total as the parameter's gradient; the parameter shows its master."""
        parameter, master = slot.parameter, slot.master
        # The user has set this gradient in the step, or it was there before: autograd's are in the total.
        given = parameter.grad
        if given is not None and (given.dtype != master.dtype or given.device != master.device):
            given = given.to(master.device, master.dtype)
            parameter.grad = None
            slot.total = given if slot.total is None else self._sum(slot, slot.total, given)
        elif given is not None and slot.total is not None:
            slot.total = self._sum(slot, slot.total, given)
        if slot.total is not None:
            parameter.grad, slot.total = slot.total, None

    def put_back(self, slot: Slot) -> None:
        """Set the total as the gradient while the parameter shows working weights."""
        if slot.total is not None:
            # torch refuses a gradient of another dtype than the data, so show the master for the assignment.
            with without_guards():
                slot.parameter.data = slot.master
                self.give(slot)
                slot.parameter.data = slot.working  # type: ignore[assignment] # it has taken gradients of them


def _on_host(slot: Slot, allocate: Callable[[int, torch.dtype], Tensor]) -> Tensor:
    """Return host memory for a total, reused from the last step because pinning memory is slow.

    Args:
        slot: The parameter.
        allocate: A function that allocates flat memory, for the first total or while the last is still held.
    """
    if slot.memory is None or not has_memory_alone(slot.memory):
        slot.memory = allocate(slot.numel, slot.dtype)
    # A tensor of its own, so that version counter and graph of one gradient do not reach the next.
    return slot.memory.detach().as_strided(*slot.geometry)


_SMALL = 1 << 20
"""The most elements of a gradient that waits for others of its chunk."""


class Listener:
    """Hooks parameters of chunks: one call for each gradient, or one for all small gradients of a chunk.

    A Python call between two kernels costs about as much as a small kernel. So a chunk with masters on the
    device learns which of its small parameters gets its gradient last. Later backwards silence the hooks of
    the others, and convert all gradients together with the last one. If the order has changed, the end of the
    backward converts the rest. Every parameter has its hook when a backward begins, so that every backward is
    noticed: the first call silences the other hooks.

    Two gradients of one parameter in one backward must not be added in the working dtype. So grouping ends
    for good at a nested backward, or at a forward inside of a backward, which may start one. One case
    escapes: a nested backward that runs no forward, was absent when the order was learned, and reaches a
    small parameter twice.

    Args:
        gradients: The object that collects gradients for the masters.
        is_active: A function that returns True while a step is under way.
        notice: A function for each gradient that autograd is about to accumulate, or has accumulated.
        complete: A function for each gradient that was taken.
    """

    def __init__(
        self,
        gradients: Gradients,
        is_active: Callable[[], bool],
        notice: Callable[[], None],
        complete: Callable[[LocalChunk, Slot], None],
    ) -> None:
        self._gradients, self._is_active = gradients, is_active
        self._notice, self._complete = notice, complete
        self._last: dict[LocalChunk, Slot] = {}
        self._seen: set[Slot] = set()
        self._together: dict[LocalChunk, list[Slot]] = {}
        self._silenced = Silenced(())
        self._may_group = True

    def listen(self, chunk: LocalChunk) -> None:
        """Hook the trained parameters of a chunk, after all hooks of the user."""
        for slot in chunk.slots:
            parameter = slot.parameter
            if slot.handles:
                # The hook takes the gradient away: hooks that the user added since must still find it.
                make_last(slot.handles[0])
            elif parameter.requires_grad:
                after = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, chunk=chunk, slot=slot: self._after(chunk, slot)
                )
                slot.handles = (after,)
            if parameter.grad is not None:
                self.listen_before(slot)

    def listen_before(self, slot: Slot) -> None:
        """Hook a parameter that has a gradient, to put it aside before autograd adds to it."""
        parameter = slot.parameter
        if len(slot.handles) == 1 and parameter.requires_grad and parameter.grad is not None:
            before = parameter.register_hook(lambda _: self._before(slot))  # type: ignore[no-untyped-call]
            slot.handles = (*slot.handles, before)

    def stop(self, chunks: Iterable[LocalChunk]) -> None:
        """Remove all hooks, and drop all references to the chunks."""
        self.end_backward()
        for chunk in chunks:
            for slot in chunk.slots:
                for handle in slot.handles:
                    handle.remove()
                slot.handles = ()
        self._last.clear()
        self._seen.clear()

    def _before(self, slot: Slot) -> None:
        if self._is_active():
            self._notice()
            self._gradients.put_aside(slot)

    def _after(self, chunk: LocalChunk, slot: Slot) -> None:
        if not self._is_active():
            return
        if chunk in self._together and self._last[chunk] is slot:
            self._gradients.take_all(self._together[chunk])
        # Before `notice`, whose `begin_backward` puts every waiting slot's gradient aside as an earlier one.
        self._gradients.take(slot)
        self._notice()
        if chunk not in self._together:
            self._learn(chunk, slot)
        self._complete(chunk, slot)

    def _learn(self, chunk: LocalChunk, slot: Slot) -> None:
        # The second gradient of one parameter in one backward: grouped, both would be added in 16 bits.
        if slot in self._seen:
            self.stop_grouping()
            return
        self._seen.add(slot)
        if self._may_group and _may_wait(slot):
            self._last[chunk] = slot

    def begin_backward(self) -> None:
        """Silence the hooks of parameters whose gradients wait for the last one of their chunk."""
        # An earlier backward may have failed, and left its hooks silenced.
        self.end_backward()
        self._seen.clear()
        if not self._may_group or torch.is_grad_enabled():
            return
        for chunk, last in self._last.items():
            if last.parameter.requires_grad:
                self._together[chunk] = [
                    slot
                    for slot in chunk.slots
                    if slot is not last and slot.handles and slot.parameter.requires_grad and _may_wait(slot)
                ]
        waiting = [slot for together in self._together.values() for slot in together]
        for slot in waiting:
            if slot.parameter.grad is not None:
                self._gradients.put_aside(slot)
        self._silenced = Silenced(handle for slot in waiting for handle in slot.handles)

    def end_backward(self) -> bool:
        """Restore the hooks and take gradients that came after the last one; return True if any did."""
        self._silenced.end()
        together, self._together = self._together, {}
        is_late = False
        for chunk, slots in together.items():
            late = [slot for slot in slots if slot.parameter.grad is not None]
            if late:
                self._gradients.take_all(late)
                is_late = True
                # The next backward learns which parameter is the last now.
                del self._last[chunk]
        return is_late

    def stop_grouping(self) -> None:
        """Call a hook for every gradient from now on."""
        self._may_group = False
        self.end_backward()
        self._last.clear()


def _may_wait(slot: Slot) -> bool:
    return not slot.on_host and slot.numel <= _SMALL
